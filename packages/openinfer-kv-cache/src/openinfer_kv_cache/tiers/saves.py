"""`BlockSaves`: sealed blocks on their way into KV tiers, pinned until their copy has ended.

A block is sealed when the step that computed it was applied, so nothing writes to it any more, and a copy may begin
on any stream. While copies run, their blocks cannot be evicted. So that slow tiers do not take the pool away from
requests, only a share of it is saved at a time; what comes beyond it is not saved, and counted. Where blocks are short
for a sequence, copies that take longer than `PATIENCE_S` are cancelled.
"""

from collections.abc import Sequence

from openinfer_kv_cache.blocks import BlockPin, BlockPool
from openinfer_kv_cache.digest import Digest
from openinfer_kv_cache.tiers.port import TierPort, TierTransfer

PATIENCE_S = 0.05
_LEAST_BLOCKS = 8
_SHARE = 2  # of the pool, one in so many blocks may be on its way


class BlockSaves:
    """Saves of one pool."""

    def __init__(self, pool: BlockPool, port: TierPort) -> None:
        self._pool = pool
        self._port = port
        self._most_blocks = max(_LEAST_BLOCKS, pool.num_blocks // _SHARE)
        self._digests: list[Digest] = []
        self._pins: list[BlockPin] = []  # of blocks sealed by the step that is applied now, in the order of `_digests`
        self._in_flight: list[tuple[TierTransfer, list[BlockPin]]] = []
        self._num_blocks = 0
        self.unsaved_blocks = 0

    def note(self, sealed: Sequence[int]) -> None:
        """Blocks that a sequence has just sealed, of any table, are to be saved, unless too many are on their way."""
        # One without a digest holds KV of weights that were changed since.
        named = [(digest, block_id) for block_id in sealed if (digest := self._pool.digest(block_id)) is not None]
        if self._num_blocks + len(named) > self._most_blocks:
            self.unsaved_blocks += len(named)
            return
        if not named:
            return
        self._digests += [digest for digest, _ in named]
        self._pins.append(self._pool.pin([block_id for _, block_id in named]))
        self._num_blocks += len(named)

    def begin(self) -> None:
        if not self._pins:
            return
        digests, self._digests = self._digests, []
        pins, self._pins = self._pins, []
        transfer = self._port.save(digests, [block_id for pin in pins for block_id in pin.block_ids])
        if transfer is None:
            self._unpin(pins)
        else:
            self._in_flight.append((transfer, pins))

    def settle(self) -> None:
        if not self._in_flight:
            return
        still: list[tuple[TierTransfer, list[BlockPin]]] = []
        for transfer, pins in self._in_flight:
            if transfer.is_over():
                self._unpin(pins)
            else:
                still.append((transfer, pins))
        self._in_flight = still

    @property
    def is_moving(self) -> bool:
        """Whether a copy was under way when it was last looked at."""
        return bool(self._in_flight)

    def hurry(self, patience_s: float) -> None:
        """Cancels copies that take longer."""
        latest_s = self._port.clock() - patience_s
        for transfer, _ in self._in_flight:
            if transfer.begin_s < latest_s:
                transfer.cancel()

    def are_blocks_coming(self) -> bool:
        """Whether blocks come back that only copies hold; asked when blocks are short, so cancels the slow ones."""
        if not self._in_flight:
            return False
        self.hurry(PATIENCE_S)
        # Blocks that pins alone hold come back with them; others stay with their sequences.
        pool = self._pool
        return any(
            pool.num_users(block_id) == pool.num_pins(block_id)
            for _, pins in self._in_flight
            for pin in pins
            for block_id in pin.block_ids
        )

    def _unpin(self, pins: Sequence[BlockPin]) -> None:
        for pin in reversed(pins):
            self._num_blocks -= len(pin.block_ids)
            pin.close()

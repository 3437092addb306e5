"""`KvCache`: one pool, its hasher and the sequences that are alive; what an engine holds."""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

import msgspec

from openinfer_core import GenerateRequest
from openinfer_core.windows import MAX_TABLES, blocks_for_context
from openinfer_kv_cache.blocks import BlockPool, BlockState
from openinfer_kv_cache.checks import check_count
from openinfer_kv_cache.digest import PrefixHasher, table_digests
from openinfer_kv_cache.errors import IntegrityError, KvConfigError, SequenceStateError
from openinfer_kv_cache.eviction.conversations import Conversations
from openinfer_kv_cache.eviction.policy import EvictionPolicy
from openinfer_kv_cache.listener import BlockListener
from openinfer_kv_cache.sequence import BlockSequence
from openinfer_kv_cache.state_boundaries import StateBoundaries
from openinfer_kv_cache.state_slots import StateSlotPool
from openinfer_kv_cache.windowed_sequence import WindowedSequence


class KvCacheOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user may choose.

    Raises:
        KvConfigError: a value is out of range.
    """

    num_blocks: int
    block_size_tokens: int = 16
    idle_ttl_s: float | None = None
    """Seconds after which unused content is forgotten; None keeps it until the space is needed."""
    num_state_slots: int = 0
    """State slots, for a model with slot groups; live ones and snapshots together."""
    max_snapshots: int = 0
    """How many slots may hold snapshots; fewer than there are slots."""
    layout_digest: str = ""
    """`KvLayout.digest`; part of every block's identity. Empty if the KV never leaves this process."""
    table_windows: tuple[int | None, ...] = (None,)
    """`KvLayout.table_windows`: the block tables of every sequence, and how many tokens the layers of each see."""

    def __post_init__(self) -> None:
        check_count("num_blocks", self.num_blocks)
        check_count("block_size_tokens", self.block_size_tokens)
        check_count("num_state_slots", self.num_state_slots, least=0)
        check_count("max_snapshots", self.max_snapshots, least=0, most=max(self.num_state_slots - 1, 0))
        if self.idle_ttl_s is not None and not 0 < self.idle_ttl_s < float("inf"):
            raise KvConfigError(f"idle_ttl_s is {self.idle_ttl_s}; it must be positive and finite, or None")
        check_count("the number of table_windows", len(self.table_windows), most=MAX_TABLES)
        for window in self.table_windows:
            if window is not None:
                check_count("an entry of table_windows", window)


class KvCache:
    """Bookkeeping of one engine: `pool`, `hasher`, `slots` (None without slot groups), and `conversations`.

    `conversations` is told of sequences that end, before they are released. Used from one thread.

    A `digest_key` (16 to 64 secret bytes) is the same in every process that shares a tier; None draws a random one.
    """

    __slots__ = ("_live", "_make_sequence", "conversations", "filling", "hasher", "pool", "slots", "table_windows")

    def __init__(
        self,
        options: KvCacheOptions,
        *,
        digest_key: bytes | None = None,
        policy: EvictionPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = BlockPool(
            options.num_blocks,
            options.block_size_tokens,
            policy=policy,
            idle_ttl_s=options.idle_ttl_s,
            clock=clock,
        )
        self.conversations = Conversations(self.pool)
        self.filling: set[int] = set()  # blocks that tiers fill for no sequence (`EarlyFill`)
        self.hasher = PrefixHasher(options.block_size_tokens, key=digest_key, layout_digest=options.layout_digest)
        self.slots = (
            StateSlotPool(options.num_state_slots, max_snapshots=options.max_snapshots, clock=clock)
            if options.num_state_slots
            else None
        )
        self.table_windows = options.table_windows
        self._make_sequence = BlockSequence
        if self.table_windows != (None,):
            self._make_sequence = partial(WindowedSequence, table_windows=self.table_windows)
        self._live: set[BlockSequence] = set()

    @property
    def num_live_sequences(self) -> int:
        return len(self._live)

    def sequence_of(self, request: GenerateRequest) -> BlockSequence:
        """`sequence` of a request's prompt: shares prefixes with those of equal salt and adapter alone.

        Its blocks are its tenant's.
        """
        adapter = request.adapter
        return self.sequence(
            request.prompt_token_ids,
            lora_name=request.lora,
            adapter_digest=None if adapter is None else adapter.digest,
            cache_salt=request.cache_salt,
            owner=request.tenant,
        )

    def sequence(
        self,
        token_ids: Iterable[int],
        *,
        lora_name: str | None = None,
        adapter_digest: bytes | None = None,
        cache_salt: str | None = None,
        owner: str = "",
    ) -> BlockSequence:
        """A sequence that knows `token_ids`, each a uint32, and holds no blocks; the caller releases it.

        Its blocks are of the share of `owner`.
        """
        root = self.hasher.root(lora_name=lora_name, adapter_digest=adapter_digest, cache_salt=cache_salt)
        sequence = self._make_sequence(
            self.pool,
            self.hasher,
            root,
            token_ids,
            on_release=self._live.discard,
            lora_name=lora_name,
            cache_salt=cache_salt,
            owner=owner,
        )
        self._live.add(sequence)
        return sequence

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` tokens, with what its windows see, fits into the empty pool.

        If not, the request must be refused.
        """
        need = blocks_for_context(num_tokens, self.table_windows, self.pool.block_size_tokens)
        return need <= self.pool.num_blocks

    def listen(self, listener: BlockListener) -> None:
        """Lets a listener hear which prefixes can be begun on: of a model with recurrent states, where these are kept.

        Called once, before the first sequence.
        """
        if self.slots is not None:
            self.slots.listener = boundaries = StateBoundaries(listener)
            listener = boundaries
        self.pool.listener = listener

    def clear(self) -> None:
        """Voids all cached content, as after a change of weights; see `BlockPool.clear` and `StateSlotPool.clear`."""
        if self.slots is not None:
            self.slots.clear()  # first: it refuses while copies are under way, and then nothing has changed
        self.conversations.clear()
        self.pool.clear()

    def renew(self, weights_version: str) -> None:
        """Voids all content, and has digests bind a version of the weights; sequences begin anew.

        The same version gives the same digests, in tiers and after a restart, too; an empty one is that of the weights
        that the layout's digest names.

        Raises:
            SequenceStateError: a sequence holds blocks; nothing has changed.
            BlockStateError: copies of states are under way; nothing has changed.
        """
        if any(table.held for sequence in self._live for table in sequence.tables):
            raise SequenceStateError("weights cannot change while sequences hold blocks; shrink all to 0 first")
        if self.slots is not None:
            self.slots.restart()
        self.conversations.clear()
        self.pool.clear()
        self.hasher.weights_version = weights_version
        for sequence in self._live:
            sequence.forget_digests()

    def check_integrity(self) -> None:
        """Compares pool, slots, sequences and pins with each other, O(blocks + tokens); raises `IntegrityError`."""
        self.pool.check_integrity()
        if self.slots is not None:
            self.slots.check_integrity()
        users: Counter[int] = Counter()
        for sequence in self._live:
            sequence.check_integrity()
            self._check_states(sequence)
            for table in sequence.tables:
                users.update(table.held)
        for block_id in range(self.pool.num_blocks):
            held = users[block_id] + self.pool.num_pins(block_id) + (block_id in self.filling)
            if held != self.pool.num_users(block_id):
                raise IntegrityError(
                    f"block {block_id} counts {self.pool.num_users(block_id)} users; "
                    f"sequences, pins and tiers account for {held}"
                )

    def _check_states(self, sequence: BlockSequence) -> None:
        for table in sequence.tables:
            digests = table_digests(sequence.prefix_digests(), table.index)
            for position, block_id in enumerate(table.held, start=table.num_void):
                what = f"position {position} of table {table.index} of a sequence"
                is_sealed = position < sequence.num_sealed_blocks or position in table.found
                if self.pool.state(block_id) is not (BlockState.SEALED if is_sealed else BlockState.WRITABLE):
                    raise IntegrityError(f"{what} is {self.pool.state(block_id).name.lower()}")
                # None: `clear` has voided it since.
                if is_sealed and self.pool.digest(block_id) not in (digests[position], None):
                    raise IntegrityError(f"{what} holds another prefix (block {block_id})")

"""`KvTransfers`: loads and saves between the sequences of a scheduler and KV tiers, with the rules of `TierPort` kept.

    waiting ── match, reserve, begin_load ──► loading ── settle ──► running ── seal, begin_saves ──► ended
                          │ nothing found                              ▲
                          └────────────────────────────────────────────┘

For sequences that are loaded whole: of a model without recurrent states. Without tiers (`use` was not called) nothing
is found and nothing is saved, so that a scheduler has one path.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from openinfer_core.errors import ContractViolation, Refused
from openinfer_kv_cache.blocks import BlockPool
from openinfer_kv_cache.sequence import BlockSequence
from openinfer_kv_cache.tiers.port import TierPort
from openinfer_kv_cache.tiers.saves import BlockSaves
from openinfer_kv_cache.tiers.table_load import TableLoad, begin_table_load

Owner = TypeVar("Owner")


@dataclass(frozen=True, slots=True, eq=False)
class _Load(Generic[Owner]):
    owner: Owner
    blocks: TableLoad


class KvTransfers(Generic[Owner]):
    """Of one pool; an `Owner` is what a scheduler keeps of a request. Used from the thread of the pool."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._port: TierPort | None = None
        self._saves: BlockSaves | None = None
        self._loads: list[_Load[Owner]] = []
        self.loaded_tokens = 0

    def use(self, port: TierPort) -> None:
        """What `TieredScheduler.use_tiers` is to do.

        Raises:
            Refused: the model has recurrent states, without which the KV of a prefix is of no use.
        """
        if port.chunks_per_slot:
            raise Refused(
                "--kv-tier: the model keeps recurrent states beside its KV, and this scheduler plans no copies of them "
                "(StateCopy), without which a prefix is of no use; use token-budget, or leave --kv-tier out"
            )
        self._port = port
        self._saves = BlockSaves(self._pool, port)

    @property
    def num_loading(self) -> int:
        """Sequences between `begin_load` and the `settle` that gives them back."""
        return len(self._loads)

    @property
    def unsaved_blocks(self) -> int:
        """Blocks that were not saved because too many were on their way."""
        return 0 if self._saves is None else self._saves.unsaved_blocks

    def begin_load(self, owner: Owner, kv: BlockSequence) -> bool:
        """Asks the tiers for what follows the cached prefix of a sequence with reserved blocks.

        True: it is on its way. Then no row of the sequence may be planned and none of its blocks given back, whatever
        becomes of its request, until `settle` returns the owner.
        """
        if self._port is None:
            return False
        blocks = begin_table_load(self._port, kv)
        if blocks is None:
            return False
        self._loads.append(_Load(owner, blocks))
        return True

    def cancel_load(self, owner: Owner) -> None:
        """Asks for the early end of a load whose request has ended; `settle` returns the owner all the same."""
        for load in self._loads:
            if load.owner is owner:
                load.blocks.cancel()
                return
        raise ContractViolation("a load was cancelled that is not on its way")

    def settle(self) -> list[tuple[Owner, int]]:
        """Call it first in every `plan`. Gives back pins, and owners whose load is over, each with its cached tokens.

        What has completed of a load is sealed; the rest of the sequence is to be computed. One with windows whose load
        completed in part holds no blocks then, and has 0 cached tokens: it is to be matched and to reserve again.
        """
        if self._saves is not None:
            self._saves.settle()
        over = [load for load in self._loads if load.blocks.is_over()]
        if over:
            self._loads = [load for load in self._loads if load not in over]
        return [(load.owner, self._finish(load.blocks)) for load in over]

    def seal(self, kv: BlockSequence, num_computed_tokens: int) -> Sequence[int]:
        """`BlockSequence.seal` of what an applied step computed; the blocks that are full now are to be saved."""
        sealed = kv.seal(num_computed_tokens)
        if sealed and self._saves is not None:
            self._saves.note(sealed)
        return sealed

    def begin_saves(self) -> None:
        """Call it last in every `apply`: what was sealed in it goes out together."""
        if self._saves is not None:
            self._saves.begin()

    def hurry(self) -> None:
        """Call it where blocks are short for a sequence: saves that take long are cancelled, and unpin theirs."""
        if self._saves is not None:
            self._saves.are_blocks_coming()

    def _finish(self, load: TableLoad) -> int:
        num_tokens = load.finish()
        self.loaded_tokens += load.loaded_tokens
        return num_tokens or 0

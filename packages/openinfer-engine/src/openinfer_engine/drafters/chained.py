"""`ChainedDrafter`: what drafting layers have in common that read the hidden state before each token."""

from abc import ABC, abstractmethod

from openinfer_engine.drafters.chains import HiddenBefore, draft_in_chains
from openinfer_engine.drafters.contract import DraftMemory
from openinfer_engine.drafting import DrafterContext
from openinfer_kernels import Array, AttentionBatch


class ChainedDrafter(ABC):
    """The drafts of a `KvDrafter`, each made of the one before and of the hidden state that made it.

    What it observes, and where its hidden states come from, is its own: `attach` ends with `_keep`.

    Args:
        context: of the drafter.
    """

    def __init__(self, context: DrafterContext) -> None:
        self.max_drafts = context.max_drafts
        self._ops = context.ops
        self._kept: tuple[DraftMemory, HiddenBefore] | None = None

    def draft(self, slots: Array, last_ids: Array, hidden: Array, lengths: Array) -> Array:
        memory, states = self._attached
        return draft_in_chains(
            memory,
            slots,
            last_ids,
            # of the last accepted token, which need not be the last one computed
            states.settle(slots, lengths, hidden=self._of_model(hidden)),
            lengths,
            max_drafts=self.max_drafts,
            forward=self._forward,
            likeliest=self._likeliest,
            ops=self._ops,
        )

    def settle(self, slots: Array, last_ids: Array, hidden: Array, lengths: Array) -> None:
        """Implements `SettlingDrafter`."""
        del last_ids
        self._attached[1].settle(slots, lengths, hidden=self._of_model(hidden))

    @abstractmethod
    def _forward(self, token_ids: Array, hidden: Array, batch: AttentionBatch) -> tuple[Array, Array]:
        """As `chains.Forward`."""

    @abstractmethod
    def _likeliest(self, normed: Array, drafts: Array, column: int) -> Array:
        """As `draft_in_chains` asks for it."""

    def _of_model(self, hidden: Array) -> Array | None:
        """The model's hidden states of rows, if they are what the drafter reads."""
        return hidden

    def _keep(self, memory: DraftMemory, states: HiddenBefore) -> None:
        self._kept = memory, states

    @property
    def _attached(self) -> tuple[DraftMemory, HiddenBefore]:
        if self._kept is None:
            raise RuntimeError("the drafter was attached to no memory")
        return self._kept

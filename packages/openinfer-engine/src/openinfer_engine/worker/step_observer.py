"""`StepObserver`: a model's forward pass of a step, of which a drafter sees what it asked for."""

from typing import cast

from openinfer_core import Refused
from openinfer_engine.drafters.contract import ObservedStep
from openinfer_engine.drafting import SharedDrafter
from openinfer_engine.model import (
    KvLayers,
    LastTokenModel,
    LastTokenTappedModel,
    LogitsIndices,
    Model,
    TappedModel,
)
from openinfer_kernels import Array, AttentionBatch


class StepObserver:
    """Runs the model, and shows the drafter each step before it is sampled.

    Raises:
        Refused: the drafter asks for taps, and the model has none.
    """

    def __init__(self, model: Model, drafter: SharedDrafter) -> None:
        taps = drafter.requirements.taps
        if taps and not isinstance(model, TappedModel):
            raise Refused(
                f"the drafter asks for the input of layers {', '.join(map(str, taps))}, and {type(model).__name__} "
                "hands none over (forward_tapped)"
            )
        self.model = model
        self._drafter = drafter
        self._taps = taps

    def forward(
        self,
        slots: Array,
        token_ids: Array,
        *,
        batch: AttentionBatch,
        kv_cache: KvLayers,
        of_model: AttentionBatch | None = None,
    ) -> Array:
        """As `Model.forward`, of rows in the sequence `slots [R]` int32; the model is told of the rows `of_model`."""
        hidden, taps = self.forward_unseen(token_ids, batch=of_model or batch, kv_cache=kv_cache)
        step = ObservedStep(
            token_ids=token_ids,
            hidden=hidden,
            taps=taps,
            slots=slots,
            batch=batch,
        )
        self._drafter.observe(step)
        return hidden

    @property
    def selects_last_tokens(self) -> bool:
        """Whether the drafter reads taps alone, and the model has those without hidden states that nothing reads."""
        kind = LastTokenTappedModel if self._taps else LastTokenModel
        return not self._drafter.requirements.reads_hidden and isinstance(self.model, kind)

    def forward_last_tokens(
        self, slots: Array, token_ids: Array, *, batch: AttentionBatch, kv_cache: KvLayers, last: LogitsIndices
    ) -> Array:
        """As `forward`, `[n, h]` for the tokens of `last` alone; where `selects_last_tokens`."""
        taps: tuple[Array, ...] = ()
        if self._taps:
            tapped = cast("LastTokenTappedModel", self.model)
            hidden, taps = tapped.forward_tapped_last_tokens(
                token_ids, batch=batch, kv_cache=kv_cache, taps=self._taps, last=last
            )
        else:
            model = cast("LastTokenModel", self.model)
            hidden = model.forward_last_tokens(token_ids, batch=batch, kv_cache=kv_cache, last=last)
        self._drafter.observe(
            ObservedStep(token_ids=token_ids, hidden=token_ids[:0], taps=taps, slots=slots, batch=batch)
        )
        return hidden

    def forward_unseen(
        self, token_ids: Array, *, batch: AttentionBatch, kv_cache: KvLayers
    ) -> tuple[Array, tuple[Array, ...]]:
        """As `Model.forward`, and what the drafter asked for, which it is yet to be shown."""
        if not self._taps:
            return self.model.forward(token_ids, batch=batch, kv_cache=kv_cache), ()
        model = cast("TappedModel", self.model)
        return model.forward_tapped(token_ids, batch=batch, kv_cache=kv_cache, taps=self._taps)

"""What a drafter that is a model asks for, and what it is handed: `DrafterRequirements`, `ObservedStep`, `DraftMemory`.

    before loading   factory.requirements(DrafterSetting) ─► tensors, paged groups, state groups, taps
    loaded           factory(DrafterContext) ─► KvDrafter ─► attach(DraftMemory)
    each step        forward ─► observe(ObservedStep): its KV of all positions computed ─► sampled ─► draft(...)

A step without drafts may be shown later, together with others of the same rows (`observes_late`).

Its KV is laid out in the model's blocks: what belongs to the token at position `p` lies at slot `p`, and must be made
of tokens up to `p` alone, so that a block depends on its own ids and on those before it, and a cached prefix feeds
the drafter as it feeds the model. What a draft itself adds lies in blocks of the engine's that no sequence has.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from openinfer_engine.model import KvLayers, ModelDefinition
from openinfer_engine.options import EngineOptions
from openinfer_engine.weights.safetensors_file import TensorInfo
from openinfer_engine.weights.stored_tensor import TensorSpec
from openinfer_kernels import Array, AttentionBatch
from openinfer_kv_cache import KvDtype, PagedGroup, StateSlotGroup

LATE_STEPS = 16
"""Steps that a drafter is shown at once, later, at most."""
LATE_TOKENS = 512
"""Tokens of them at once, at most; of more rows some after the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterSetting:
    """What a drafter's requirements follow from; nothing is loaded yet."""

    definition: ModelDefinition[Any]
    """Of the model's family."""
    model_config: Any
    """The definition's typed config."""
    model_dir: Path
    drafter_dir: Path | None
    """Folder of the drafter's own weights; None where no option names one."""
    tensors: Mapping[str, TensorInfo]
    """Those of the drafter's folder, or else of the model's; none where weights are random."""
    options: EngineOptions
    """The engine's."""
    max_drafts: int
    block_size_tokens: int
    num_ranks: int
    kv_dtype: KvDtype
    """What paged tensors are stored in."""
    state_dtype: KvDtype
    """The compute dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterRequirements:
    """What a drafter needs of an engine; all of it is part of the plan, and its groups of the KV layout."""

    tensors: Mapping[str, TensorSpec] = field(default_factory=dict[str, TensorSpec])
    """What it loads, with whole shapes, from its own folder or the model's."""
    other_tensors: Collection[str] | None = None
    """Names of tensors that the folder may have next to these, as in `ModelDefinition.ignorable_tensors`; None: any."""
    made_from: Any = None
    """Whatever the factory has read of the folder for this, and finds again in `DrafterContext.requirements`."""
    paged: tuple[PagedGroup, ...] = ()
    """Its KV, in every block; each tensor of the shape of the model's."""
    slots: tuple[StateSlotGroup, ...] = ()
    """What it keeps of a sequence with the model's recurrent states, whose copies have it, too."""
    taps: tuple[int, ...] = ()
    """Layers, ascending, whose input it wants to see: the residual stream before layer `i`."""
    span_tokens: int = 1
    """Positions that one call of `draft` adds KV for at most."""
    is_queued: bool = False
    """Whether `observe` and `draft` do no more than to call operators, and read nothing on the host: what a GPU asks
    for, where `observe` is captured once for each number of tokens, with rows that are padding, and then replayed, and
    `draft` for small numbers of rows, before any sequence began: slots are any, and what it drafts is of no use."""
    observes_late: bool = False
    """Whether a GPU may show it steps of one token a row later, up to `LATE_STEPS` at once and before drafts are asked
    for or states are copied, where it reads its weights once for all. Given with `is_queued`."""
    reads_hidden: bool = True
    """Whether `observe` reads `hidden` of a step. Where it does not, `hidden` of steps that are shown late has no rows,
    and a GPU may leave out states of a prompt's tokens that nothing is sampled from."""
    made_bytes: int = 0
    """Of weights that it makes of others when it is loaded, on one rank."""
    bytes_per_token: int = 0
    """Memory that `observe` works in for each token of a step, at most, next to what is kept."""
    bytes_per_sequence: int = 0
    """Memory that it keeps for each sequence slot, next to `paged` and `slots`."""
    bytes_per_row: int = 0
    """Memory that `draft` works in for each of `DraftMemory.max_rows` rows, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedStep:
    """A step that the model has computed, before any of it was sampled; arrays are on the device, not to be written."""

    token_ids: Array
    """`[T]` int32, drafts that may be refused among them."""
    hidden: Array
    """`[T, h]` after the final norm: what `Model.forward` returns; `[0]` where nothing reads it and it was not kept."""
    taps: tuple[Array, ...]
    """Of each tap `[T, h]`, the residual stream before that layer, in the compute dtype."""
    slots: Array
    """`[R]` int32 sequence slot of each row; -1 for a row that is padding, and has no tokens."""
    batch: AttentionBatch
    """Where the tokens stand; its block tables have the drafter's KV, too. Tokens after the last row's are padding."""


class DraftSpan(Protocol):
    """Positions after the known tokens of some rows, whose KV lies where no other step sees it."""

    def rows(self, first: int, count: int) -> AttentionBatch:
        """`count` tokens of each row, from the `first` new position on; contexts end with them.

        It has the states of the sequences, too, of which a drafter may write its own: later steps go on from what it
        leaves there, and a window must have room for what may not come to stay.
        """
        ...

    def whole(self, count: int) -> AttentionBatch:
        """The first `count` tokens of each row, each of which sees all of them: a row of its own each."""
        ...


class DraftMemory(Protocol):
    """What a drafter keeps on the device of one rank."""

    @property
    def layers(self) -> KvLayers:
        """Name of a paged group -> the cache of each of its layers."""
        ...

    @property
    def states(self) -> Mapping[str, Array]:
        """`GROUP.TENSOR` -> `[slots, layers, *shape]`; sequence slots are the first ones."""
        ...

    @property
    def max_rows(self) -> int:
        """Rows of one span at most."""
        ...

    def span(self, slots: Array, lengths: Array) -> DraftSpan:
        """New positions of the sequences in `slots [n]`, from `lengths - 1` on: that of the last token.

        KV of earlier positions is read where it is; a span is void once the next one is made.
        """
        ...


@runtime_checkable
class KvDrafter(Protocol):
    """What a `Drafter` with requirements has in addition. Called by the thread that launches steps."""

    def attach(self, memory: DraftMemory) -> None:
        """Called once, before any step."""
        ...

    def observe(self, step: ObservedStep) -> None:
        """A step was computed, prompts and their chunks included: its KV is to be kept.

        Rows may have drafts, of which some will be refused: what was kept of these is overwritten by a later step. With
        recurrent states, a row with refused drafts is computed again up to the last accepted one, and observed again.
        """
        ...


@runtime_checkable
class SettlingDrafter(Protocol):
    """What a `KvDrafter` may have in addition: a cheaper way to hear what was accepted, where no drafts are wanted."""

    def settle(self, slots: Array, last_ids: Array, hidden: Array, lengths: Array) -> None:
        """Instead of `Drafter.draft` after a step with drafts, where the step after it has none: arguments are those.

        A drafter without it is asked for drafts, which are left.
        """
        ...


def late_bytes(num_vectors: int, hidden_size: int) -> int:
    """For `DrafterRequirements.bytes_per_sequence` of a drafter that is shown steps late: what is kept of them.

    Args:
        num_vectors: taps, and the hidden state after the final norm if it is read.
        hidden_size: of each.
    """
    return LATE_STEPS * (4 + 2 * num_vectors * hidden_size)

"""Drafters: what proposes the tokens that a step verifies, and the seam through which packages bring one.

    sampled, compared ─► Drafter.draft, on every rank ─► rank 0's drafts, broadcast ─► kept for each sequence slot
           └────────────── `StepPlan.draft_counts`: the slot's next row computes them after its last id ◄──┘

A drafter cannot change what is sampled: a draft only decides how many tokens a step yields. So the contract asks for
nothing that would have to be trusted, and a draft that is no token id ends its row's drafts.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast

import numpy as np

from openinfer_core import Plugin, Refused, find_plugin, list_plugins
from openinfer_core.errors import BrokenPlugin, ContractViolation
from openinfer_core.plugins import DRAFTERS, PLUGIN_ERRORS
from openinfer_core.scheduling import SlotStart
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.drafters.contract import (
    DrafterRequirements,
    DraftMemory,
    KvDrafter,
    ObservedStep,
    SettlingDrafter,
)
from openinfer_engine.drafters.requirements import AskedDrafter, ask_drafter
from openinfer_engine.model import Model, ModelDefinition, WeightSource
from openinfer_engine.options import EngineOptions
from openinfer_engine.speculation.setting import AUTO
from openinfer_kernels import Array, Ops
from openinfer_kv_cache import KvDtype, KvSpec

MODEL_OPTION = "model"
"""The option of a drafter that has weights of its own: their folder, as in `--speculative eagle3,model=DIR`."""

logger = logging.getLogger("openinfer.engine")

NGRAM = "ngram"
"""The drafter that this package brings."""


class Drafter(Protocol):
    """Proposes the next tokens of sequences, on one rank. Called by the thread that launches steps.

    What it keeps of a sequence it keeps by sequence slot, `0 .. max_num_seqs - 1`. `draft` is called once after each
    step that sampled, on every rank with the same arrays; the drafts of rank 0 count.
    """

    @property
    def max_drafts(self) -> int:
        """Columns of what `draft` returns, `1 .. DrafterContext.max_drafts`; does not change."""
        ...

    def start(self, starts: Sequence[SlotStart]) -> None:
        """Sequences take these slots before a step runs: for the first time, or again after a preemption.

        All that was kept of the slots' last sequences is void.
        """
        ...

    def draft(self, slots: Array, last_ids: Array, hidden: Array, lengths: Array) -> Array:
        """Drafts for the rows that sampled in this step; all arrays are on the device, and not to be written.

        Args:
            slots: `[R]` int32 sequence slots, each at most once.
            last_ids: `[R]` int32 the last token of each sequence, sampled in this step.
            hidden: `[R, h]` of the position that predicted it, after the final norm: what `Model.forward` returns.
            lengths: `[R]` int32 known tokens of each sequence, the last one included. Since the call before, it has
                grown by 1 .. 1 + max_drafts: what was accepted of the drafts, and `last_ids`. On a GPU rows of requests
                that fail in this step may be among them, which have not grown.

        Returns:
            `[R, max_drafts]` int32 on the device. An id outside `0 .. num_token_ids - 1` ends that row's drafts: -1
            in the first column is none.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterContext:
    """What a drafter is made from, on one rank."""

    model_dir: Path
    """Folder of the checkpoint."""
    config: Mapping[str, Any]
    """Its `config.json`."""
    model: Model
    """The loaded model of this rank."""
    ops: Ops
    """The operators that the model uses."""
    communicator: Communicator
    """This rank's end of the group. A collective of a drafter must be called by all ranks alike."""
    max_num_seqs: int
    """Sequence slots."""
    max_model_tokens: int
    """Longest context."""
    num_token_ids: int
    """Token ids are smaller."""
    max_drafts: int
    """Drafts of one row that steps are planned with at most."""
    options: Mapping[str, str] = field(default_factory=dict[str, str])
    """Its own of `--speculative NAME,OPTION=VALUE`; those that the factory's attribute `options` names."""
    model_config: Any = None
    """The family's typed config."""
    drafter_dir: Path | None = None
    """Folder of the drafter's own weights, where its option `model` names one."""
    requirements: DrafterRequirements | None = None
    """What the factory asked for, on so many ranks; None for one that asks for nothing."""
    weights: WeightSource | None = None
    """The tensors that it asked for, as this rank sees them; open while the drafter is made."""


DrafterFactory: TypeAlias = Callable[[DrafterContext], Drafter]
"""A plug-in of the group `openinfer.drafters`; called on every rank, after the model was loaded.

It may have attributes: `options`, the names of its own options (without it, it has none); `takes_predictions`, whether
it drafts from `GenerateRequest.prediction_token_ids`; `bytes_per_sequence(max_model_tokens, max_drafts)`, the memory
that it keeps for each sequence slot, for the ledger; and `suits(config)`, which is called with the model's
`config.json` and says why `--speculative auto` should take it, or None.
"""


class DrafterFaults:
    """Times drafters of an engine raised, or returned what is no array of drafts."""

    def __init__(self) -> None:
        self.count = 0


class SharedDrafter:
    """A drafter within its fault boundary, whose drafts are rank 0's on every rank.

    One that faults is not called again: its name is logged, the fault is counted, and decoding goes on without drafts.
    With several ranks the others may be waiting in a collective of the drafter by then, so there a fault is raised,
    and ends the step and the engine with its reason.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        name: str,
        communicator: Communicator,
        num_token_ids: int,
        faults: DrafterFaults,
        requirements: DrafterRequirements | None = None,
    ) -> None:
        self._drafter: Drafter | None = drafter
        self._name = name
        self._communicator = communicator
        self._num_token_ids = num_token_ids
        self._faults = faults
        self.max_drafts = drafter.max_drafts
        self.requirements = requirements or DrafterRequirements()

    @property
    def observes(self) -> bool:
        """Whether it is to be shown every step."""
        return isinstance(self._drafter, KvDrafter)

    def start(self, starts: Sequence[SlotStart]) -> None:
        if self._drafter is None or not starts:
            return
        try:
            self._drafter.start(starts)
        except PLUGIN_ERRORS as error:
            self._stop(error)

    def attach(self, memory: DraftMemory) -> None:
        """Hands it what it keeps on the device, before any step."""
        if isinstance(self._drafter, KvDrafter):
            self._guarded(lambda drafter: drafter.attach(memory))

    def observe(self, step: ObservedStep) -> None:
        """As `KvDrafter.observe`; nothing after a fault, or for a drafter that has no KV."""
        self._guarded(lambda drafter: drafter.observe(step))

    def settle(self, slots: Array, last_ids: Array, hidden: Array, lengths: Array) -> None:
        """As `SettlingDrafter.settle`, or else drafts that are left; nothing after a fault."""
        if not isinstance(self._drafter, SettlingDrafter):
            self.propose(slots, last_ids, hidden, lengths)
            return
        try:
            self._drafter.settle(slots, last_ids, hidden, lengths)
        except PLUGIN_ERRORS as error:
            self._stop(error)

    def _guarded(self, call: Callable[[KvDrafter], None]) -> None:
        if not isinstance(self._drafter, KvDrafter):
            return
        try:
            call(self._drafter)
        except PLUGIN_ERRORS as error:
            self._stop(error)

    def propose(self, slots: Array, last_ids: Array, hidden: Array, lengths: Array) -> Array | None:
        """`[R, max_drafts]` int32 as `Drafter.draft`, rank 0's; None after a fault."""
        if self._drafter is None:
            return None
        try:
            drafts = self._drafter.draft(slots, last_ids, hidden, lengths)
            self._check(drafts, num_rows=len(slots), kind=type(slots))
        except PLUGIN_ERRORS as error:
            self._stop(error)
            return None
        return self._communicator.broadcast(drafts.copy(), root=0)

    def draft(self, slots: Array, last_ids: Array, hidden: Array, lengths: Array) -> Array | None:
        """As `propose`, -1 from each row's first id that is none."""
        shared = self.propose(slots, last_ids, hidden, lengths)
        if shared is None:
            return None
        is_id = (shared >= 0) & (shared < self._num_token_ids)
        is_draft = is_id.astype(np.int32).cumprod(axis=1).astype(np.int32)
        return shared * is_draft + (is_draft - 1)

    def _check(self, drafts: Array, *, num_rows: int, kind: type[Array]) -> None:
        expected = num_rows, self.max_drafts
        found = getattr(drafts, "shape", None), getattr(drafts, "dtype", None)
        if found != (expected, np.dtype(np.int32)) or not isinstance(drafts, kind):
            raise ContractViolation(
                f"draft() returned a {type(drafts).__name__} of shape {found[0]} and dtype {found[1]}, "
                f"not {list(expected)} int32"
            )

    def _stop(self, error: BaseException) -> None:
        self._drafter = None
        self._faults.count += 1
        message = f"drafter {self._name} failed: {type(error).__name__}: {error}"
        if self._communicator.size > 1:
            raise ContractViolation(
                f"{message}; with several ranks no step can go on after that: start with --speculative off"
            ) from error
        logger.error("%s; decoding goes on without drafts", message, exc_info=error)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenDrafter:
    """The drafter that an engine's options name, and what it does wrong."""

    plugin: Plugin
    max_drafts: int
    is_adaptive: bool = False
    options: Mapping[str, str] = field(default_factory=dict[str, str])
    reason: str | None = None  # why `auto` took it
    asked: AskedDrafter | None = None
    """What it requires of the engine; None for one that requires nothing."""
    faults: DrafterFaults = field(default_factory=DrafterFaults)

    @property
    def origin(self) -> str:
        """`NAME (DISTRIBUTION VERSION), up to N drafts, adaptive, OPTION=VALUE`, for `openinfer plan` and locks."""
        adaptive = ", adaptive" if self.is_adaptive else ""
        options = "".join(f", {name}={value}" for name, value in sorted(self.options.items()))
        reason = "" if self.reason is None else f" (auto: {self.reason})"
        return f"{self._name}, up to {self.max_drafts} drafts{adaptive}{options}{reason}"

    @property
    def takes_predictions(self) -> bool:
        """Raises `PluginError` as `Plugin.load` does."""
        return bool(getattr(self.plugin.load(), "takes_predictions", False))

    def asked_for(
        self,
        definition: ModelDefinition[Any],
        model_config: Any,
        model_dir: Path,
        options: EngineOptions,
        *,
        kv_dtype: KvDtype,
        state_dtype: KvDtype,
    ) -> "ChosenDrafter":
        """The same with what it requires for this model; raises as `ask_drafter` and `Plugin.load`."""
        factory = self.plugin.load()
        self._check_options(factory)
        asked = ask_drafter(
            factory,
            name=self._name,
            drafter_dir=Path(self.options[MODEL_OPTION]) if MODEL_OPTION in self.options else None,
            definition=definition,
            model_config=model_config,
            model_dir=model_dir,
            options=options,
            max_drafts=self.max_drafts,
            kv_dtype=kv_dtype,
            state_dtype=state_dtype,
        )
        return replace(self, asked=asked)

    def weights_bytes(self, num_ranks: int, *, itemsize_bytes: int) -> int:
        """Of one rank, at most."""
        return 0 if self.asked is None else self.asked.weights_bytes(num_ranks, itemsize_bytes=itemsize_bytes)

    def work_bytes(self, num_ranks: int, options: EngineOptions, *, max_model_tokens: int) -> int:
        """What one rank has of memory for it, next to weights and KV, at most; raises as `Plugin.load`."""
        own = 0 if self.asked is None else self.asked.work_bytes(num_ranks)
        per_sequence = getattr(self.plugin.load(), "bytes_per_sequence", None)
        if per_sequence is not None:
            own += options.max_num_seqs * int(per_sequence(max_model_tokens, self.max_drafts))
        return own

    def span_bytes(self, num_ranks: int, *, block_bytes: int) -> int:
        """Of blocks that the pool has for its drafts."""
        return 0 if self.asked is None else self.asked.span_blocks(num_ranks) * block_bytes

    def extended(self, spec: KvSpec) -> KvSpec:
        """A rank's spec with what the drafter keeps."""
        return spec if self.asked is None else self.asked.extended(spec)

    def check(self) -> None:
        """What can be known before the model is loaded: that it takes a context, and that its class drafts.

        Raises:
            PluginError: as `Plugin.callable_with` does; `BrokenPlugin` also for a class without the methods.
            Refused: it has no option of a name that is given.
        """
        found = self.plugin.callable_with(1)
        self._check_options(found)
        missing = [name for name in ("draft", "start") if isinstance(found, type) and not hasattr(found, name)]
        if missing:
            raise BrokenPlugin(f"{self.plugin.described} is no Drafter: it lacks {', '.join(missing)}")

    def _check_options(self, factory: object) -> None:
        possible = tuple(cast("Sequence[str]", getattr(factory, "options", ())))
        for name in (name for name in sorted(self.options) if name not in possible):
            raise Refused(
                f"--speculative: the drafter {self._name} has no option {name!r}; possible: "
                f"{', '.join(('k', 'adaptive', *possible))}"
            )

    @property
    def _name(self) -> str:
        return f"{self.plugin.name} ({self.plugin.origin})"

    def make(self, context: DrafterContext) -> SharedDrafter:
        """The drafter of one rank.

        Raises:
            PluginError: as `Plugin.make` does; `BrokenPlugin` also if it makes more drafts than it may.
            Refused: what it raises itself to refuse the model; the message names it.
        """
        self._check_options(self.plugin.load())
        drafter: Drafter = self.plugin.make(context, contract=Drafter)
        max_drafts = cast("object", drafter.max_drafts)
        if type(max_drafts) is not int or not 1 <= max_drafts <= self.max_drafts:
            raise BrokenPlugin(
                f"drafter {self._name} has max_drafts {max_drafts!r}; possible are 1 .. {self.max_drafts}"
            )
        return SharedDrafter(
            drafter,
            name=self._name,
            communicator=context.communicator,
            num_token_ids=context.num_token_ids,
            faults=self.faults,
            requirements=context.requirements,
        )


def choose_drafter(options: EngineOptions, config: Mapping[str, Any]) -> ChosenDrafter | None:
    """The drafter that the options name, or that suits the model's `config.json`; None without one.

    Raises:
        UnknownPlugin, AmbiguousPlugin: no package, or more than one, has such a drafter.
        PluginError: with `auto`, one that is installed cannot be loaded, or raises.
    """
    speculation = options.speculation
    if speculation is None:
        return None
    plugin, reason = (find_plugin(DRAFTERS, speculation.name), None) if speculation.name != AUTO else _suiting(config)
    return ChosenDrafter(
        plugin=plugin,
        max_drafts=speculation.max_drafts,
        is_adaptive=speculation.is_adaptive,
        options=speculation.options,
        reason=reason,
    )


def _suiting(config: Mapping[str, Any]) -> tuple[Plugin, str]:
    """The first drafter by name that says it suits the model, else the one that needs nothing of it; and why."""
    for plugin in list_plugins(DRAFTERS):
        suits = getattr(plugin.load(), "suits", None)
        if suits is None:
            continue
        try:
            reason: str | None = suits(config)
        except PLUGIN_ERRORS as error:
            raise BrokenPlugin(f"{plugin.described} cannot say what it suits: {error}") from error
        if reason is not None:
            return plugin, str(reason)
    return find_plugin(DRAFTERS, NGRAM), "no installed drafter is for this model's own layers"


def max_drafts_of(options: EngineOptions) -> int:
    """Drafts of a row at most; 0 without a drafter."""
    return 0 if options.speculation is None else options.speculation.max_drafts

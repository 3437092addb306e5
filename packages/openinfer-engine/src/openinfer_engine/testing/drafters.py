"""Drafters whose drafts are scripted: always right, always wrong, random, hostile.

They are given what each request is answered without drafts, so that tests say how much of a row is accepted, and hold
what they are told against it: a worker that hands over a wrong id, length or slot makes them raise, which
`EngineStats.drafter_faults` shows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib.metadata import EntryPoint
from types import MappingProxyType
from typing import cast

import numpy as np

from openinfer_core import GenerateRequest, Plugin
from openinfer_core.plugins import DRAFTERS
from openinfer_core.scheduling import SlotStart
from openinfer_engine.drafters.contract import DraftMemory, KvDrafter, ObservedStep
from openinfer_engine.drafting import ChosenDrafter, Drafter, DrafterContext, DrafterFactory
from openinfer_engine.engine_plan import EnginePlan, resolve
from openinfer_kernels import Array, HostArray

_NO_IDS = -1, -(2**31), 2**31 - 1


class DraftKind(StrEnum):
    """What a scripted drafter drafts."""

    RIGHT = "right"
    """What the request is answered, as far as that is known."""
    WRONG = "wrong"
    """Token ids of which none is right."""
    RANDOM = "random"
    """Some right ones, then ids at random; as many as come."""
    HOSTILE = "hostile"
    """As random, with numbers between them that are no token ids."""


class ScriptedDrafter:
    """Implements `Drafter`, on any device and for any model.

    Args:
        kind: what it drafts.
        outputs: request id -> what the request is answered; a request that is not there has no drafts.
        context: of the rank.
        seed: of all at random.
        is_exact: answers are these, which is checked; else a request has no drafts where its last token is another.
    """

    def __init__(
        self,
        kind: DraftKind,
        outputs: Mapping[int, Sequence[int]],
        context: DrafterContext,
        *,
        seed: int = 0,
        is_exact: bool = True,
    ) -> None:
        self.max_drafts = context.max_drafts
        self._kind = kind
        self._outputs = outputs
        self._ops = context.ops
        self._num_token_ids = context.num_token_ids
        self._num_slots = context.max_num_seqs
        self._seed = seed
        self._is_exact = is_exact
        self._requests: dict[int, GenerateRequest] = {}

    def start(self, starts: Sequence[SlotStart]) -> None:
        for start in starts:
            self._requests[start.slot] = start.request

    def draft(self, slots: Array, last_ids: Array, hidden: Array, lengths: Array) -> Array:
        columns = [self._ops.download(column) for column in (slots, last_ids, lengths)]
        for column in columns:
            assert column.shape == (len(hidden),), column.shape
            assert column.dtype == np.int32, column.dtype
        assert len(set(columns[0].tolist())) == len(columns[0]), f"slots {columns[0]} are not each there once"
        rows = [self._row(*each) for each in zip(*(column.tolist() for column in columns), strict=True)]
        return self._ops.upload(np.asarray(rows, np.int64).reshape(-1, self.max_drafts).astype(np.int32))

    def _row(self, slot: int, last_id: int, length: int) -> list[int]:
        request = self._requests[slot]
        output = self._outputs.get(request.request_id, ())
        num_new = length - len(request.prompt_token_ids)
        assert num_new >= 1, f"request {request.request_id}: {length} tokens, and its prompt has as many"
        if num_new > len(output):  # not known, or computed after its end
            return [-1] * self.max_drafts
        if output[num_new - 1] != last_id:
            assert not self._is_exact, f"request {request.request_id}: token {num_new} is {last_id}"
            return [-1] * self.max_drafts
        right = list(output[num_new : num_new + self.max_drafts])
        right += [-1] * (self.max_drafts - len(right))
        return self._drafts(right, np.random.default_rng((self._seed, request.request_id, length)))

    def _drafts(self, right: list[int], rng: np.random.Generator) -> list[int]:
        if self._kind is DraftKind.RIGHT:
            return right
        if self._kind is DraftKind.WRONG:
            return [(max(each, 0) + 1) % self._num_token_ids for each in right]
        drafts = _at_random(self.max_drafts, self._num_token_ids, rng)
        if self._kind is DraftKind.HOSTILE:
            is_none = rng.random(self.max_drafts) < 0.3
            drafts[is_none] = rng.choice((*_NO_IDS, self._num_token_ids), int(is_none.sum()))
        num_right, num_drafts = sorted(rng.integers(0, self.max_drafts + 1, 2).tolist())
        ids: list[int] = drafts.tolist()
        ids = right[:num_right] + ids[num_right:]
        is_short = self._kind is DraftKind.RANDOM
        return ids[:num_drafts] + [-1] * (self.max_drafts - num_drafts) if is_short else ids


@dataclass(frozen=True, slots=True)
class _GivenPlugin(Plugin):
    """A plug-in that is here already."""

    factory: DrafterFactory

    def load(self) -> DrafterFactory:
        return self.factory


def scripted_drafter(
    kind: DraftKind, outputs: Mapping[int, Sequence[int]], *, seed: int = 0, is_exact: bool = True
) -> DrafterFactory:
    """What a plug-in of the group `openinfer.drafters` would be; the arguments are `ScriptedDrafter`'s."""

    def make(context: DrafterContext) -> ScriptedDrafter:
        return ScriptedDrafter(kind, outputs, context, seed=seed, is_exact=is_exact)

    return make


def with_drafter(
    engine_plan: EnginePlan,
    factory: DrafterFactory,
    *,
    max_drafts: int = 4,
    options: Mapping[str, str] = MappingProxyType({}),
) -> EnginePlan:
    """The same with a drafter that no package offers; for ranks of this process."""
    entry_point = EntryPoint("scripted", "openinfer_engine.testing:scripted_drafter", DRAFTERS)
    plugin = _GivenPlugin(DRAFTERS, entry_point.name, entry_point, factory)
    chosen = ChosenDrafter(plugin=plugin, max_drafts=max_drafts, options=options)
    if not hasattr(factory, "requirements"):
        return replace(engine_plan, drafter=chosen)
    return resolve(engine_plan.definition, engine_plan.model_dir, engine_plan.options, drafter=chosen)


def with_scripted_drafts(
    engine_plan: EnginePlan, kind: DraftKind, outputs: Mapping[int, Sequence[int]], *, seed: int = 0
) -> EnginePlan:
    """The same with scripted drafts in the place of those of its drafter, which observes and computes as ever.

    So drafters whose own are hardly ever right are told of accepted ones, too; for ranks of this process.
    """
    chosen = engine_plan.drafter
    assert chosen is not None
    real = chosen.plugin.load()

    def make(context: DrafterContext) -> Drafter:
        scripted = ScriptedDrafter(kind, outputs, context, seed=seed)
        own: Drafter = real(context)
        return _ScriptedKvDrafter(own, scripted) if isinstance(own, KvDrafter) else _ReplacedDrafts(own, scripted)

    for name in ("options", "takes_predictions", "requirements", "bytes_per_sequence"):
        if hasattr(real, name):
            setattr(make, name, getattr(real, name))
    plugin = _GivenPlugin(DRAFTERS, chosen.plugin.name, chosen.plugin.entry_point, make)
    return replace(engine_plan, drafter=replace(chosen, plugin=plugin))


class _ReplacedDrafts:
    """Two drafters that are told the same; the second one's drafts count."""

    def __init__(self, own: Drafter, scripted: ScriptedDrafter) -> None:
        self._own, self._scripted = own, scripted
        self.max_drafts = scripted.max_drafts

    def start(self, starts: Sequence[SlotStart]) -> None:
        self._own.start(starts)
        self._scripted.start(starts)

    def draft(self, slots: Array, last_ids: Array, hidden: Array, lengths: Array) -> Array:
        self._own.draft(slots, last_ids, hidden, lengths)
        return self._scripted.draft(slots, last_ids, hidden, lengths)


class _ScriptedKvDrafter(_ReplacedDrafts):
    """The same of a drafter that observes steps."""

    def __init__(self, own: KvDrafter, scripted: ScriptedDrafter) -> None:
        super().__init__(cast("Drafter", own), scripted)
        self._observer = own

    def attach(self, memory: DraftMemory) -> None:
        self._observer.attach(memory)

    def observe(self, step: ObservedStep) -> None:
        self._observer.observe(step)


def _at_random(count: int, num_token_ids: int, rng: np.random.Generator) -> HostArray:
    return rng.integers(0, num_token_ids, count)

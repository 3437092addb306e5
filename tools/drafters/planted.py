"""Engines on a CPU with a planted fault, which a comparison of answers with and without drafts must find."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from openinfer_core.scheduling import StepPlan, StepResult
from openinfer_engine.engine_plan import EnginePlan
from openinfer_engine.worker.runner import DoneStep

EVERY = 40
"""Of so many steps with drafts one has the fault."""


class WrongToken:
    """A worker that answers one token which it has not sampled."""

    def __init__(self, worker: Any, *, num_token_ids: int) -> None:
        self._worker, self._num_token_ids, self._steps = worker, num_token_ids, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def launch(self, plan: StepPlan) -> DoneStep:
        result: StepResult = self._worker.launch(plan).result()
        if plan.num_rows and (plan.max_new > 1).any() and len(result.token_ids):
            self._steps += 1
            if self._steps % EVERY == 0:
                token_ids = result.token_ids.copy()
                token_ids[-1] = (token_ids[-1] + 1) % self._num_token_ids
                result = replace(result, token_ids=token_ids)
        return DoneStep(result)


class LastQuery:
    """Operators whose attention answers the last of a row's 2 to 8 tokens as the one before it."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def paged_attention(self, q: Any, cache: Any, *, batch: Any, scale: float, **given: Any) -> Any:
        return _last_as_before(self._ops.paged_attention(q, cache, batch=batch, scale=scale, **given), batch)

    def latent_attention(self, q: Any, cache: Any, *, kv_b_proj: Any, batch: Any, scale: float, **given: Any) -> Any:
        found = self._ops.latent_attention(q, cache, kv_b_proj=kv_b_proj, batch=batch, scale=scale, **given)
        return _last_as_before(found, batch)


def _last_as_before(found: Any, batch: Any) -> Any:
    counts = np.diff(batch.query_starts)
    for row in np.flatnonzero((counts > 1) & (counts <= 8)):
        last = int(batch.query_starts[row + 1]) - 1
        found[last] = found[last - 1]
    return found


class PlantedBackend:
    """A backend with one of these."""

    def __init__(self, backend: Any, plant: str) -> None:
        self._backend, self._plant = backend, plant

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def make_ops(self) -> Any:
        ops = self._backend.make_ops()
        return LastQuery(ops) if self._plant == "query" else ops

    def make_worker(self, model: Any, **given: Any) -> Any:
        worker = self._backend.make_worker(model, **given)
        if self._plant != "token":
            return worker
        return WrongToken(worker, num_token_ids=given["limits"].num_token_ids)


PLANTS: Mapping[str, str] = {
    "token": "a worker answers a token that it has not sampled, in one of 40 steps with drafts",
    "query": "attention of the last of a row's 2 to 8 tokens is that of the one before it",
}


def planted(engine_plan: EnginePlan, plant: str) -> EnginePlan:
    """The same with a fault, by its name in `PLANTS`."""
    backend: Any = PlantedBackend(engine_plan.backend, plant)
    return replace(engine_plan, backend=backend)

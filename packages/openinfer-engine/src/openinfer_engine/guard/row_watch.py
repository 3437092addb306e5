"""`RowWatch`: requests that a scheduler counts as unfinished and never gives a row, although it could.

A request counts time while it could run, and from its last row anew:

    in a slot        always
    waiting          while the newest step was of decode rows alone and left slots, tokens and enough free blocks for
                     each request that waits, and nothing came from KV tiers
    held             never, since its next mask is not computed yet (`HoldsRows`)

The time between two looks counts as two of their periods at most, so that no hung device is blamed on a scheduler.
"""

from collections.abc import Set as AbstractSet

import numpy as np
from numpy.typing import NDArray

from openinfer_core.engine import EngineStats
from openinfer_core.request import GenerateRequest, RequestId
from openinfer_core.scheduling import SchedulerConfig, StepPlan

LOOK_PERIOD_S = 1.0


class RowWatch:
    """Times requests without a row. Adding a plan costs the same whatever its rows; a look, some time per request."""

    def __init__(self, config: SchedulerConfig, *, timeout_s: float, now_s: float) -> None:
        self._config = config
        self._timeout_s = timeout_s
        self._looked_s = now_s
        self._owners: dict[int, RequestId] = {}  # slot -> the request in it
        self._blocks: dict[RequestId, int] = {}  # unfinished request -> KV blocks that it takes at most
        self._idle_s: dict[RequestId, float] = {}  # for how long it could have had a row
        self._had_row: NDArray[np.bool_] = np.zeros(config.max_num_seqs, np.bool_)  # by slot, since the last look
        self._newest: StepPlan | None = None
        self.held: AbstractSet[RequestId] = frozenset()  # wait for their masks: no fault of a scheduler

    @property
    def owners(self) -> dict[int, RequestId]:
        return self._owners

    def add(self, request: GenerateRequest) -> None:
        config = self._config
        tokens = min(len(request.prompt_token_ids) + request.sampling.max_tokens, config.max_model_tokens)
        self._blocks[request.request_id] = config.blocks_for_context(tokens)

    def planned(self, plan: StepPlan) -> None:
        if plan.released or plan.started:
            for slot in plan.released:
                self._owners.pop(slot, None)
            for start in plan.started:
                self._owners[start.slot] = start.request.request_id
                self._idle_s.pop(start.request.request_id, None)
        self._newest = plan
        self._had_row[plan.slots] = True

    def _note_rows(self) -> None:
        for slot in np.flatnonzero(self._had_row).tolist():
            self._idle_s.pop(self._owners.get(slot, RequestId(-1)), None)
        self._had_row[:] = False

    def is_due(self, now_s: float) -> bool:
        return now_s - self._looked_s >= LOOK_PERIOD_S

    def look(self, unfinished: AbstractSet[RequestId], stats: EngineStats, *, now_s: float) -> dict[RequestId, float]:
        """The requests that could have had a row for longer than the timeout, with the seconds that it was."""
        passed_s = min(now_s - self._looked_s, 2 * LOOK_PERIOD_S)
        self._looked_s = now_s
        self._note_rows()
        for request_id in self._blocks.keys() - unfinished:
            del self._blocks[request_id]
            self._idle_s.pop(request_id, None)
        waiting = self._blocks.keys() - set(self._owners.values())
        could_run = self._blocks.keys() - waiting
        if self._has_room(waiting, stats):
            could_run |= waiting
        for request_id in self.held:
            self._idle_s.pop(request_id, None)
        for request_id in could_run - self.held:
            # One that came or had a row since the last look begins at 0: for how long before this look is not known.
            self._idle_s[request_id] = self._idle_s[request_id] + passed_s if request_id in self._idle_s else 0.0
        return {request_id: idle_s for request_id, idle_s in self._idle_s.items() if idle_s > self._timeout_s}

    def _has_room(self, waiting: AbstractSet[RequestId], stats: EngineStats) -> bool:
        plan, config = self._newest, self._config
        if plan is None or not waiting or stats.loading:
            return False
        # A decode row samples at all its positions, wherever their ids come from; a row of a prompt only at its last.
        is_decode_alone = np.array_equal(plan.counts, plan.max_new) and plan.num_tokens < config.max_step_tokens
        has_slot = len(self._owners) < config.max_num_seqs
        free_blocks = stats.blocks_total - stats.blocks_used - stats.protected_blocks
        return is_decode_alone and has_slot and free_blocks >= max(self._blocks[request_id] for request_id in waiting)

    def forget(self, request_id: RequestId) -> None:
        self._blocks.pop(request_id, None)
        self._idle_s.pop(request_id, None)

"""Scheduling: what one forward pass is, and who decides it. No tensors, no model names.

A step is three verbs: `plan`, run, `apply`. The loop overlaps them: it may call `plan` for step N + 1 before
`apply` of step N. A decode row therefore takes its input id on the device, from the last id sampled in its slot.

    submit ─► Scheduler.add ─► plan() ─► StepPlan ─► runner ─► StepResult ─► apply() ─► events
                                 └────── step N + 1 is planned while step N runs ──────┘

step.py             what a step is: `StepPlan` and `StepResult`
scheduler.py        who decides it
adapters.py         which adapters lie in the device's slots
waiting_queue.py    the queue that a scheduler serves in a policy's order
policy_calls.py     how long that policy is in its calls
draft_counter.py    drafts and accepted ones, counted from results
"""

from openinfer_core.scheduling.adapters import AdapterLoad, AdapterPort, PlacesAdapters
from openinfer_core.scheduling.policy_calls import PolicyCalls
from openinfer_core.scheduling.scheduler import (
    MAX_ADAPTERS,
    MAX_DRAFTS,
    ChangesWeights,
    ChoosesVictim,
    CountsTokens,
    FlushesCache,
    HoldsRows,
    QueuePolicy,
    QueuePolicyConfig,
    Scheduler,
    SchedulerCapabilities,
    SchedulerConfig,
    SharesRows,
    WaitingRequest,
)
from openinfer_core.scheduling.step import BoolColumn, Int32Column, SlotStart, StateCopy, StepPlan, StepResult
from openinfer_core.scheduling.step_times import DecodeStepTime, TakesStepTimes
from openinfer_core.windows import MAX_TABLES

__all__ = [
    "MAX_ADAPTERS",
    "MAX_DRAFTS",
    "MAX_TABLES",
    "AdapterLoad",
    "AdapterPort",
    "BoolColumn",
    "ChangesWeights",
    "ChoosesVictim",
    "CountsTokens",
    "DecodeStepTime",
    "FlushesCache",
    "HoldsRows",
    "Int32Column",
    "PlacesAdapters",
    "PolicyCalls",
    "QueuePolicy",
    "QueuePolicyConfig",
    "Scheduler",
    "SchedulerCapabilities",
    "SchedulerConfig",
    "SharesRows",
    "SlotStart",
    "StateCopy",
    "StepPlan",
    "StepResult",
    "TakesStepTimes",
    "WaitingRequest",
]

"""The guard around a scheduler: what it may not do is noticed, named, and ends its requests instead of hanging them."""

from openinfer_engine.guard.plan_check import PlanCheck
from openinfer_engine.guard.scheduler_guard import FaultKind, GuardOptions, SchedulerGuard

__all__ = ["FaultKind", "GuardOptions", "PlanCheck", "SchedulerGuard"]

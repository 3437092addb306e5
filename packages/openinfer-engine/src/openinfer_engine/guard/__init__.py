"""Around code of others: what a scheduler or a family does wrong is named, and requests end instead of hanging."""

from openinfer_engine.guard.plan_check import PlanCheck
from openinfer_engine.guard.scheduler_guard import FaultKind, GuardOptions, SchedulerGuard

__all__ = ["FaultKind", "GuardOptions", "PlanCheck", "SchedulerGuard"]

"""The scheduler and its queue policy, as options name them: made, and held against the options."""

from openinfer_core import BrokenPlugin, Plugin, Refused
from openinfer_core.scheduling import (
    QueuePolicy,
    QueuePolicyConfig,
    Scheduler,
    SchedulerCapabilities,
    SchedulerConfig,
)
from openinfer_engine.options import EngineOptions


def origin_of(plugin: Plugin) -> str:
    """`NAME (DISTRIBUTION VERSION)`."""
    return f"{plugin.name} ({plugin.origin})"


def make_scheduler(scheduler: Plugin, policy: Plugin, config: SchedulerConfig, options: EngineOptions) -> Scheduler:
    """Raises `BrokenPlugin` or `Refused`."""
    weights = QueuePolicyConfig(tenant_weights=options.tenant_weights)
    made: Scheduler = scheduler.make(config, policy.make(weights, contract=QueuePolicy), contract=Scheduler)
    return made


def declared_capabilities(scheduler: Scheduler) -> SchedulerCapabilities | None:
    """None of one that declares nothing of that type: it is a foreign object, whatever its annotations say."""
    declared: object = getattr(scheduler, "capabilities", None)
    return declared if isinstance(declared, SchedulerCapabilities) else None


def check_capabilities(scheduler: Scheduler, plugin: Plugin, options: EngineOptions, *, has_drafter: bool) -> None:
    """Raises `BrokenPlugin` if it declares nothing, `Refused` if it declares what does not fit the options."""
    declared = declared_capabilities(scheduler)
    if declared is None:
        raise BrokenPlugin(
            f"the scheduler {origin_of(plugin)} has no capabilities of type SchedulerCapabilities: it was "
            "written for an older openinfer; see docs/reference/write-a-scheduler.md"
        )
    if has_drafter and not declared.plans_drafts:
        raise Refused(
            f"--speculative: the scheduler {origin_of(plugin)} plans no drafts (it does not declare "
            "plans_drafts); leave one of the two out, or use token-budget"
        )
    if options.num_adapter_slots and not declared.places_adapters:
        raise Refused(
            f"--lora: the scheduler {origin_of(plugin)} places no adapters (it does not declare "
            "places_adapters); leave one of the two out, or use token-budget"
        )
    if declared.own_policy and (options.queue_policy is not None or options.tenant_weights):
        raise Refused(
            f"the scheduler {origin_of(plugin)} orders requests by itself and asks no queue policy: leave "
            "queue_policy and tenant_weights out, or choose another scheduler"
        )

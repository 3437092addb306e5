"""What `openinfer plan` does with a composition: makes every part as a start would, and runs the scheduler dry.

No weight is read, no port opened and nothing kept: what is made is closed again. What needs the loaded model (drafters,
and operators of other packages on a GPU) is loaded and not made.
"""

import threading

from openinfer_core import BrokenPlugin, GenerateRequest, RequestId, SamplingParams
from openinfer_core.events import Finished
from openinfer_core.plugins import Plugin
from openinfer_core.queue_policies import FirstComeFirstServed
from openinfer_core.scheduling import QueuePolicy, QueuePolicyConfig, Scheduler, SchedulerConfig
from openinfer_engine.engine_plan import EnginePlan
from openinfer_engine.kernel_providers import with_providers
from openinfer_engine.kv_events.opening import require_kv_events
from openinfer_engine.kv_tiers.joining import require_tiered
from openinfer_engine.options import DeviceKind

DEADLINE_S = 30.0
_NUM_REQUESTS = 6
_NUM_TOKENS = 5


def dry_run(engine_plan: EnginePlan) -> None:
    """Makes all parts of a composition and runs its scheduler on a fake device.

    Raises:
        PluginError, Refused: a part cannot be made, or does not do what its contract demands; the message names it.
    """
    _make_parts(engine_plan)
    run_scheduler(engine_plan.scheduler, engine_plan.queue_policy, engine_plan)


def _make_parts(engine_plan: EnginePlan) -> None:
    options = engine_plan.options
    scheduler = engine_plan.make_scheduler()
    if engine_plan.tiers is not None:
        require_tiered(scheduler, name=engine_plan.scheduler.described, has_states=engine_plan.has_states)
        for layout in engine_plan.layouts:
            engine_plan.tiers.check(layout)
    if options.kv_events is not None:
        require_kv_events(scheduler, name=engine_plan.scheduler.described)
    compiler = engine_plan.make_grammar_compiler()
    if compiler is not None:
        compiler.close()
    if engine_plan.drafter is not None:
        engine_plan.drafter.check()
    if options.device is DeviceKind.CPU:  # a GPU's operators would be compiled for it
        with_providers(engine_plan.backend.make_ops(), engine_plan.kernel_providers)


def run_scheduler(
    scheduler: Plugin, policy: Plugin, engine_plan: EnginePlan, *, deadline_s: float = DEADLINE_S
) -> None:
    """Serves a few requests on a device that notices every mistake, first come first served and with the policy.

    Raises:
        BrokenPlugin: the contract is broken, or no end comes within the deadline.
    """
    config = engine_plan.scheduler_config
    weights = QueuePolicyConfig(tenant_weights=engine_plan.options.tenant_weights)
    makers = {
        scheduler.described: lambda: FirstComeFirstServed(QueuePolicyConfig()),
        f"{scheduler.described} with {policy.described}": lambda: policy.make(weights, contract=QueuePolicy),
    }
    for what, make_policy in makers.items():
        problem = _Problem()
        # A scheduler that hangs cannot be stopped: the command ends without its thread.
        thread = threading.Thread(
            target=problem.run, args=(scheduler, config, make_policy()), name="openinfer-dry-run", daemon=True
        )
        thread.start()
        thread.join(deadline_s)
        if thread.is_alive():
            raise BrokenPlugin(f"{what} failed in a dry run: {_NUM_REQUESTS} requests are not served in {deadline_s} s")
        if problem.error is not None:
            text = f"{type(problem.error).__name__}: {problem.error}"
            raise BrokenPlugin(f"{what} failed in a dry run on a fake device: {text}") from problem.error


class _Problem:
    """What a dry run in a thread of its own ended with."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def run(self, scheduler: Plugin, config: SchedulerConfig, policy: QueuePolicy) -> None:
        try:
            _serve(scheduler, config, policy)
        except BaseException as error:  # noqa: BLE001 - a plug-in may raise anything, `SystemExit` too
            self.error = error


def _serve(scheduler: Plugin, config: SchedulerConfig, policy: QueuePolicy) -> None:
    # The fakes bring random traffic and hashes, which nothing but a plan needs.
    from openinfer_core.testing.errors import require
    from openinfer_core.testing.fake_drafter import DraftScript
    from openinfer_core.testing.scheduler_driver import SchedulerDriver

    def make(config: SchedulerConfig, policy: QueuePolicy) -> Scheduler:
        return scheduler.make(config, policy, contract=Scheduler)

    drafts = DraftScript.MIX if config.max_drafts else None
    driver = SchedulerDriver(make, config, policy=policy, drafts=drafts)
    first, *others = [_request(index, config) for index in range(_NUM_REQUESTS)]
    driver.submit(first)
    driver.run()
    ended = driver.accounts[first.request_id].terminal
    require(isinstance(ended, Finished), f"{first.request_id} is alone and fits; it ended with {ended}")
    for request in others:
        driver.submit(request)
        driver.step()
    driver.abort(others[0].request_id)
    driver.run()


def _request(index: int, config: SchedulerConfig) -> GenerateRequest:
    """Prompts of one block and a few tokens, where context and pool have room; every other one begins like another."""
    # As if no table had a window: they take no more.
    room = min(config.max_model_tokens, config.num_blocks // len(config.table_windows) * config.block_size_tokens)
    max_tokens = min(_NUM_TOKENS, room - 1)
    num_prompt_tokens = max(1, min(config.block_size_tokens + 1 + index, room - max_tokens))
    return GenerateRequest(
        request_id=RequestId(index),
        prompt_token_ids=(index % 2, *range(num_prompt_tokens))[:num_prompt_tokens],
        sampling=SamplingParams(max_tokens=max_tokens, prompt_logprobs=None if max_tokens else 0),
    )

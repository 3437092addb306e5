"""Loading data-parallel ranks, threads or processes, each with a scheduler, a pool and tiers of its own.

On GPUs each rank has one, and a backend and a plan for it; all use the smallest pool. On a CPU they have one plan.
"""

import contextlib
import io
import logging
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from openinfer_core.scheduling import Scheduler
from openinfer_engine.data_parallel.loop import DataParallelLoop
from openinfer_engine.data_parallel.processes import load_ranks
from openinfer_engine.data_parallel.routing import RankRouter
from openinfer_engine.data_parallel.runner import PlanRunner, SharedRank, StepRound, ThreadRank
from openinfer_engine.distributed.expert_group import DataParallelCommunicator
from openinfer_engine.engine_plan import EnginePlan, resolve
from openinfer_engine.kv_tiers import OpenTiers, PoolTierPort, open_port, require_tiered
from openinfer_engine.loop import StepLoop
from openinfer_engine.options import DeviceKind
from openinfer_engine.tracing.trace import NoTrace, Tracer, open_trace
from openinfer_engine.weights.loading import load_workers
from openinfer_engine.worker.process_group import ProcessGroup
from openinfer_engine.worker.process_runner import agreed_plan
from openinfer_engine.worker.runner import Worker, raise_first

logger = logging.getLogger("openinfer.engine")

_KEY_BYTES = 32
_TIER_FACTOR, _MOST_HELD = 16, 1 << 18  # a remembered block takes 150 bytes, about


def build_data_parallel_loop(engine_plan: EnginePlan, processes: ProcessGroup | None = None) -> DataParallelLoop:
    """Loads the weights of every rank and puts the engine together, without a host.

    Args:
        engine_plan: of the first rank.
        processes: the other ranks; closed with the loop. None: they are threads.

    Raises:
        Refused: a device or tier cannot be had, or the file of a trace not be written.
        GroupBroken: the process of a rank died.
    """
    options, num_ranks = engine_plan.options, engine_plan.options.data_parallel_size
    with contextlib.ExitStack() as undo:
        if processes is None:
            plans = _plans_of_ranks(engine_plan)
        else:
            undo.callback(processes.close)
            plans = [agreed_plan(engine_plan, processes)] * num_ranks
        engine_plan = plans[0]
        if engine_plan.clipped_context is not None:
            logger.warning("%s", engine_plan.clipped_context)
        tracer = NoTrace() if options.trace is None else open_trace(Path(options.trace))
        if processes is None:
            ranks = _load_threads(plans, tracer, undo)
        else:
            ranks = load_ranks(engine_plan, processes, tracer)
            undo.callback(ranks[0].close)
        step_round = StepRound(ranks, processes)
        loops: list[StepLoop] = []
        for rank, (plan, runner) in enumerate(zip(plans, step_round.runners, strict=True)):
            loops.append(_make_loop(plan, runner, rank=rank, tracer=tracer))
            undo.callback(loops[-1].close)
        undo.pop_all()
    engine_plan.mark("ranks")
    logger.info("the engine started in %s", engine_plan.timeline)
    router = RankRouter(
        num_ranks,
        num_blocks=_held_blocks(engine_plan),
        block_size_tokens=options.block_size_tokens,
        key=secrets.token_bytes(_KEY_BYTES),
    )
    return DataParallelLoop(loops, step_round=step_round, router=router)


def _load_threads(plans: Sequence[EnginePlan], tracer: Tracer, undo: contextlib.ExitStack) -> Sequence[SharedRank]:
    first, *others = (plan.backend for plan in plans)
    ends = first.thread_group(others)
    communicators = [DataParallelCommunicator(each, ends) for each in ends]
    for each in communicators:
        undo.callback(each.close)
    workers = _load(plans, communicators, tracer)
    for worker in workers:
        undo.callback(worker.close)
    parts = zip(workers, communicators, (plan.backend.enter_thread for plan in plans), strict=True)
    return [ThreadRank(index, *each) for index, each in enumerate(parts)]


def _plans_of_ranks(engine_plan: EnginePlan) -> Sequence[EnginePlan]:
    """One for each rank; on a CPU, where all are on one device, the same."""
    options, num_ranks = engine_plan.options, engine_plan.options.data_parallel_size
    if options.device is not DeviceKind.CUDA:
        return [engine_plan] * num_ranks

    def plan_of(rank: int) -> EnginePlan:
        return resolve(engine_plan.definition, engine_plan.model_dir, options, rank=rank)

    # In threads of their own: to open a GPU makes it that of the thread.
    with ThreadPoolExecutor(num_ranks - 1) as threads:
        plans = [engine_plan, *threads.map(plan_of, range(1, num_ranks))]
    smallest = min(plan.num_blocks for plan in plans)
    return [plan.with_num_blocks(smallest) for plan in plans]


def _load(
    plans: Sequence[EnginePlan], communicators: Sequence[DataParallelCommunicator], tracer: Tracer
) -> Sequence[Worker]:
    """The workers of all ranks, which warm up together."""
    if plans[0].options.device is not DeviceKind.CUDA:
        return load_workers(plans[0], communicators, tracer)

    def load(plan: EnginePlan, communicator: DataParallelCommunicator) -> Worker:
        progress = None if communicator.data_parallel_rank == 0 else io.StringIO()
        try:
            (worker,) = load_workers(plan, [communicator], tracer, stream=progress)
        except BaseException as error:
            communicator.abort(error)  # the others wait for this rank
            raise
        return worker

    def end(plan: EnginePlan, worker: Worker) -> None:
        plan.backend.enter_thread()
        worker.close()

    with ThreadPoolExecutor(len(plans)) as threads:
        loading = [threads.submit(load, *each) for each in zip(plans, communicators, strict=True)]
        try:
            raise_first(loading)
        except BaseException:
            # Of those that had loaded: their graphs, for which the end of the group waits, go with them.
            for plan, each in zip(plans, loading, strict=True):
                if each.exception() is None:
                    threads.submit(end, plan, each.result()).result()
            raise
        return [each.result() for each in loading]


def _held_blocks(engine_plan: EnginePlan) -> int:
    """What the router remembers of each rank: how much tiers hold, none of them tells."""
    num_blocks = engine_plan.num_blocks
    return num_blocks if engine_plan.tiers is None else max(num_blocks, min(_TIER_FACTOR * num_blocks, _MOST_HELD))


def _make_loop(engine_plan: EnginePlan, runner: PlanRunner, *, rank: int, tracer: Tracer) -> StepLoop:
    with contextlib.ExitStack() as undo:
        tiers = engine_plan.open_tiers(rank=rank)
        if tiers is not None:
            undo.callback(tiers.tier.close)
        scheduler = engine_plan.make_scheduler(digest_key=None if tiers is None else tiers.digest_key)
        port = None if tiers is None else _join_tiers(engine_plan, tiers, scheduler, runner, tracer)
        if port is not None:
            undo.pop_all()  # the port closes them
            undo.callback(port.close)
        compiler = engine_plan.make_grammar_compiler()
        undo.pop_all()
    return StepLoop(
        info=msgspec.structs.replace(engine_plan.info, start=engine_plan.timeline.phases),
        scheduler=scheduler,
        runner=runner,
        guard=engine_plan.guard_options,
        grammar_compiler=compiler,
        port=port,
        tracer=tracer,
    )


def _join_tiers(
    engine_plan: EnginePlan, tiers: OpenTiers, scheduler: Scheduler, runner: PlanRunner, tracer: Tracer
) -> PoolTierPort:
    tiered = require_tiered(scheduler, name=engine_plan.scheduler.name, has_states=engine_plan.has_states)
    load_timeout_s = engine_plan.options.kv_load_timeout_ms / 1000
    port = open_port(tiers, pool=runner.pool_memory(), load_timeout_s=load_timeout_s, tracer=tracer)
    tiered.use_tiers(port)
    return port

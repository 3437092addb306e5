"""Loading data-parallel ranks, threads or processes, each with a scheduler, a pool and tiers of its own.

On GPUs they are processes; all use the smallest pool.
"""

import contextlib
import logging
import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec

from openinfer_core.errors import ContractViolation
from openinfer_core.scheduling import Scheduler
from openinfer_engine.data_parallel.loop import DataParallelLoop
from openinfer_engine.data_parallel.processes import load_ranks
from openinfer_engine.data_parallel.routing import RankRouter, SharesDigests
from openinfer_engine.data_parallel.runner import PlanRunner, SharedRank, StepRound, ThreadRank
from openinfer_engine.distributed.expert_group import DataParallelCommunicator
from openinfer_engine.engine_plan import EnginePlan
from openinfer_engine.kv_tiers import (
    OpenTiers,
    PoolTierPort,
    RemoteTierPort,
    TierContents,
    open_port,
    read_digest_key,
    require_tiered,
)
from openinfer_engine.loop import StepLoop
from openinfer_engine.tracing.trace import NoTrace, Tracer, open_trace
from openinfer_engine.weights.loading import load_workers
from openinfer_engine.worker.process_group import ProcessGroup
from openinfer_engine.worker.process_runner import agreed_plan
from openinfer_kv_cache import PrefixHasher, TellingTier

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
    options = engine_plan.options
    with contextlib.ExitStack() as undo:
        if processes is not None:
            undo.callback(processes.close)
            engine_plan = agreed_plan(engine_plan, processes)
        if engine_plan.clipped_context is not None:
            logger.warning("%s", engine_plan.clipped_context)
        tracer = NoTrace() if options.trace is None else open_trace(Path(options.trace))
        if processes is None:
            ranks = _load_threads(engine_plan, tracer, undo)
        else:
            ranks = load_ranks(engine_plan, processes, tracer)
            undo.callback(ranks[0].close)
        step_round = StepRound(ranks, processes)
        loops: list[StepLoop] = []
        schedulers: list[Scheduler] = []
        contents: list[TierContents | None] = []
        digest_key: bytes | None = None
        for rank, runner in enumerate(step_round.runners):
            tiers = None if runner.share is not None else engine_plan.open_tiers(rank=rank)
            # All ranks name blocks alike, as the first one's tiers do: others' take any names.
            digest_key = digest_key or _digest_key(engine_plan, tiers)
            loop, scheduler = _make_loop(engine_plan, runner, tiers, digest_key=digest_key, tracer=tracer)
            undo.callback(loop.close)
            loops.append(loop)
            schedulers.append(scheduler)
            contents.append(_contents(runner, tiers))
        layout_digest = engine_plan.scheduler_config.layout_digest
        hasher = PrefixHasher(options.block_size_tokens, key=digest_key, layout_digest=layout_digest)
        for scheduler in schedulers:
            if isinstance(scheduler, SharesDigests):  # the router digests each prompt first: one is enough
                scheduler.share_digests(hasher)
        undo.pop_all()
    engine_plan.mark("ranks")
    logger.info("the engine started in %s", engine_plan.timeline)
    router = RankRouter(
        contents,
        num_blocks=engine_plan.num_blocks if None not in contents else _held_blocks(engine_plan),
        hasher=hasher,
    )
    return DataParallelLoop(loops, step_round=step_round, router=router)


def _load_threads(engine_plan: EnginePlan, tracer: Tracer, undo: contextlib.ExitStack) -> Sequence[SharedRank]:
    """The ranks of this process, which warm up together."""
    ends = engine_plan.backend.thread_group(engine_plan.options.data_parallel_size)
    communicators = [DataParallelCommunicator(each, ends) for each in ends]
    for each in communicators:
        undo.callback(each.close)
    workers = load_workers(engine_plan, communicators, tracer)
    for worker in workers:
        undo.callback(worker.close)
    parts = zip(workers, communicators, strict=True)
    return [ThreadRank(index, *each, engine_plan.backend.enter_thread) for index, each in enumerate(parts)]


def _digest_key(engine_plan: EnginePlan, tiers: OpenTiers | None) -> bytes:
    """What the first rank's tiers find their blocks under, or the key file's; drawn where neither is."""
    key_file = engine_plan.options.kv_key_file
    kept = None if tiers is None else tiers.digest_key
    return kept or (secrets.token_bytes(_KEY_BYTES) if key_file is None else read_digest_key(key_file))


def _contents(runner: PlanRunner, tiers: OpenTiers | None) -> TierContents | None:
    """What a rank's tiers hold from now on; None where they do not tell."""
    if runner.share is not None:
        return runner.share.contents
    if tiers is None or not isinstance(tiers.tier, TellingTier):
        return None
    contents = TierContents()
    tiers.tier.listen(contents)
    return contents


def _held_blocks(engine_plan: EnginePlan) -> int:
    """What is remembered of a rank whose tiers, if it has any, do not tell what they hold."""
    num_blocks = engine_plan.num_blocks
    return num_blocks if engine_plan.tiers is None else max(num_blocks, min(_TIER_FACTOR * num_blocks, _MOST_HELD))


def _make_loop(
    engine_plan: EnginePlan, runner: PlanRunner, tiers: OpenTiers | None, *, digest_key: bytes | None, tracer: Tracer
) -> tuple[StepLoop, Scheduler]:
    with contextlib.ExitStack() as undo:
        if tiers is not None:
            undo.callback(tiers.tier.close)
        scheduler = engine_plan.make_scheduler(digest_key=digest_key)
        port = None if engine_plan.tiers is None else _join_tiers(engine_plan, tiers, scheduler, runner, tracer)
        if port is not None:
            undo.pop_all()  # the port closes them
            undo.callback(port.close)
        compiler = engine_plan.make_grammar_compiler()
        undo.pop_all()
    loop = StepLoop(
        info=msgspec.structs.replace(engine_plan.info, start=engine_plan.timeline.phases),
        scheduler=scheduler,
        runner=runner,
        guard=engine_plan.guard_options,
        grammar_compiler=compiler,
        port=port,
        tracer=tracer,
    )
    return loop, scheduler


def _join_tiers(
    engine_plan: EnginePlan, tiers: OpenTiers | None, scheduler: Scheduler, runner: PlanRunner, tracer: Tracer
) -> PoolTierPort | RemoteTierPort:
    tiered = require_tiered(scheduler, name=engine_plan.scheduler.name, has_states=engine_plan.has_states)
    if tiers is not None:
        load_timeout_s = engine_plan.options.kv_load_timeout_ms / 1000
        port = open_port(tiers, pool=runner.pool_memory(), load_timeout_s=load_timeout_s, tracer=tracer)
    elif runner.share is not None:
        port = RemoteTierPort(runner.share, num_blocks=_held_blocks(engine_plan))
    else:
        raise ContractViolation("a rank of this process has no tiers")
    tiered.use_tiers(port)
    return port

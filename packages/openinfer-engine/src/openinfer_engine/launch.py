"""Launching a family's engine: in a thread of this process, or in a process of its own.

Handles of engines are imported where one is made: the engine's process builds a loop and needs no asyncio.
"""

import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from openinfer_core import EngineHandle, FamilyPlan, Refused
from openinfer_core.process.host import EngineLoop
from openinfer_core.process.timeline import Timeline
from openinfer_core.scheduling import PlacesAdapters, Scheduler, TakesStepTimes
from openinfer_engine.data_parallel.launch import build_data_parallel_loop
from openinfer_engine.distributed.communicator import Communicator, SoloCommunicator
from openinfer_engine.distributed.local_group import LocalGroup
from openinfer_engine.dry_run import dry_run
from openinfer_engine.engine_plan import EnginePlan, resolve
from openinfer_engine.engine_spec import EngineSpec
from openinfer_engine.gguf.file import GGUF_FILE
from openinfer_engine.grammars.choice import NONE as NO_GRAMMARS
from openinfer_engine.grammars.choice import no_grammars_because
from openinfer_engine.guard.family_faults import named_faults
from openinfer_engine.kv_events.opening import tell_of_tiers
from openinfer_engine.kv_tiers import (
    LocalShare,
    MemoryPrefault,
    OpenTiers,
    PoolTierPort,
    RankShare,
    begin_prefault,
    open_port,
    require_tiered,
)
from openinfer_engine.kv_transfer import Handovers, KvTransfer, require_pins
from openinfer_engine.lifecycle.lifecycle import WeightsInUse
from openinfer_engine.lifecycle.orders import WeightsSource
from openinfer_engine.loop import StepLoop
from openinfer_engine.lora.remote_rank import LocalRank
from openinfer_engine.lora.store import AdapterStore
from openinfer_engine.model import ModelDefinition
from openinfer_engine.options import DeviceKind, EngineOptions, LoadFormat, LoopHost
from openinfer_engine.speculation.step_times import measure_step_times
from openinfer_engine.tracing.step_trace import Begin, StepTrace
from openinfer_engine.tracing.trace import NoTrace, Tracer, open_trace
from openinfer_engine.weights.loading import load_workers
from openinfer_engine.worker.process_group import ProcessGroup, start_workers
from openinfer_engine.worker.process_runner import ProcessRunner, agreed_plan, load_with_processes
from openinfer_engine.worker.runner import ThreadRunner
from openinfer_kv_cache import PrefixHasher, TieredScheduler

logger = logging.getLogger("openinfer.engine")

CHILD_MODULE = "openinfer_engine.child"


def plan(definition: ModelDefinition[Any], model_dir: Path, options: EngineOptions) -> FamilyPlan:
    """What `launch` would do; every part is made, and the scheduler run on a fake device. Raises as these do."""
    from openinfer_engine.ranks.choice import planned_placement

    with named_faults(definition):
        engine_plan = resolve(definition, model_dir, options, placement=planned_placement(options))
        dry_run(engine_plan)
        return engine_plan.plan()


def plan_for_gpu(definition: ModelDefinition[Any], model_dir: Path, options: EngineOptions, *, gpu: str) -> FamilyPlan:
    """`plan` for GPUs of that name, which need not be here; without files of weights, of the config's shapes alone.

    Raises:
        InvalidRequest: the name is not known.
        Refused: the options cannot be served, or the model does not fit.
    """
    from openinfer_engine.cuda.named_gpus import NamedGpuBackend, named_gpu

    has_weights = any(model_dir.glob("*.safetensors")) or (model_dir / GGUF_FILE).exists()
    shapes = {} if has_weights else {"load_format": LoadFormat.DUMMY}
    asked = msgspec.structs.replace(options, device=DeviceKind.CUDA, **shapes)
    with named_faults(definition):
        planned = resolve(definition, model_dir, asked, backend=NamedGpuBackend(named_gpu(gpu), asked)).plan()
    weights = {} if has_weights else {"weights": "counted from config.json"}
    return msgspec.structs.replace(planned, parts=planned.parts | weights)


def launch(definition: ModelDefinition[Any], model_dir: Path, options: EngineOptions) -> EngineHandle:
    """Loads a model and returns its running engine; see `resolve` for what it raises.

    With `LoopHost.PROCESS`, the family must be installed under `definition.name` in the group
    `openinfer.models`, because the child finds it there.
    """
    if options.engine_host is LoopHost.THREAD:
        from openinfer_core.process.local import InProcessEngine

        timeline = Timeline(begin_s=time.time())
        processes = start_workers(EngineSpec.of(definition, model_dir, options), options)
        try:
            placement = None if processes is None else processes.placement
            with named_faults(definition):
                engine_plan = resolve(definition, model_dir, options, timeline=timeline, placement=placement)
        except BaseException:
            if processes is not None:
                processes.close(deadline_s=0)
            raise
        return InProcessEngine(build_engine_loop(engine_plan, processes))
    from openinfer_core.process.remote import spawn_engine

    return spawn_engine(CHILD_MODULE, EngineSpec.of(definition, model_dir, options))


def build_engine_loop(engine_plan: EnginePlan, processes: ProcessGroup | None = None) -> EngineLoop:
    """Puts an engine together: one step loop, or one for each data-parallel rank. Raises as `build_loop`."""
    with named_faults(engine_plan.definition):
        if engine_plan.options.data_parallel_size > 1:
            return build_data_parallel_loop(engine_plan, processes or _start_processes(engine_plan))
        return build_loop(engine_plan, processes)


def build_loop(engine_plan: EnginePlan, processes: ProcessGroup | None = None) -> StepLoop:
    """Loads the weights of every rank and puts the engine together, without a host; the loop closes the processes.

    Raises:
        Refused: a rank cannot be had, or the file of a trace not be written.
        GroupBroken: the process of a rank died.
    """
    with contextlib.ExitStack() as undo:
        processes = processes or _start_processes(engine_plan)
        if processes is not None:
            undo.callback(processes.close)
            engine_plan = agreed_plan(engine_plan, processes)
        if engine_plan.clipped_context is not None:
            logger.warning("%s", engine_plan.clipped_context)
        path = engine_plan.options.trace
        tracer = NoTrace() if path is None else open_trace(Path(path))
        tiers = engine_plan.open_tiers()
        if tiers is not None:
            undo.callback(tiers.tier.close)
        scheduler = engine_plan.make_scheduler(digest_key=None if tiers is None else tiers.digest_key)
        step_trace = _begin_step_trace(engine_plan)
        if step_trace is not None:
            undo.callback(step_trace.close)
        kv_events = engine_plan.open_kv_events(scheduler)
        if kv_events is not None:
            undo.callback(kv_events.close)
            if tiers is not None:
                tell_of_tiers(tiers.tier, kv_events, layout=engine_plan.layouts[0])
        if engine_plan.grammar_compiler is None and engine_plan.options.grammar_compiler != NO_GRAMMARS:
            logger.warning("%s", no_grammars_because())
        compiler = engine_plan.make_grammar_compiler()  # before the weights: it reads the tokenizer while they load
        if compiler is not None:
            undo.callback(compiler.close)
        weights = _weights_in_use(engine_plan)  # before they are read: what is written later counts as a change
        pages = _prepare_tiers(engine_plan, tiers, scheduler)
        undo.callback(pages.close)
        # Gigabytes of pages take seconds: they are taken while the weights are loaded, and waited for afterwards.
        runner = _make_runner(engine_plan, processes, tracer)
        undo.callback(runner.close)
        pages.finish()
        adapters = _make_adapters(engine_plan, scheduler, runner, processes, undo, step_trace=step_trace)
        _measure_drafts(engine_plan, scheduler, runner)
        port = _join_tiers(engine_plan, tiers, scheduler, runner, processes, tracer=tracer)
        kv_transfer = _open_transfer(engine_plan, tiers, scheduler, port)
        undo.pop_all()
    info = msgspec.structs.replace(engine_plan.info, start=engine_plan.timeline.phases)
    logger.info("the engine started in %s", engine_plan.timeline)
    if engine_plan.described_tables is not None:
        logger.info("KV: %s", engine_plan.described_tables)
    return StepLoop(
        info=info,
        scheduler=scheduler,
        runner=runner,
        guard=engine_plan.guard_options,
        grammar_compiler=compiler,
        kv_events=kv_events,
        port=port,
        kv_transfer=kv_transfer,
        adapters=adapters,
        max_drafts=engine_plan.scheduler_config.max_drafts,
        drafter_faults=None if engine_plan.drafter is None else engine_plan.drafter.faults,
        tracer=tracer,
        step_trace=step_trace,
        weights=weights,
    )


def _measure_drafts(engine_plan: EnginePlan, scheduler: Scheduler, runner: ThreadRunner | ProcessRunner) -> None:
    """Tells a scheduler that weighs drafts against their time what steps take here."""
    config = engine_plan.scheduler_config
    if not (config.max_drafts and config.adapts_drafts and isinstance(scheduler, TakesStepTimes)):
        return
    times = measure_step_times(runner, config, num_token_ids=engine_plan.info.num_token_ids)
    scheduler.take_step_times(times)
    engine_plan.mark("draft_times")
    most = max((each.num_rows for each in times), default=0)
    logger.info("%d steps of up to %d rows were timed, with drafts and without", len(times), most)


def _weights_in_use(engine_plan: EnginePlan) -> WeightsInUse | None:
    """None where they cannot change: on a GPU graphs hold their addresses, which stay with --enable-sleep alone."""
    options = engine_plan.options
    on_device = options.device is DeviceKind.CUDA
    if on_device and not options.enable_sleep:
        return None
    is_dummy = options.load_format is LoadFormat.DUMMY
    folder = None if is_dummy else str(engine_plan.model_dir.resolve())
    return WeightsInUse(WeightsSource(folder=folder), root=options.weights_root, on_device=on_device)


def _make_adapters(
    engine_plan: EnginePlan,
    scheduler: Scheduler,
    runner: ThreadRunner | ProcessRunner,
    processes: ProcessGroup | None,
    undo: contextlib.ExitStack,
    *,
    step_trace: StepTrace | None,
) -> AdapterStore | None:
    """The adapters of `--lora`, which all ranks hold; None where no adapters are served."""
    if not (of_ranks := runner.adapters) or not isinstance(scheduler, PlacesAdapters):
        return None
    options = engine_plan.options
    first, *others = of_ranks
    store = AdapterStore(
        first,
        others=[*map(LocalRank, others), *([] if processes is None else processes.adapters)],
        max_bytes=options.lora_cache_bytes,
        root=None if options.lora_root is None else Path(options.lora_root),
    )
    undo.callback(store.close)
    for name, folder in options.adapters.items():
        store.load_now(name, Path(folder))
    scheduler.use_adapters(store if step_trace is None else step_trace.recorded_port(store))
    engine_plan.mark("adapters")
    return store


def _prepare_tiers(engine_plan: EnginePlan, tiers: OpenTiers | None, scheduler: Scheduler) -> MemoryPrefault:
    """What is checked, and what can begin, before the weights are loaded."""
    if tiers is None:
        return MemoryPrefault([])
    _require_tiered(engine_plan, scheduler)
    if engine_plan.options.kv_transfer is not None:
        require_pins(scheduler, name=engine_plan.scheduler.name)
    if engine_plan.options.device is not DeviceKind.CUDA:
        return MemoryPrefault([])
    return begin_prefault(tiers, num_ranks=engine_plan.options.tensor_parallel_size)


def _join_tiers(
    engine_plan: EnginePlan,
    tiers: OpenTiers | None,
    scheduler: Scheduler,
    runner: ThreadRunner | ProcessRunner,
    processes: ProcessGroup | None,
    *,
    tracer: Tracer,
) -> PoolTierPort | None:
    if tiers is None:
        return None
    memories = runner.pool_memories()
    load_timeout_s = engine_plan.options.kv_load_timeout_ms / 1000
    with contextlib.ExitStack() as undo:
        shares: list[RankShare] = [] if processes is None else [*processes.shares]
        for rank, memory in enumerate(memories[1:], 1):
            if (theirs := engine_plan.open_tiers(rank=rank)) is not None:
                undo.callback(theirs.tier.close)
                shares.append(LocalShare(open_port(theirs, pool=memory, load_timeout_s=load_timeout_s)))
        port = open_port(tiers, pool=memories[0], load_timeout_s=load_timeout_s, shares=shares, tracer=tracer)
        undo.callback(port.close)
        _require_tiered(engine_plan, scheduler).use_tiers(port)
        undo.pop_all()
    engine_plan.mark("kv_tiers")
    return port


def _open_transfer(
    engine_plan: EnginePlan, tiers: OpenTiers | None, scheduler: Scheduler, port: PoolTierPort | None
) -> KvTransfer | None:
    name = engine_plan.options.kv_transfer
    if name is None or tiers is None or port is None:
        return None
    config, layout = engine_plan.scheduler_config, engine_plan.layouts[0]
    return KvTransfer(
        tier=name,
        layout_digest=layout.digest,
        hasher=PrefixHasher(config.block_size_tokens, key=tiers.digest_key, layout_digest=config.layout_digest),
        handovers=Handovers(
            scheduler=require_pins(scheduler, name=engine_plan.scheduler.name),
            port=port,
            block_bytes=engine_plan.options.tensor_parallel_size * layout.block_bytes,
            num_blocks=config.num_blocks,
            timeout_s=engine_plan.options.kv_handover_timeout_ms / 1000,
        ),
        look_up=port.look_up,
        timeout_s=engine_plan.options.kv_load_timeout_ms / 1000,
        clock=time.monotonic,
    )


def _require_tiered(engine_plan: EnginePlan, scheduler: Scheduler) -> TieredScheduler:
    return require_tiered(
        scheduler, name=engine_plan.scheduler.name, has_states=bool(engine_plan.layouts[0].slot_bytes)
    )


def _start_processes(engine_plan: EnginePlan) -> ProcessGroup | None:
    spec = EngineSpec.of(engine_plan.definition, engine_plan.model_dir, engine_plan.options)
    return start_workers(spec, engine_plan.options)


def _begin_step_trace(engine_plan: EnginePlan) -> StepTrace | None:
    options, path = engine_plan.options, engine_plan.options.step_trace
    if path is None:
        return None
    begin = Begin(
        scheduler=engine_plan.scheduler.name,
        queue_policy=engine_plan.queue_policy.name,
        config=msgspec.structs.replace(engine_plan.scheduler_config, digest_key=None),
        tenant_weights=options.tenant_weights,
    )
    try:
        return StepTrace(Path(path), begin)
    except OSError as error:
        raise Refused(f"--step-trace {path} cannot be written: {error.strerror}") from error


def _make_runner(
    engine_plan: EnginePlan, processes: ProcessGroup | None, tracer: Tracer
) -> ThreadRunner | ProcessRunner:
    size = engine_plan.options.tensor_parallel_size
    if processes is not None:
        return load_with_processes(engine_plan, processes, tracer)
    communicators: Sequence[Communicator] = [SoloCommunicator()] if size == 1 else LocalGroup(size).communicators
    return ThreadRunner(load_workers(engine_plan, communicators, tracer), tracer=tracer)

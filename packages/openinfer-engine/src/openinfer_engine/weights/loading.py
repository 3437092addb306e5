"""Loading one rank, or all ranks of a process: weights, then memory and warm-up."""

import io
import logging
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TextIO, TypeAlias

from openinfer_core import InvalidCheckpoint, read_config
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.distributed.expert_group import is_first
from openinfer_engine.drafters.weights import drafter_weights, weights_of
from openinfer_engine.drafting import DrafterContext, SharedDrafter
from openinfer_engine.engine_plan import EnginePlan
from openinfer_engine.kernel_providers import with_providers
from openinfer_engine.lifecycle.rank import HoldsModel, OpenedWeights, ReloadableWorker
from openinfer_engine.lora.arena import AdaptedSource, AdapterArena
from openinfer_engine.lora.choice import make_arena, make_rank_adapters
from openinfer_engine.lora.rank_adapters import RankAdapters
from openinfer_engine.model import Model, WeightSource
from openinfer_engine.options import LoadFormat
from openinfer_engine.tracing.trace import NoTrace, Tracer
from openinfer_engine.weights.checkpoint import Checkpoint, RankWeights
from openinfer_engine.weights.load_progress import LoadProgress
from openinfer_engine.worker.runner import Worker
from openinfer_kernels import DeviceMemoryStateError, Ops, WeightValueError
from openinfer_kernels.adapted import with_adapters

logger = logging.getLogger("openinfer.engine")

_Loaded: TypeAlias = tuple[Model, Ops, RankAdapters | None]


def load_workers(
    engine_plan: EnginePlan, communicators: Sequence[Communicator], tracer: Tracer, *, stream: TextIO | None = None
) -> Sequence[Worker]:
    """The ranks of this process, warmed up; one per communicator, each loaded in a thread of its own."""
    with ThreadPoolExecutor(len(communicators), initializer=engine_plan.backend.enter_thread) as pool:
        models = _load_models(engine_plan, communicators, pool, stream)  # with adapter slots, where there are any
        engine_plan.mark("weights")
        parts = zip(models, communicators, strict=True)
        making = [pool.submit(_make_worker, engine_plan, *each, tracer) for each in parts]
        return [future.result() for future in making]


def _load_models(
    engine_plan: EnginePlan, communicators: Sequence[Communicator], pool: ThreadPoolExecutor, stream: TextIO | None
) -> list[_Loaded]:
    total_bytes = len(communicators) * engine_plan.weights_bytes
    with _weights(engine_plan) as checkpoint, LoadProgress(total_bytes, stream=stream) as progress:
        loading = [pool.submit(_load_model, engine_plan, checkpoint, each, progress) for each in communicators]
        return [future.result() for future in loading]


@contextmanager
def _weights(engine_plan: EnginePlan) -> Generator[Checkpoint | None]:
    """The checkpoint, if there is one. It is closed while other work goes on: unmapping 8 GB takes 0.2 s."""
    if engine_plan.options.load_format is LoadFormat.DUMMY:
        yield None
        return
    checkpoint = Checkpoint.open(engine_plan.model_dir, keeps_gguf=engine_plan.options.keeps_gguf)
    try:
        yield checkpoint
    finally:
        threading.Thread(target=checkpoint.close, name="openinfer-unmap").start()


def _load_model(
    engine_plan: EnginePlan, checkpoint: Checkpoint | None, communicator: Communicator, progress: LoadProgress
) -> _Loaded:
    ops = engine_plan.backend.make_ops()
    if is_first(communicator):
        engine_plan.mark("operators")
    provided = {each.operator for each in engine_plan.kernel_providers}
    memory = engine_plan.backend.adapters_memory
    arena = make_arena(engine_plan.options, ops, provided=provided, memory=memory)
    model = _read_model(engine_plan, checkpoint, communicator, ops, progress, arena=arena)
    if arena is None:
        return model, ops, None
    return model, ops, make_rank_adapters(arena, engine_plan.definition, engine_plan.config, engine_plan.options)


def _read_model(
    engine_plan: EnginePlan,
    checkpoint: Checkpoint | None,
    communicator: Communicator,
    ops: Ops,
    progress: LoadProgress,
    *,
    arena: AdapterArena | None = None,
) -> Model:
    definition, config, rank = engine_plan.definition, engine_plan.config, communicator.rank
    weights: WeightSource
    if checkpoint is None:
        weights = engine_plan.backend.dummy_weights(definition.tensors(config), rank=rank, size=communicator.size)
    else:
        checkpoint.join_pieces(definition.tensors(config))
        weights = RankWeights(checkpoint, rank=rank, size=communicator.size)
    served = with_providers(ops, engine_plan.kernel_providers)
    if arena is not None:
        weights, served = AdaptedSource(weights, arena), with_adapters(served, arena.weights)
    try:
        with engine_plan.backend.weights_memory(), ops.loading(progress.advance):
            return definition.load(
                config,
                weights,
                ops=served,
                communicator=communicator,
                max_model_tokens=engine_plan.worker_limits.max_model_tokens,
            )
    except WeightValueError as error:  # of codes that were looked at on their way to a GPU
        raise InvalidCheckpoint(str(error)) from error


def _make_worker(engine_plan: EnginePlan, loaded: _Loaded, communicator: Communicator, tracer: Tracer) -> Worker:
    model, ops, adapters = loaded
    drafter = _make_drafter(engine_plan, model, ops, communicator, OpenedWeights(None, None))
    worker = engine_plan.backend.make_worker(
        model,
        ops=ops,
        num_blocks=engine_plan.num_blocks,
        span_blocks=engine_plan.span_blocks,
        layout=engine_plan.layouts[communicator.rank],
        communicator=communicator,
        limits=engine_plan.worker_limits,
        drafter=drafter,
        adapters=adapters,
        mark=engine_plan.mark if is_first(communicator) else _no_mark,
        tracer=tracer if is_first(communicator) else NoTrace(),
    )
    # Data-parallel ranks change no weights: an order would have to reach all between the same two steps.
    if engine_plan.options.data_parallel_size > 1 or not isinstance(worker, HoldsModel):
        return worker
    arena = None if adapters is None else adapters.arena

    def read(opened: OpenedWeights) -> tuple[Model, SharedDrafter | None]:
        progress = LoadProgress(engine_plan.weights_bytes, stream=io.StringIO())
        with progress, nullcontext() if arena is None else arena.loading_again():
            model = _read_model(engine_plan, opened.checkpoint, communicator, ops, progress, arena=arena)
        # A drafter is told by being made anew: what it has read of the model, or keeps of sequences, is void. Where the
        # worker keeps the one that it has, the new one's arrays lie where that one's are, and it is gone again.
        try:
            made = _make_drafter(engine_plan, model, ops, communicator, opened)
        except DeviceMemoryStateError as error:
            logger.warning("the drafter keeps the weights that it had: %s", error)
            made = None
        return model, None if worker.keeps_drafter else made

    return ReloadableWorker(worker, worker, engine_plan, read)


def _make_drafter(
    engine_plan: EnginePlan, model: Model, ops: Ops, communicator: Communicator, opened: OpenedWeights
) -> SharedDrafter | None:
    if engine_plan.drafter is None:
        return None
    limits, asked = engine_plan.worker_limits, engine_plan.drafter.asked
    own = None if asked is None else asked.drafter_dir
    context = DrafterContext(
        model_dir=opened.folder or engine_plan.model_dir,
        config=read_config(engine_plan.model_dir),
        model=model,
        ops=with_providers(ops, engine_plan.kernel_providers),
        communicator=communicator,
        max_num_seqs=limits.max_num_seqs,
        max_model_tokens=limits.max_model_tokens,
        num_token_ids=limits.num_token_ids,
        max_drafts=engine_plan.drafter.max_drafts,
        options=engine_plan.drafter.options,
        model_config=engine_plan.config,
        drafter_dir=opened.drafter_folder or own,
        requirements=None if asked is None else asked.requirements(communicator.size),
    )
    with engine_plan.backend.drafter_memory(), _drafter_weights(engine_plan, context, opened) as weights, ops.loading():
        return engine_plan.drafter.make(replace(context, weights=weights))


@contextmanager
def _drafter_weights(
    engine_plan: EnginePlan, context: DrafterContext, opened: OpenedWeights
) -> Generator[WeightSource | None]:
    """The tensors that a drafter asked for; None if it asked for none."""
    if context.requirements is None:
        yield None
        return
    ranks = {"rank": context.communicator.rank, "size": context.communicator.size}
    tensors, asked = context.requirements.tensors, engine_plan.drafter and engine_plan.drafter.asked
    checkpoint = opened.drafter
    if checkpoint is None and opened.checkpoint is not None and asked is not None and asked.is_in(opened.checkpoint):
        checkpoint = opened.checkpoint  # with the layers that drafts are made of
    if checkpoint is not None:
        yield weights_of(checkpoint, tensors, **ranks)
        return
    if engine_plan.options.load_format is LoadFormat.DUMMY:
        yield engine_plan.backend.dummy_weights(tensors, **ranks)
        return
    with drafter_weights(context.drafter_dir or context.model_dir, tensors, **ranks) as weights:
        yield weights


def _no_mark(phase: str) -> None:
    del phase

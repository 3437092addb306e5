"""Launching a family's engine: in a thread of this process, or in a process of its own."""

import logging
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from openinfer_core import EngineHandle, FamilyPlan
from openinfer_core.local import InProcessEngine
from openinfer_core.remote import spawn_engine
from openinfer_core.timeline import Timeline
from openinfer_engine.checkpoint import Checkpoint, RankWeights
from openinfer_engine.communicator import Communicator, SoloCommunicator
from openinfer_engine.composition import Composition, resolve
from openinfer_engine.kernel_providers import with_providers
from openinfer_engine.load_progress import LoadProgress
from openinfer_engine.local_group import LocalGroup
from openinfer_engine.loop import StepLoop
from openinfer_engine.model import Model, ModelDefinition, WeightSource
from openinfer_engine.options import EngineHost, EngineOptions, LoadFormat
from openinfer_engine.runner import Rank, ThreadRunner
from openinfer_engine.trace import NoTrace, Trace, Tracer
from openinfer_kernels import Ops

logger = logging.getLogger("openinfer.engine")

CHILD_MODULE = "openinfer_engine.child"


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the engine process is told to build."""

    family: str
    """Name in the group `openinfer.models`; its object has a `definition`."""
    model_dir: str
    options: msgspec.Raw
    """The family's own options type, as JSON."""


def plan(definition: ModelDefinition[Any], model_dir: Path, options: EngineOptions) -> FamilyPlan:
    """What `launch` would do; see `resolve` for what it raises."""
    return resolve(definition, model_dir, options).plan()


def launch(definition: ModelDefinition[Any], model_dir: Path, options: EngineOptions) -> EngineHandle:
    """Loads a model and returns its running engine; see `resolve` for what it raises.

    With `EngineHost.PROCESS`, the family must be installed under `definition.name` in the group
    `openinfer.models`, because the child finds it there.
    """
    if options.engine_host is EngineHost.THREAD:
        timeline = Timeline(begin_s=time.time())
        return InProcessEngine(build_loop(resolve(definition, model_dir, options, timeline=timeline)))
    raw = msgspec.Raw(msgspec.json.encode(options))
    spec = EngineSpec(family=definition.name, model_dir=str(model_dir.resolve()), options=raw)
    return spawn_engine(CHILD_MODULE, spec)


def build_loop(composition: Composition) -> StepLoop:
    """Loads the weights of every rank and puts the engine together, without a host."""
    scheduler = composition.make_scheduler()
    tracer = NoTrace() if composition.options.trace is None else Trace(Path(composition.options.trace))
    compiler = composition.make_grammar_compiler()  # before the weights: it reads the tokenizer beside them
    try:
        runner = ThreadRunner(_load_ranks(composition, tracer), tracer=tracer)
    except BaseException:
        if compiler is not None:
            compiler.close()
        raise
    info = msgspec.structs.replace(composition.info, start=composition.timeline.phases)
    logger.info("the engine started in %s", composition.timeline)
    return StepLoop(info=info, scheduler=scheduler, runner=runner, grammar_compiler=compiler, tracer=tracer)


def _load_ranks(composition: Composition, tracer: Tracer) -> Sequence[Rank]:
    size = composition.options.tensor_parallel_size
    communicators: Sequence[Communicator] = [SoloCommunicator()] if size == 1 else LocalGroup(size).communicators
    with ThreadPoolExecutor(size) as pool:
        models = _load_models(composition, communicators, pool)
        composition.mark("weights")
        parts = zip(models, communicators, strict=True)
        making = [pool.submit(_make_rank, composition, *each, tracer) for each in parts]
        return [future.result() for future in making]


def _load_models(
    composition: Composition, communicators: Sequence[Communicator], pool: ThreadPoolExecutor
) -> list[tuple[Model, Ops]]:
    total_bytes = len(communicators) * composition.weights_bytes
    with _weights(composition) as checkpoint, LoadProgress(total_bytes) as progress:
        loading = [pool.submit(_load_model, composition, checkpoint, each, progress) for each in communicators]
        return [future.result() for future in loading]


@contextmanager
def _weights(composition: Composition) -> Generator[Checkpoint | None]:
    """The checkpoint, if there is one. It is closed beside what follows: unmapping 8 GB takes 0.2 s."""
    if composition.options.load_format is LoadFormat.DUMMY:
        yield None
        return
    checkpoint = Checkpoint.open(composition.model_dir)
    try:
        yield checkpoint
    finally:
        threading.Thread(target=checkpoint.close, name="openinfer-unmap").start()


def _load_model(
    composition: Composition, checkpoint: Checkpoint | None, communicator: Communicator, progress: LoadProgress
) -> tuple[Model, Ops]:
    definition, config, rank = composition.definition, composition.config, communicator.rank
    ops = composition.backend.make_ops()
    if rank == 0:
        composition.mark("operators")
    weights: WeightSource
    if checkpoint is None:
        weights = composition.backend.dummy_weights(definition.tensors(config), rank=rank, size=communicator.size)
    else:
        weights = RankWeights(checkpoint, rank=rank, size=communicator.size)
    with ops.loading(progress.advance):
        model = definition.load(
            config,
            weights,
            ops=with_providers(ops, composition.kernel_providers),
            communicator=communicator,
            max_model_tokens=composition.runner_limits.max_model_tokens,
        )
    return model, ops


def _make_rank(composition: Composition, loaded: tuple[Model, Ops], communicator: Communicator, tracer: Tracer) -> Rank:
    model, ops = loaded
    return composition.backend.make_rank(
        model,
        ops=ops,
        num_blocks=composition.num_blocks,
        layout=composition.layouts[communicator.rank],
        communicator=communicator,
        limits=composition.runner_limits,
        mark=composition.mark if communicator.rank == 0 else _no_mark,
        tracer=tracer if communicator.rank == 0 else NoTrace(),
    )


def _no_mark(phase: str) -> None:
    """The timeline is rank 0's."""
    del phase

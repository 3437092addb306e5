"""Loading one rank, or all ranks of a process: weights, then memory and warm-up."""

import threading
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TextIO

from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.engine_plan import Composition
from openinfer_engine.kernel_providers import with_providers
from openinfer_engine.model import Model, WeightSource
from openinfer_engine.options import LoadFormat
from openinfer_engine.tracing.trace import NoTrace, Tracer
from openinfer_engine.weights.checkpoint import Checkpoint, RankWeights
from openinfer_engine.weights.load_progress import LoadProgress
from openinfer_engine.worker.runner import Rank
from openinfer_kernels import Ops


def load_ranks(
    composition: Composition, communicators: Sequence[Communicator], tracer: Tracer, *, stream: TextIO | None = None
) -> Sequence[Rank]:
    """The ranks of this process, warmed up; one per communicator, each loaded in a thread of its own.

    Args:
        composition: what they are ranks of.
        communicators: of these ranks.
        tracer: of rank 0.
        stream: where the progress of loading is shown; None is standard error.
    """
    with ThreadPoolExecutor(len(communicators), initializer=composition.backend.enter_thread) as pool:
        models = _load_models(composition, communicators, pool, stream)
        composition.mark("weights")
        parts = zip(models, communicators, strict=True)
        making = [pool.submit(_make_rank, composition, *each, tracer) for each in parts]
        return [future.result() for future in making]


def _load_models(
    composition: Composition, communicators: Sequence[Communicator], pool: ThreadPoolExecutor, stream: TextIO | None
) -> list[tuple[Model, Ops]]:
    total_bytes = len(communicators) * composition.weights_bytes
    with _weights(composition) as checkpoint, LoadProgress(total_bytes, stream=stream) as progress:
        loading = [pool.submit(_load_model, composition, checkpoint, each, progress) for each in communicators]
        return [future.result() for future in loading]


@contextmanager
def _weights(composition: Composition) -> Generator[Checkpoint | None]:
    """The checkpoint, if there is one. It is closed beside what follows: unmapping 8 GB takes 0.2 s."""
    if composition.options.load_format is LoadFormat.DUMMY:
        yield None
        return
    checkpoint = Checkpoint.open(composition.model_dir)
    checkpoint.join_pieces(composition.definition.tensors(composition.config))
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

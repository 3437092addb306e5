"""Parts of a step of two data-parallel ranks and of two tensor-parallel ones, for a machine that has one GPU.

    python3 tools/device/data_parallel_parts.py MODEL OUT.json [--ways rows data tensor sums] [--device cpu]

MODEL needs the config.json of a DeepSeek over latents alone: weights are random.

    data      steps of one rank of two: half of the rows, whole attention, half of the experts. The other rank has the
              same rows, whose choices are those of the other half of the experts: nothing is waited for
    tensor    steps of one rank of two: all rows, half of the heads and of the experts. The other rank adds nothing
    rows      what data-parallel ranks exchange in a layer: two ends on this GPU, without NVLink
    sums      what tensor-parallel ranks add up in a layer, likewise, each kernel after the one ahead of it: more blocks
              wait for the other rank than the GPU has room for otherwise

A step of two GPUs is a step of `data` less what the mirror takes (`mirror_ms`), and its layers with experts times what
a layer of `rows` takes; or a step of `tensor`, and its layers times what one of `sums` takes.
"""

import argparse
import importlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from openinfer_core import GenerateRequest, RequestId, SamplingParams, Tokens, claim, list_plugins, read_config
from openinfer_core.plugins import MODELS
from openinfer_core.provenance import provenance
from openinfer_engine import engine_plan, resolve
from openinfer_engine.data_parallel import launch as data_parallel_launch
from openinfer_engine.data_parallel.loop import DataParallelLoop
from openinfer_engine.data_parallel.routing import RankRouter
from openinfer_engine.data_parallel.runner import StepRound, ThreadRank
from openinfer_engine.distributed.communicator import SoloCommunicator
from openinfer_engine.distributed.expert_group import DataParallelCommunicator
from openinfer_engine.ranks.placement import Placement, RankPlace
from openinfer_engine.tracing.trace import NoTrace
from openinfer_engine.weights.loading import load_workers
from openinfer_engine.worker.runner import ThreadRunner
from openinfer_kernels import Array, ExpertChoice

WAYS = ("rows", "data", "tensor", "sums")
SIZES = ((256, 512), (64, 1024))
STEPS, PASSES = 32, 4
LAYERS, REPLAYS = 26, 20
ROWS = (1, 32, 64, 128, 256)
WIDTH, CHOSEN, EXPERTS = 2048, 6, 64
LIMIT_S = 40


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sizes", type=json.loads, default=SIZES, help="rows and tokens of their prompts, as JSON")
    parser.add_argument("--kv-cache-bytes", type=int, default=24 << 30)
    parser.add_argument("--way", choices=WAYS)
    given = parser.parse_args()
    if given.way is not None:
        print(json.dumps({"data": data, "tensor": tensor, "rows": rows, "sums": sums}[given.way](given)), flush=True)
        return
    report: dict[str, Any] = msgspec.to_builtins(provenance())
    for way in given.ways:
        command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
        try:
            done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            report[way] = f"not done within {LIMIT_S} s"
        else:
            lines = done.stdout.splitlines()
            report[way] = json.loads(lines[-1]) if not done.returncode and lines else f"ended with {done.returncode}"
        print(way, json.dumps(report[way]), flush=True)
        given.out.write_text(json.dumps(report, indent=2) + "\n")


# --- steps ----------------------------------------------------------------------------------------------------


class Mirror:
    """Rank 0 of two; what the other one sends are this one's rows again, with choices of the other's experts."""

    rank, size = 0, 2

    def __init__(self, arrays: Any) -> None:
        self._arrays = arrays  # CuPy, or NumPy

    @contextmanager
    def row_exchange(self) -> Generator["Mirror"]:
        yield self

    def fits(self, rows: Array, choice: ExpertChoice) -> bool:
        return len(rows) == len(choice.ids)

    def dispatch(
        self, rows: Array, choice: ExpertChoice, *, shared: Array, places: int, experts: int
    ) -> tuple[Array, Array, Array, Array]:
        arrays = self._arrays

        def padded(array: Array, fill: int = 0) -> Array:
            if len(array) == places:
                return array
            whole = arrays.full((places, *array.shape[1:]), fill, array.dtype)
            whole[: len(array)] = array
            return whole

        half = np.uint16 if rows.itemsize == 2 else np.uint32  # BF16 as numbers that CuPy joins without rounding
        wide, added = padded(rows.view(half)), padded(shared.view(half))
        ids, weights = padded(choice.ids, -1), padded(choice.weights)
        others = arrays.where(ids >= 0, (ids + experts) % (2 * experts), ids)
        return (
            arrays.concatenate([wide, wide]).view(rows.dtype),
            arrays.concatenate([ids, others]),
            arrays.concatenate([weights, weights]),
            arrays.concatenate([added, arrays.zeros_like(added)]).view(shared.dtype),
        )

    def combine(self, parts: Array, all_ids: Array, *, tokens: int, experts: int) -> Array:
        del experts
        half = len(all_ids) // 2
        return parts[:tokens] + parts[half : half + tokens]

    def abort(self, error: BaseException) -> None:
        print(f"aborted: {error}", file=sys.stderr, flush=True)

    def close(self) -> None:
        pass


class Twice(DataParallelCommunicator):
    """Told of one rank's tokens, of which there are two."""

    def begin_step(self, counts: Sequence[int], *, is_decode: bool = False) -> None:
        super().begin_step(tuple(counts) * (2 if len(counts) == 1 else 1), is_decode=is_decode)


class Alone(SoloCommunicator):
    """Rank 0 of two tensor-parallel ones, of which the other adds nothing."""

    def __init__(self, arrays: Any) -> None:
        self._arrays = arrays

    @property
    def size(self) -> int:
        return 2

    def all_gather(self, array: Array, *, axis: int) -> Array:
        return self._arrays.concatenate([array, array], axis)

    def broadcast(self, array: Array, *, root: int) -> Array:
        del root
        return array


def data(given: argparse.Namespace) -> dict[str, Any]:
    most = max(batch for batch, _ in given.sizes) // 2
    plan = plan_of(given, data_parallel_size=2, max_num_seqs=most, max_step_tokens=4096)
    mirror = Mirror(arrays_of(given.device))
    communicator = Twice(mirror)  # type: ignore[arg-type] - as much of one as experts use
    (worker,) = load_workers(plan, [communicator], NoTrace())
    step_round = StepRound([ThreadRank(0, worker, communicator, plan.backend.enter_thread)])
    make_loop: Callable[..., Any] = vars(data_parallel_launch)["_make_loop"]
    loop = DataParallelLoop(
        [make_loop(plan, step_round.runners[0], rank=0, tracer=NoTrace())],
        step_round=step_round,
        router=RankRouter(1, num_blocks=plan.num_blocks, block_size_tokens=16, key=b"0" * 32),
    )
    found = [timed(loop, batch=batch // 2, prompt=prompt) for batch, prompt in given.sizes]
    mirrored = []
    if given.device == "cuda":
        mirrored = [mirror_ms(mirror, rows=batch // 2) for batch, _ in given.sizes]
    loop.close()
    return {"steps": found, "mirror_ms": mirrored}


def tensor(given: argparse.Namespace) -> dict[str, Any]:
    launch: Any = importlib.import_module("openinfer_engine.launch")

    def only_the_first(plan: Any, _: None, tracer: Any) -> ThreadRunner:
        return ThreadRunner(load_workers(plan, [Alone(arrays_of(given.device))], tracer), tracer=tracer)

    vars(launch).update(_start_processes=lambda _: None, _make_runner=only_the_first)
    most = max(batch for batch, _ in given.sizes)
    plan = plan_of(given, tensor_parallel_size=2, max_num_seqs=most, max_step_tokens=8192)
    loop = launch.build_loop(plan)
    found = [timed(loop, batch=batch, prompt=prompt) for batch, prompt in given.sizes]
    loop.close()
    return {"steps": found}


def arrays_of(device: str) -> Any:
    return importlib.import_module("cupy" if device == "cuda" else "numpy")


def plan_of(given: argparse.Namespace, **options: Any) -> Any:
    """Of an engine that has all ranks on GPU 0, which data-parallel ones refuse."""
    family: Any = claim(read_config(given.model), list_plugins(MODELS))[0]
    asked = {"device": given.device, "load_format": "dummy", "prefix_cache": False, "grammar_compiler": "none"}
    asked |= {"kv_cache_bytes": given.kv_cache_bytes, **options}
    patched: Any = engine_plan
    patched.check_data_parallel = lambda *_: None
    placement = Placement((RankPlace(0, 0), RankPlace(0, 0)))
    return resolve(family.definition, given.model, msgspec.convert(asked, family.options_type), placement=placement)


def timed(loop: Any, *, batch: int, prompt: int) -> dict[str, Any]:
    """Times of steps with so many rows at once; what is thrown away comes first."""
    times: list[float] = []
    for _ in range(2):
        left = set[int]()
        rng = np.random.default_rng(batch)
        sampling = SamplingParams(max_tokens=1000, temperature=0.0)
        for index in range(batch):
            ids = tuple(rng.integers(0, loop.info.num_token_ids, prompt).tolist())
            loop.submit(GenerateRequest(request_id=RequestId(index), prompt_token_ids=ids, sampling=sampling))
            left.add(index)
        while left:
            left -= {event.request_id for event in loop.step() if isinstance(event, Tokens)}
        times = []
        for _ in range(PASSES):
            begin_s, tokens = time.perf_counter(), 0
            for _ in range(STEPS):
                tokens += sum(len(event.token_ids) for event in loop.step() if isinstance(event, Tokens))
            times.append(round((time.perf_counter() - begin_s) / STEPS * 1e3, 3))
            assert tokens == STEPS * batch, "a step had not all rows"
        for index in range(batch):
            loop.abort(RequestId(index))
        while loop.busy:
            loop.step()
    return {"rows": batch, "prompt": prompt, "step_ms": times}


# --- what is exchanged ------------------------------------------------------------------------------------------


def replayed(stream: Any, once: Callable[[], Any], *, meet: Callable[[], Any]) -> float:
    """Seconds of a graph of what `once` queues."""
    graph, kept = stream.capture(once)
    meet()
    graph.launch()
    stream.synchronize()
    meet()
    begin_s = time.perf_counter()
    for _ in range(REPLAYS):
        graph.launch()
    stream.synchronize()
    took_s = (time.perf_counter() - begin_s) / REPLAYS
    graph.free()
    del kept
    meet()
    return took_s


def mirror_ms(mirror: Mirror, *, rows: int) -> float:
    from openinfer_kernels.cuda import CudaOps
    from openinfer_kernels.cuda.common.graphs import Stream

    ops = CudaOps()
    stream = Stream(ops.device)
    with stream, stream.private_pool():
        x, parts = ops.zeros((rows, WIDTH)), ops.zeros((2 * rows, WIDTH), np.float32)
        choice = ExpertChoice(ids=ops.zeros((rows, CHOSEN), np.int32), weights=ops.zeros((rows, CHOSEN), np.float32))

        def once() -> list[Any]:
            kept: list[Any] = []
            for _ in range(LAYERS):
                kept.append(mirror.dispatch(x, choice, shared=x, places=rows, experts=EXPERTS // 2))
                kept.append(mirror.combine(parts, kept[-1][1], tokens=rows, experts=EXPERTS // 2))
            return kept

        once()
        return round(replayed(stream, once, meet=stream.synchronize) * 1e3, 3)


def rows(given: argparse.Namespace) -> list[dict[str, Any]]:
    del given
    return [on_two_ends(count, exchanged) for count in ROWS]


def sums(given: argparse.Namespace) -> list[dict[str, Any]]:
    del given
    from openinfer_kernels.cuda.common import device

    vars(device).update(_OVERLAP_CAPABILITY=(99, 0))
    return [on_two_ends(count, summed) for count in ROWS]


def on_two_ends(rows: int, make: Callable[..., Callable[[int], Callable[[], Any]]]) -> dict[str, Any]:
    """Microseconds of a layer, two ranks on this GPU, each with a stream and so many rows of its own."""
    from openinfer_kernels.cuda import CudaOps
    from openinfer_kernels.cuda.common.graphs import Stream

    ops, barrier, found = CudaOps(), threading.Barrier(2, timeout=20), [0.0, 0.0]
    works = make(ops, rows)

    def work(rank: int) -> None:
        ops.device.use()
        stream = Stream(ops.device)
        with stream, stream.private_pool():
            found[rank] = replayed(stream, works(rank), meet=barrier.wait)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return {"rows_of_a_rank": rows, "us_a_layer": round(max(found) / LAYERS * 1e6, 1)}


def exchanged(ops: Any, rows: int) -> Callable[[int], Callable[[], Any]]:
    from openinfer_kernels.cuda.comm.expert_rows import ExpertRows

    ends = [ExpertRows(ops.device, rank=rank, size=2) for rank in range(2)]
    for each in ends:
        each.connect_addresses([end.addresses for end in ends])
    rng = np.random.default_rng(rows)
    chosen = [np.argsort(rng.random((rows, EXPERTS)), axis=1)[:, :CHOSEN].astype(np.int32) for _ in ends]

    def work(rank: int) -> Callable[[], Any]:
        end, x, parts = ends[rank], ops.zeros((rows, WIDTH)), ops.zeros((2 * rows, WIDTH), np.float32)
        choice = ExpertChoice(ids=ops.upload(chosen[rank]), weights=ops.zeros((rows, CHOSEN), np.float32))

        def once() -> list[Any]:
            kept: list[Any] = []
            for _ in range(LAYERS):
                kept.append(end.dispatch(x, choice, shared=x, places=rows, experts=EXPERTS // 2))
                kept.append(end.combine(parts, kept[-1][1], tokens=rows, experts=EXPERTS // 2))
            return kept

        return once

    return work


def summed(ops: Any, rows: int) -> Callable[[int], Callable[[], Any]]:
    """Of attention in BF16, then of experts in float32, of all ranks' rows."""
    from openinfer_kernels.cuda.comm.one_shot import OneShot

    ends = [OneShot(ops.device, rank=rank, size=2, most_bytes=1 << 22) for rank in range(2)]
    for each in ends:
        each.connect_addresses([end.address for end in ends])

    def work(rank: int) -> Callable[[], Any]:
        attended, routed = ops.zeros((2 * rows, WIDTH)), ops.zeros((2 * rows, WIDTH), np.float32)

        def once() -> None:
            for _ in range(LAYERS):
                ends[rank].all_reduce(attended)
                ends[rank].all_reduce(routed)

        return once

    return work


if __name__ == "__main__":
    main()

"""Collectives of several GPUs: checked against NumPy bit by bit, and timed in graphs.

    python3 tools/device/ranks.py OUT.json [RANKS]

Each rank is a process of its own, started by rank 0, which hands it two groups' ids through a pipe: one for
`NcclCommunicator`, one for the ways of summing alone. Values are BF16 rows of 4096, as the sums of a decode step over
Qwen3-8B's layers are. Times are of one collective of a graph that has 64 of them.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from openinfer_core.provenance import provenance
from openinfer_engine.distributed.host_collectives import rank_sum
from openinfer_engine.distributed.nccl_communicator import NcclCommunicator
from openinfer_engine.distributed.nccl_sums import ExactSums, open_one_shot
from openinfer_kernels.cuda.comm.nccl import NcclGroup, unique_id, version
from openinfer_kernels.cuda.comm.one_shot import OneShot
from openinfer_kernels.cuda.comm.rank_arrays import RankArrays
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.graphs import Stream
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy
from openinfer_kernels.cuda.ops import CudaOps

WIDTH = 4096
TOKENS = (1, 8, 64, 128, 256, 512, 1024, 2048, 4096)
TIMED_BYTES = 1 << 25
"""Of the longest array whose one-shot sum is timed."""
PER_GRAPH = 64
WARM_S = 0.3
STRESS = 3000


def main() -> None:
    if len(sys.argv) > 3:
        rank, size = int(sys.argv[2]), int(sys.argv[3])
        work([bytes.fromhex(sys.stdin.readline()) for _ in range(2)], rank, size)
        return
    out, size = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 2
    group_ids = [unique_id() for _ in range(2)]
    others = [
        subprocess.Popen([sys.executable, __file__, str(out), str(rank), str(size)], stdin=subprocess.PIPE)
        for rank in range(1, size)
    ]
    for other in others:
        assert other.stdin is not None
        other.stdin.write("".join(f"{each.hex()}\n" for each in group_ids).encode())
        other.stdin.flush()
    rows = work(group_ids, 0, size)
    codes = [other.wait(20) for other in others]
    report = {"gpus": size, "nccl": version(), "width": WIDTH, "rows": rows, "exit_codes": codes}
    out.write_text(json.dumps({**vars_of(provenance()), **report}, indent=2) + "\n")


def vars_of(found: Any) -> dict[str, Any]:
    return {name: getattr(found, name) for name in found.__struct_fields__}


@dataclass(frozen=True)
class Ways:
    """Of summing, one by one."""

    group: NcclGroup
    sums: ExactSums
    one_shot: OneShot | None


def work(group_ids: list[bytes], rank: int, size: int) -> list[dict[str, Any]]:
    device = Device.open(rank)
    before, begin_s = device.used_bytes(), time.perf_counter()
    communicator = NcclCommunicator(group_ids[0], rank=rank, size=size, device=device)
    stream = Stream(device)
    with stream:
        communicator.barrier()
        took_s, held = time.perf_counter() - begin_s, device.used_bytes() - before
        pooled = cupy.get_default_memory_pool().total_bytes()
        ops = CudaOps(device)
        group = NcclGroup(group_ids[1], rank=rank, size=size)
        sums = ExactSums(group, RankArrays(device), rank=rank, size=size)
        ways = Ways(group, sums, open_one_shot(group, device, rank=rank, size=size, sent_bytes=TIMED_BYTES))
        if rank == 0:
            has_one_shot = ways.one_shot is not None
            pool = f"{pooled / 2**20:.0f} of it the pool's"
            print(f"joined in {took_s:.2f} s, {held / 2**20:.0f} MiB, {pool}, one-shot {has_one_shot}", flush=True)
        check(communicator, ways, rank, size)
        if ways.one_shot is not None:
            stress(communicator, rank, size)
        communicator.barrier()
        if rank == 0:
            print("all collectives agree with NumPy", flush=True)
        rows = time_all(communicator, ways, ops, stream, rank)
        stream.synchronize()
    communicator.close()
    if ways.one_shot is not None:
        ways.one_shot.close()
    group.close()
    return rows


# --- right? -------------------------------------------------------------------------------------------------


def arrays(size: int, shape: tuple[int, ...], dtype: Any, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal(shape) * 10).astype(dtype) for _ in range(size)]


def put(host: np.ndarray) -> Any:
    """On the device, behind what the stream has."""
    host = np.ascontiguousarray(host)
    out = cupy.empty(host.shape, host.dtype)
    cupy.cuda.runtime.memcpyAsync(out.data.ptr, host.ctypes.data, host.nbytes, 1, cupy.cuda.get_current_stream().ptr)
    return out


def same(found: Any, expected: np.ndarray, what: str) -> None:
    got = cupy.asnumpy(found)
    if got.shape != expected.shape or not np.array_equal(got.astype(np.float64), expected.astype(np.float64)):
        raise SystemExit(f"{what}: differs, {got.reshape(-1)[:4]} and not {expected.reshape(-1)[:4]}")


def sum_of(given: list[np.ndarray]) -> np.ndarray:
    return rank_sum([each.astype(np.float32) for each in given]).astype(given[0].dtype)


def check(communicator: NcclCommunicator, ways: Ways, rank: int, size: int) -> None:
    for seed, shape in enumerate([(1, 8), (3, 4096), (7, 33), (64, 4096), (513, 4096), (2048, 4096)]):
        for dtype in (bfloat16, np.float32):
            given = arrays(size, shape, dtype, seed)
            mine = given[rank]
            what = f"{shape} {np.dtype(dtype).name}"
            same(communicator.all_reduce(put(mine)), sum_of(given), f"all_reduce {what}")
            array = put(mine)
            ways.sums.gather(array)
            same(array, sum_of(given), f"gather and sum {what}")
            if array.size % (size * 8) == 0:
                array = put(mine)
                ways.sums.exchange_pieces(array)
                same(array, sum_of(given), f"sum of pieces {what}")
            for axis in (0, 1, -1):
                gathered = communicator.all_gather(put(mine), axis=axis)
                same(gathered, np.concatenate(given, axis), f"all_gather {axis} {what}")
            same(communicator.broadcast(put(mine), root=size - 1), given[size - 1], f"broadcast {what}")
            wide = arrays(size, (size * 2, size * 16), dtype, seed)
            for axis in (0, 1):
                piece = communicator.reduce_scatter(put(wide[rank]), axis=axis)
                same(piece, np.split(sum_of(wide), size, axis)[rank], f"reduce_scatter {axis} {what}")
            blocks = arrays(size, (size, 5, 7), dtype, seed)
            expected = np.stack([blocks[sender][rank] for sender in range(size)])
            same(communicator.all_to_all(put(blocks[rank])), expected, f"all_to_all {what}")
    same(
        communicator.all_reduce(put(np.array([2**40 + rank]))),
        np.array([size * 2**40 + size * (size - 1) // 2]),
        "ints",
    )


def stress(communicator: NcclCommunicator, rank: int, size: int) -> None:
    """Sizes that change from call to call, ranks that come late: turns must not mix."""
    rng, late = np.random.default_rng(1), np.random.default_rng(rank)
    values = [put(((np.arange(64 * WIDTH) % 63) * scale * (rank + 1)).astype(bfloat16)) for scale in range(4)]
    results = []
    for _ in range(STRESS):
        vectors = int(rng.integers(1, 64 * WIDTH // 8))
        scale = int(rng.integers(0, 4))
        array = values[scale][: 8 * vectors].copy()
        if late.random() < 0.02:
            time.sleep(0.002)
        results.append((communicator.all_reduce(array), vectors, scale))
        if len(results) == 50:
            for found, count, factor in results:
                given = [((np.arange(8 * count) % 63) * factor * (each + 1)).astype(bfloat16) for each in range(size)]
                if not np.array_equal(cupy.asnumpy(found), sum_of(given)):
                    raise SystemExit(f"rank {rank}: one-shot sums of {count} vectors differ")
            results.clear()


# --- how fast? ----------------------------------------------------------------------------------------------


def time_all(
    communicator: NcclCommunicator, ways: Ways, ops: CudaOps, stream: Stream, rank: int
) -> list[dict[str, Any]]:
    group, one_shot = ways.group, ways.one_shot
    norm = put(np.ones(WIDTH, bfloat16))
    rows = []
    if rank == 0:
        titles = ("NCCL us", "one-shot", "one-shot, norm", "pieces")
        print(f"{'tokens':>7}" + "".join(f"{title:>16}" for title in titles))
    for tokens in TOKENS:
        x, residual = (cupy.zeros((tokens, WIDTH), dtype) for dtype in (bfloat16, np.float32))
        fits = one_shot is not None and one_shot.fits(x)
        timed: dict[str, Callable[[], Any] | None] = {
            "nccl": lambda x=x: group.all_reduce(x, x),
            "one_shot": (lambda x=x: one_shot.all_reduce(x)) if fits else None,
            "one_shot_norm": (lambda x=x, r=residual: (one_shot.all_reduce(x), ops.add_rms_norm(x, r, norm, eps=1e-6)))
            if fits
            else None,
            "pieces": lambda x=x: ways.sums.exchange_pieces(x),
        }
        row = {"tokens": tokens}
        for name, way in timed.items():
            row[name] = None if way is None else time_one(way, communicator, stream)
        rows.append(row)
        if rank == 0:
            cells = [row[name] for name in timed]
            shown = ["-" if cell is None else f"{cell:.2f}" for cell in cells]
            print(f"{tokens:>7}" + "".join(f"{cell:>16}" for cell in shown), flush=True)
    return rows


def time_one(way: Callable[[], Any], communicator: NcclCommunicator, stream: Stream) -> float:
    """Microseconds; the fastest of three runs of several replays."""
    way()
    communicator.barrier()
    kept = []
    with stream.private_pool():
        graph, _ = stream.capture(lambda: kept.extend(way() for _ in range(PER_GRAPH)))
    communicator.barrier()
    begin_s = time.perf_counter()
    replays = 0
    while replays < 8:
        graph.launch()
        replays += 1
    stream.synchronize()
    per_replay_s = (time.perf_counter() - begin_s) / replays
    count = max(3, min(200, int(WARM_S / 6 / max(per_replay_s, 1e-6))))
    # the same number on every rank
    count = int(cupy.asnumpy(communicator.broadcast(put(np.array([count])), root=0))[0])
    times = []
    for _ in range(3):
        communicator.barrier()
        first, last = cupy.cuda.Event(), cupy.cuda.Event()
        first.record()
        for _ in range(count):
            graph.launch()
        last.record()
        last.synchronize()
        times.append(cupy.cuda.get_elapsed_time(first, last) * 1e3 / count / PER_GRAPH)
    return round(min(times), 3)


if __name__ == "__main__":
    main()

"""Quantised experts on a Hopper GPU, in tiles: checked against float64, and timed next to BF16 and to rows of codes.

    python3 tools/device/lowbit_experts.py [check] [time] [--shapes NAME ...] [--tokens N ...] [--ways NAME ...]
                                           [--commit COMMIT] [--json FILE]

check   every code, size of tiles and scaling, gate and down, each twice: the same bits, and near float64; also what a
        whole `experts` makes of them
time    `experts` of one layer, routed evenly at random, in CUDA graphs: microseconds, and the share of the time that
        the bytes of the experts hit take
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from source_packages import folders

sys.path[:0] = [*folders(), str(Path(__file__).parent)]

import cupy  # noqa: E402
import msgspec  # noqa: E402
import numpy as np  # noqa: E402
from lowbit_products import CASES, RNG, described, random_part  # noqa: E402

from openinfer_bench.kernels.expert_cases import INT4_GROUP_128, random_matrices  # noqa: E402
from openinfer_core.provenance import provenance  # noqa: E402
from openinfer_kernels.cuda import CudaOps  # noqa: E402
from openinfer_kernels.cuda.common.libraries import bfloat16  # noqa: E402
from openinfer_kernels.cuda.common.memory import Memory  # noqa: E402
from openinfer_kernels.cuda.gemm import dispatch  # noqa: E402
from openinfer_kernels.cuda.gemm.decode_gemm import DecodeGemm  # noqa: E402
from openinfer_kernels.cuda.gemm.gemm import Gemm  # noqa: E402
from openinfer_kernels.cuda.gemm.grouped_gemm import Epilogue, GroupedGemm, Plan  # noqa: E402
from openinfer_kernels.cuda.gemm.library_products import LibraryProducts  # noqa: E402
from openinfer_kernels.cuda.gemm.linear import Linear  # noqa: E402
from openinfer_kernels.cuda.gemm.quantised import Quantised  # noqa: E402
from openinfer_kernels.cuda.lowbit.lowbit_experts import TILE_TOKENS, LowbitExperts  # noqa: E402
from openinfer_kernels.cuda.moe.experts import Experts  # noqa: E402
from openinfer_kernels.ops import ExpertChoice  # noqa: E402
from openinfer_kernels.weights.quantised import FP8_BLOCK_128, INT4_GROUP_32, MXFP4, Code, ScaleType  # noqa: E402

BYTES_PER_S = 4.3e12
CHOICES = 6
BITS = {"BF16": 16.0, "FP8": 8.0, "INT4": 4.125, "AWQ": 4.15625, "INT4 g32": 4.5, "FP4": 4.25}
FORMATS = {
    "BF16": None,
    "FP8": FP8_BLOCK_128,
    "INT4": INT4_GROUP_128,
    "AWQ": described(Code.INT4, 1, 128, ScaleType.F16, zeros=True),
    "INT4 g32": INT4_GROUP_32,
    "FP4": MXFP4,
}
SHAPES = {
    "30B-A3B": (2048, 768, 128, 128, 8, ("BF16", "FP8", "INT4")),
    "35B-A3B": (2048, 512, 257, 257, 9, ("BF16", "FP8", "INT4")),
    "K2 1/8": (7168, 2048, 384, 48, 8, ("FP8", "INT4 g32")),
    "V4 1/8": (4096, 2048, 256, 32, 6, ("FP4",)),
}
"""h, width, experts of a layer, of them here, of a token, formats."""
LIMITS = {"V4 1/8": 10.0}
CHECKED = {
    "fp8": (CASES[0], CASES[1]),
    "int4": (CASES[4], CASES[5], CASES[6], INT4_GROUP_32),
    "fp4": (MXFP4,),
}


class Made:
    """All that multiplies experts, in tiles or in rows."""

    def __init__(self, ops: CudaOps) -> None:
        device = ops.device
        linear = Linear(device, DecodeGemm(device), Gemm(device), LibraryProducts(device))
        gemm, memory = GroupedGemm(device), Memory(device)
        self.ops, self.lowbit = ops, LowbitExperts(device)
        self.quantised = {
            "tiles": Quantised(device, gemm, memory, linear, self.lowbit),
            "rows": Quantised(device, gemm, memory, linear),
        }
        self.experts = {"tiles": Experts(device, gemm, self.lowbit), "rows": Experts(device, gemm)}


class Uploading:
    """As much of operators as `random_matrices` asks for."""

    def __init__(self, ops: CudaOps, quantised: Quantised) -> None:
        self.upload_weight, self.upload_quantised = ops.upload_weight, quantised.upload_quantised


def plan_of(counts: list[int], tile_tokens: int) -> Plan:
    tiles, first = [], 0
    for expert, count in enumerate(counts):
        tiles += [(expert, first + at, min(tile_tokens, count - at), 0) for at in range(0, count, tile_tokens)]
        first += count
    made = np.array([*tiles, (0, 0, 0, 0)], np.int32)
    made[:, 3] = len(tiles)
    nothing = cupy.empty(0, np.int32)
    return Plan(
        tiles=cupy.asarray(made),
        sorted_tokens=nothing,
        positions=nothing,
        tile_tokens=tile_tokens,
        expected_tiles=len(tiles),
        expected_tokens=1,
    )


def gated(y: Any) -> Any:
    gate, up = (half.astype(np.float32).astype(bfloat16).astype(np.float64) for half in cupy.split(y, 2, axis=1))
    gate, up = cupy.minimum(gate, LIMIT), cupy.clip(up, -LIMIT, LIMIT)
    return gate / (1 + cupy.exp(-gate)) * up


COUNTS: Sequence[tuple[tuple[int, int], Callable[[int], list[int]]]] = (
    ((256, 384), lambda tile: [1, 0, tile + 3, 2, 5]),
    ((1536, 2048), lambda tile: [3, *([1] * 9), 2 * tile, 0, tile - 1]),
    ((2048, 768), lambda tile: [tile, 2, 7, 1]),
)
"""Rows and columns of an expert, and tokens of each, by those of a tile."""
LIMIT = 1.5
MOST_ERROR = {Epilogue.STORE: 4e-3, Epilogue.SWIGLU: 1.5e-2}


def check(made: Made) -> int:
    """How many were wrong."""
    num_bad = 0
    for each in (each for formats in CHECKED.values() for each in formats):
        for (rows, columns), counts_of in COUNTS:
            experts = len(counts_of(8))
            part, values = random_part(each, experts * rows, columns)
            weight = made.quantised["tiles"].upload_quantised(part, num_matrices=experts)
            held, worst = values.reshape(experts, rows, columns), 0.0
            for tile, epilogue in itertools.product(TILE_TOKENS, Epilogue):
                for scaling in made.lowbit.scalings_of(weight, tile):
                    error = error_of(made.lowbit, weight, held, counts_of(tile), tile, epilogue, scaling)
                    worst = max(worst, error)
                    if not error < MOST_ERROR[epilogue]:
                        num_bad += 1
                        print("BAD", each, (rows, columns), tile, epilogue, scaling, error, flush=True)
            print(each, (rows, columns), f"worst {worst:.1e}", flush=True)
    print("check:", f"{num_bad} BAD" if num_bad else "ok", flush=True)
    return num_bad


def error_of(
    lowbit: LowbitExperts, weight: Any, values: Any, counts: list[int], tile: int, epilogue: Epilogue, scaling: Any
) -> float:
    """The largest of an expert; infinite where two runs differ, or tokens of no plan were written to."""
    total, (_, rows, columns) = sum(counts), values.shape
    x = RNG.standard_normal((total + 5, columns), dtype=np.float32).astype(bfloat16)
    found = []
    for _ in range(2):
        out = cupy.full((total + 5, rows if epilogue is Epilogue.STORE else rows // 2), np.nan, np.float32)
        found.append(out.astype(bfloat16))
        plan = plan_of(counts, tile)
        lowbit.multiply(x, weight, found[-1], epilogue=epilogue, plan=plan, limit=LIMIT, scaling=scaling)
    same = (found[0].view(np.uint16) == found[1].view(np.uint16)).all()
    if not (same and cupy.isnan(found[0][total:].astype(np.float32)).all()):
        return float("inf")
    errors, first = [0.0], 0
    for expert, count in enumerate(counts):
        y = x[first : first + count].astype(np.float64) @ values[expert].T
        expected = y if epilogue is Epilogue.STORE else gated(y)
        got = found[0][first : first + count].astype(np.float64)
        if count:
            errors.append(float(cupy.linalg.norm(got - expected) / cupy.linalg.norm(expected)))
        first += count
    return float("nan") if any(np.isnan(errors)) else max(errors)


WAYS = ("rows", "tiles", "tiles e4m3", "tiles bf16", "tiles of 8", "tiles of 32", "tiles of 128", "tiles of 256")


@contextmanager
def chosen(way: str) -> Iterator[None]:
    """Other tables than those of `dispatch`."""
    usual = dispatch.MOST_EXPERT_TOKENS, dispatch.MOST_E4M3_EXPERT_TOKENS
    if way.endswith(("e4m3", "bf16")):
        dispatch.MOST_E4M3_EXPERT_TOKENS = dict.fromkeys(usual[1], 1 << 20 if way.endswith("e4m3") else 0)
    if " of " in way:
        wanted = int(way.rsplit(" ", 1)[1])
        dispatch.MOST_EXPERT_TOKENS = {tile: 1 << 30 if tile == wanted else 0 for tile in TILE_TOKENS}
    try:
        yield
    finally:
        dispatch.MOST_EXPERT_TOKENS, dispatch.MOST_E4M3_EXPERT_TOKENS = usual


def worth_measuring(way: str, mean: float) -> bool:
    """Whether a way is near enough for so many tokens of an expert."""
    if way.endswith(("e4m3", "bf16")):
        return mean <= 6
    if " of " in way:
        tile = int(way.rsplit(" ", 1)[1])
        return tile / 8 < mean <= 8 * tile and mean > 1
    return True


def microseconds(call: Callable[[], object], most_calls: int) -> float:
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(2):
            call()
        stream.begin_capture()
        for _ in range(most_calls):
            call()
        graph = stream.end_capture()
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        times = []
        for _ in range(5):
            begin.record()
            graph.launch()
            end.record()
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(begin, end) * 1e3 / most_calls)
    return statistics.median(times[1:])


def time(made: Made, shape: str, tokens: list[int], ways: list[str]) -> list[dict[str, Any]]:
    h, width, experts, local, per_token, formats = SHAPES[shape]
    rows: dict[int, dict[str, Any]] = {}
    for name in formats:
        held: dict[str, list[Any]] = {}
        for count in tokens:
            rng = np.random.default_rng(count)
            ids = [
                np.argsort(rng.random((count, experts)), axis=1)[:, :per_token].astype(np.int32) for _ in range(CHOICES)
            ]
            here = [each[each < local] for each in ids]
            hit = sum(len(np.unique(each)) for each in here) / CHOICES
            mean = count * per_token / min(experts, count * per_token)
            row = rows.setdefault(count, {"shape": shape, "tokens": count, "hit": round(hit, 1), "us": {}, "share": {}})
            x = cupy.asarray(rng.standard_normal((count, h), dtype=np.float32)).astype(bfloat16)
            weights = cupy.asarray(np.full((count, per_token), 0.2, np.float32))
            choices = [ExpertChoice(ids=cupy.asarray(each), weights=weights, num_experts=experts) for each in ids]
            for way in ["rows"] if name == "BF16" else ways:
                where = way.split(" ")[0]
                if not worth_measuring(way, mean):
                    continue
                if where not in held:
                    up = Uploading(made.ops, made.quantised[where])
                    held[where] = [
                        random_matrices(up, FORMATS[name], (local, 2 * width, h)),
                        random_matrices(up, FORMATS[name], (local, h, width)),
                    ]
                    cupy.cuda.Device().synchronize()  # the stream that is timed waits for no other
                turns, limit = itertools.cycle(choices), LIMITS.get(shape)
                with chosen(way):
                    call = lambda: made.experts[where].experts(x, next(turns), *held[where], limit=limit)  # noqa: E731, B023
                    us = microseconds(call, 12 if count <= 1024 else 6)
                row["us"][f"{name} {way}"] = round(us, 1)
                floor = hit * 3 * width * h * BITS[name] / 8 / BYTES_PER_S * 1e6
                row["share"][f"{name} {way}"] = round(floor / us, 2)
        held.clear()
        cupy.get_default_memory_pool().free_all_blocks()
    for row in rows.values():
        shares = row["share"]
        print(
            f"{shape} {row['tokens']} ({row['hit']} hit) ",
            "  ".join(f"{key} {us} ({shares[key]})" for key, us in row["us"].items()),
            flush=True,
        )
    return list(rows.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["check", "time"], default=["check", "time"])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=[*SHAPES])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256, 1024, 4096, 8192])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--commit", help="where the checkout does not say")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    made = Made(CudaOps())
    num_bad = check(made) if "check" in given.parts else 0
    rows: list[dict[str, Any]] = []
    for shape in given.shapes if "time" in given.parts else ():
        rows += time(made, shape, given.tokens, given.ways)
        if given.json is not None:
            report = msgspec.to_builtins(provenance(commit=given.commit)) | {
                "command": "python3 tools/device/lowbit_experts.py time",
                "gpu": made.ops.device.name,
                "rows": rows,
            }
            given.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())

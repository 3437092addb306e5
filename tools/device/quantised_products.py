"""Times every way of multiplying low-bit matrices, at the sizes of DeepSeek-V4-Flash and Kimi-K2.

    python3 tools/device/quantised_products.py [--models 'V4 FP8' ...] [--ranks 1 8] [--tokens N ...] [--json FILE]

The ways: tiles of 8 tokens (`8` has the kernel of 16 rows where rows are few, `8 wide` never), of 32 and of 128, and
the matrices dequantised to BF16, then multiplied as any other. `wo_a` is a product per group. Copies of a matrix take
turns, so that it comes from memory. Behind the matrices of a model stands the sum of each way over all of them: from
these the table in `openinfer_kernels/cuda/gemm/dispatch.py` is made. INT4 and FP4, in which published checkpoints have
experts alone, are measured at the sizes of the shared one.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from source_packages import folders

sys.path[:0] = folders()

import msgspec  # noqa: E402

from openinfer_bench.kernels.cases import Case  # noqa: E402
from openinfer_bench.kernels.expert_cases import random_matrices  # noqa: E402
from openinfer_bench.kernels.timing import Timer  # noqa: E402
from openinfer_core.provenance import provenance  # noqa: E402
from openinfer_kernels import WeightFormat  # noqa: E402
from openinfer_kernels.cuda import CudaOps  # noqa: E402
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy  # noqa: E402
from openinfer_kernels.cuda.common.memory import Memory  # noqa: E402
from openinfer_kernels.cuda.gemm.decode_gemm import DecodeGemm  # noqa: E402
from openinfer_kernels.cuda.gemm.gemm import Gemm  # noqa: E402
from openinfer_kernels.cuda.gemm.grouped_gemm import Epilogue, GroupedGemm  # noqa: E402
from openinfer_kernels.cuda.gemm.library_products import LibraryProducts  # noqa: E402
from openinfer_kernels.cuda.gemm.linear import Linear  # noqa: E402
from openinfer_kernels.cuda.gemm.quantised import Quantised  # noqa: E402
from openinfer_kernels.weights.quantised import FP8_BLOCK_128, INT4_GROUP_32, MXFP4  # noqa: E402

TOKENS = (8, 16, 32, 64, 128, 256, 512)
MOST_TILES = 16
"""Of tokens, where a way is still measured."""
FP8, INT4, FP4 = FP8_BLOCK_128, INT4_GROUP_32, MXFP4
BYTES = {FP8: 1.0, INT4: 0.5625, FP4: 0.53125}


@dataclass(frozen=True)
class Matrix:
    """Of a layer: how it is cut across ranks, and in what share of the layers it is."""

    name: str
    rows: int
    columns: int
    cut: str = ""
    """`rows`, `columns`, `groups` or nothing."""
    groups: int = 1
    share: float = 1.0

    def shape(self, ranks: int) -> tuple[int, int, int]:
        """Of one rank: groups, rows, columns."""
        rows, columns = self.rows // (ranks if self.cut == "rows" else 1), self.columns
        groups = self.groups // ranks if self.cut == "groups" else self.groups
        return groups, rows, columns // ranks if self.cut == "columns" else columns


V4_SHARED = (Matrix("shared gate_up", 4096, 4096, "rows"), Matrix("shared down", 4096, 2048, "columns"))
K2_SHARED = (Matrix("shared gate_up", 4096, 7168, "rows"), Matrix("shared down", 7168, 2048, "columns"))
MODELS: Mapping[str, tuple[WeightFormat, tuple[Matrix, ...]]] = {
    "V4 FP8": (
        FP8,
        (
            Matrix("wq_a", 1024, 4096),
            Matrix("wkv", 512, 4096),
            Matrix("wq_b", 32768, 1024, "rows"),
            Matrix("index wq_b", 8192, 1024, "rows", share=0.5),
            Matrix("wo_a", 1024, 4096, "groups", groups=8),
            Matrix("wo_b", 4096, 8192, "columns"),
            *V4_SHARED,
        ),
    ),
    "K2 FP8": (
        FP8,
        (
            Matrix("q_a", 1536, 7168),
            Matrix("kv_a", 576, 7168),
            Matrix("q_b", 12288, 1536, "rows"),
            Matrix("o", 7168, 8192, "columns"),
            *K2_SHARED,
        ),
    ),
    "K2 INT4": (INT4, K2_SHARED),
    "V4 FP4": (FP4, V4_SHARED),
}


class Ways:
    """All that multiplies, beside the operators, which choose."""

    def __init__(self, ops: CudaOps) -> None:
        device = ops.device
        self._linear = Linear(device, DecodeGemm(device), Gemm(device), LibraryProducts(device))
        self._quantised = Quantised(device, GroupedGemm(device), Memory(device), self._linear)
        chooses = GroupedGemm(device)
        self._tiles = {"8": (chooses, 8), "8 wide": (GroupedGemm(device, tile_tokens=8), None)}
        self._tiles |= {str(tokens): (chooses, tokens) for tokens in (32, 128)}

    def names(self, tokens: int) -> list[str]:
        """Those worth measuring."""
        tiles = {"8": 8, "8 wide": 8, "32": 32, "128": 128}
        return [*(name for name, tile in tiles.items() if tokens <= MOST_TILES * tile), "dequantised"]

    def case(self, way: str, weight_format: WeightFormat, shape: tuple[int, int, int], tokens: int) -> Case:
        """One product of so many tokens."""
        groups, rows, columns = shape

        def prepare(ops, fill) -> Callable[[], object]:
            x, weight = fill(tokens, groups * columns), random_matrices(ops, weight_format, shape)
            if way != "dequantised":
                gemm, tile_tokens = self._tiles[way]
                out = cupy.empty((tokens, groups * rows), bfloat16)
                return lambda: gemm.multiply(x, weight, out, epilogue=Epilogue.STORE, tile_tokens=tile_tokens)

            def call() -> object:
                return self._linear.grouped_linear(x, self._quantised.dequantised(weight), weights_first=False)

            with self._linear.tuning():
                call()
            return call

        return Case(
            operator="grouped_linear",
            shape=str(shape),
            tokens=tokens,
            bytes=int(groups * rows * columns * BYTES[weight_format]),
            flops=2 * tokens * groups * rows * columns,
            prepare=prepare,
        )


def measure(ways: Ways, timer: Timer, model: str, *, ranks: int, tokens: int) -> list[dict]:
    """Each matrix of a model by each way; prints them and their sums."""
    weight_format, matrices = MODELS[model]
    names = ways.names(tokens)
    sums, rows = dict.fromkeys(names, 0.0), []
    for matrix in matrices:
        shape = matrix.shape(ranks)
        times = {way: timer.time_s(ways.case(way, weight_format, shape, tokens)) * 1e6 for way in names}
        sums = {way: sums[way] + matrix.share * time for way, time in times.items()}
        floor_us = ways.case("8", weight_format, shape, tokens).bytes / 4.3e6
        rows.append({"model": model, "ranks": ranks, "matrix": matrix.name, "shape": shape, "tokens": tokens})
        rows[-1] |= {"floor_us": floor_us, "us": times}
        show(f"{matrix.name} {list(shape)}", times)
    show(f"all of {model}, 1/{ranks}, {tokens} tokens", sums)
    return rows


def show(name: str, times: Mapping[str, float]) -> None:
    best = min(times, key=times.__getitem__)
    print(f"{name:34}" + "".join(f"{way:>8} {time:8.2f}" for way, time in times.items()) + f"   {best}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit")
    given = parser.parse_args()
    ops = CudaOps()
    ways, timer = Ways(ops), Timer(ops)
    rows = [
        row
        for model in given.models
        for ranks in given.ranks
        for tokens in given.tokens
        for row in measure(ways, timer, model, ranks=ranks, tokens=tokens)
    ]
    if given.json:
        written = msgspec.structs.asdict(provenance(commit=given.commit)) | {"gpu": ops.device.name, "rows": rows}
        given.json.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()

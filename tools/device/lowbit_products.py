"""Products of low-bit matrices on a Hopper GPU: checked against float64, and timed next to BF16.

    python3 tools/device/lowbit_products.py [check] [memcheck] [chains] [single] [partitions] [--formats NAME ...]
                                            [--tokens N ...] [--json FILE]

check      every code, grouping, epilogue, size of tiles and partition, each twice: the same bits, and near float64
memcheck   a few small ones of these, for compute-sanitizer
chains     all products and norms of a Qwen3-4B step, in CUDA graphs, also by one way alone from 65 tokens on
partitions each product alone by each way to divide it among blocks that is considered: microseconds, and how far the
           result is from that of the way that is chosen
single     each product alone, over all layers' weights; from 256 tokens on also by one way alone, and how long
           dequantising takes
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from source_packages import folders

sys.path[:0] = [*folders(), str(Path(__file__).parent)]

import cupy  # noqa: E402
import numpy as np  # noqa: E402
import products  # noqa: E402

from openinfer_kernels.cuda.common.device import Device  # noqa: E402
from openinfer_kernels.cuda.common.libraries import bfloat16  # noqa: E402
from openinfer_kernels.cuda.common.memory import Memory  # noqa: E402
from openinfer_kernels.cuda.gemm import dispatch  # noqa: E402
from openinfer_kernels.cuda.gemm.decode_gemm import DecodeGemm  # noqa: E402
from openinfer_kernels.cuda.gemm.dispatch import MOST_LOWBIT_TOKENS  # noqa: E402
from openinfer_kernels.cuda.gemm.gemm import Gemm  # noqa: E402
from openinfer_kernels.cuda.gemm.grouped_gemm import GroupedGemm  # noqa: E402
from openinfer_kernels.cuda.gemm.library_products import LibraryProducts  # noqa: E402
from openinfer_kernels.cuda.gemm.linear import Linear  # noqa: E402
from openinfer_kernels.cuda.gemm.quantised import Quantised  # noqa: E402
from openinfer_kernels.cuda.gemm.tiles import Epilogue  # noqa: E402
from openinfer_kernels.cuda.lowbit.lowbit_gemm import LowbitGemm  # noqa: E402
from openinfer_kernels.cuda.lowbit.lowbit_partition import Partition  # noqa: E402
from openinfer_kernels.cuda.norm.rms_norm import Norm  # noqa: E402
from openinfer_kernels.weights.code_values import E4M3_VALUES  # noqa: E402
from openinfer_kernels.weights.gpu_kernels import tiles_kernels  # noqa: E402
from openinfer_kernels.weights.quantised import (  # noqa: E402
    Code,
    QuantisedPart,
    RandomCodes,
    ScaleType,
    WeightFormat,
)

HOST = np.random.default_rng(7)
RNG = cupy.random.default_rng(7)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
SIZES_OF_SCALES = {Code.E4M3: 4e-4, Code.INT4: 1e-2, Code.INT8: 5e-4, Code.E2M1: 1e-2}
TOKENS = (1, 8, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 2048, 8192)
MOST_E4M3 = 16
"""Tokens that kernels without dequantising multiply."""
MOST_ERROR = {Epilogue.STORE: 4e-3, Epilogue.SWIGLU: 1.5e-2}
"""Of the length of a result; a gate's inputs are rounded, which one token's few values may show."""


def described(code: Code, rows: int | None, columns: int | None, scales: ScaleType, *, zeros: bool = False):
    return WeightFormat(code=code, group_rows=rows, group_columns=columns, scales=scales, zero_points=zeros)


CASES = (
    described(Code.E4M3, 128, 128, ScaleType.F32),
    described(Code.E4M3, 1, None, ScaleType.BF16),
    described(Code.E4M3, None, None, ScaleType.F32),
    described(Code.E4M3, 64, 64, ScaleType.F32),
    described(Code.INT4, 1, 128, ScaleType.F16, zeros=True),
    described(Code.INT4, 1, 128, ScaleType.BF16),
    described(Code.INT4, 1, 64, ScaleType.BF16, zeros=True),
    described(Code.INT4, 1, 32, ScaleType.BF16),
    described(Code.INT4, 1, None, ScaleType.F16),
    described(Code.INT8, 1, 128, ScaleType.BF16),
    described(Code.INT8, 1, None, ScaleType.F32),
    described(Code.INT8, 1, 32, ScaleType.F16, zeros=True),
    described(Code.INT8, 1, 128, ScaleType.F16, zeros=True),
    described(Code.E2M1, 1, 32, ScaleType.E8M0),
    WeightFormat(code=Code.INT4, group_rows=1, group_columns=32, scales=ScaleType.F16, minimums=True),
    described(Code.INT4, 1, 32, ScaleType.F16),
    described(Code.INT8, 1, 32, ScaleType.F16),
    WeightFormat(code=Code.E2M1, group_rows=1, group_columns=16, scales=ScaleType.E4M3, global_scale=True),
)
BF16_SCALES = described(Code.E4M3, 128, 128, ScaleType.BF16)
"""As official FP8 models of Qwen have them."""
STEPS = {
    "fp8": CASES[0],
    "fp8_bf16": BF16_SCALES,
    "int4": CASES[4],
    "int8": described(Code.INT8, 1, None, ScaleType.BF16),
    "mxfp4": CASES[13],
    "q4_1": CASES[14],
    "q4_0": CASES[15],
    "q8_0": CASES[16],
    "nvfp4": CASES[17],
}


def stored_scales(scales: ScaleType, values):
    """Scales as a checkpoint has them, and as they are then read."""
    match scales:
        case ScaleType.F32:
            return values, values
        case ScaleType.F16:
            return values.astype(np.float16), values.astype(np.float16).astype(np.float32)
        case ScaleType.BF16:
            bits = (values.view(np.uint32) >> 16).astype(np.uint16)
            return bits, (bits.astype(np.uint32) << 16).view(np.float32)
        case ScaleType.E4M3:  # a global scale has their size
            codes = HOST.integers(0x28, 0x58, values.shape, dtype=np.uint8)
            return codes, E4M3_VALUES[codes]
        case _:
            exponents = np.floor(np.log2(values)).astype(int)
            return (exponents + 127).astype(np.uint8), np.ldexp(np.float32(1), exponents)


def random_part(made: WeightFormat, rows: int, columns: int):
    """A part, and the numbers it stands for in float64."""
    grid = (-(-rows // (made.group_rows or rows)), -(-columns // (made.group_columns or columns)))
    spread = HOST.uniform(0.5, 1.5, grid) * SIZES_OF_SCALES[made.code]
    stored, scales = stored_scales(made.scales, spread.astype(np.float32))
    zeros = HOST.integers(0, 1 << made.code.bits, grid, dtype=np.uint8) if made.zero_points else None
    codes = HOST.integers(0, 256, (rows, columns * made.code.bits // 8), dtype=np.uint8)
    if made.code is Code.E4M3:
        codes = np.where((codes & 0x7F) == 0x7F, codes & 0x3F, codes)
    lowest = HOST.uniform(0.3, 0.7, grid) * -15 * scales if made.minimums else None
    minimums = None if lowest is None else lowest.astype(np.float16)
    whole = SIZES_OF_SCALES[made.code] if made.global_scale else 1.0
    part = QuantisedPart(
        format=made, codes=codes, scales=stored, zero_points=zeros, minimums=minimums, global_scale=whole
    )
    if made.code.bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(rows, columns)
    r = np.arange(rows) // (made.group_rows or rows)
    c = np.arange(columns) // (made.group_columns or columns)
    if made.code is Code.E4M3:
        numbers = E4M3_VALUES[codes].astype(np.float64)
    elif made.code is Code.E2M1:
        numbers = np.concatenate([E2M1, -E2M1])[codes]
    else:
        centre = 0 if made.minimums else 1 << (made.code.bits - 1)
        numbers = codes.astype(np.float64) - (centre if zeros is None else zeros.astype(np.float64)[r[:, None], c])
    values = numbers * scales.astype(np.float64)[r[:, None], c] * whole
    return part, cupy.asarray(values if minimums is None else values + minimums.astype(np.float64)[r[:, None], c])


def random_matrix(quantised: Quantised, made: WeightFormat, rows: int, columns: int):
    """One whose codes no host holds."""
    grid = (-(-rows // (made.group_rows or rows)), -(-columns // (made.group_columns or columns)))
    stored, _ = stored_scales(made.scales, np.full(grid, SIZES_OF_SCALES[made.code], np.float32))
    zeros = HOST.integers(0, 1 << made.code.bits, grid, dtype=np.uint8) if made.zero_points else None
    shape, mask = (rows, columns * made.code.bits // 8), 0xBF if made.code is Code.E4M3 else 0xFF
    codes = RandomCodes.whole(shape, seed=int(HOST.integers(1 << 30)), mask=mask, itemsize=1)
    minimums = np.full(grid, -8 * SIZES_OF_SCALES[made.code], np.float16) if made.minimums else None
    return quantised.upload_quantised(
        QuantisedPart(format=made, codes=codes, scales=stored, zero_points=zeros, minimums=minimums)
    )


def reference(x, weight, epilogue: Epilogue):
    y = x.astype(np.float64) @ weight.T
    if epilogue is Epilogue.STORE:
        return y
    gate, up = (half.astype(np.float32).astype(bfloat16).astype(np.float64) for half in cupy.split(y, 2, axis=1))
    return gate / (1 + cupy.exp(-gate)) * up


def check(quantised: Quantised, gemm: LowbitGemm, tokens, shapes, cases=CASES) -> None:
    """Prints the largest errors by format; anything above the limits, or other bits the second time, is BAD."""
    num_bad = 0
    for made in cases:
        worst: dict[str, float] = {}
        for rows, columns in shapes:
            part, weight = random_part(made, rows, columns)
            matrix = quantised.upload_quantised(part)
            dense = quantised.dequantised(matrix).astype(np.float64)
            worst["dequantised"] = max(
                worst.get("dequantised", 0), float(abs(dense - weight).max() / abs(weight).max())
            )
            for m in tokens:
                x = RNG.standard_normal((m, columns), dtype=np.float32).astype(bfloat16)
                for epilogue in (Epilogue.STORE, Epilogue.SWIGLU) if rows % 128 == 0 else (Epilogue.STORE,):
                    expected = reference(x, weight, epilogue)
                    for partition in gemm.partitions_of(m, matrix):
                        for scaling in gemm.scalings_of(matrix, partition.size):
                            error = error_of(gemm, x, matrix, expected, epilogue, scaling=scaling, partition=partition)
                            name = f"{epilogue} {scaling}"
                            worst[name] = max(worst.get(name, 0), error)
                            if not error < MOST_ERROR[epilogue]:
                                num_bad += 1
                                print("BAD", made, (rows, columns), m, name, partition, error)
        # what a minimum adds is rounded before the sum
        num_bad += not worst["dequantised"] <= 2.0 ** (-7 if made.minimums else -8)
        print(made, "  ".join(f"{name} {error:.1e}" for name, error in worst.items()), flush=True)
    print("check:", f"{num_bad} BAD" if num_bad else "ok", flush=True)


def error_of(gemm: LowbitGemm, x, matrix, expected, epilogue: Epilogue, **how: Any) -> float:
    """NaN where two runs differ, or something was not written."""
    found = []
    for _ in range(2):
        out = cupy.full(expected.shape, np.nan, np.float32).astype(bfloat16)
        gemm.multiply(x, matrix, out, epilogue=epilogue, **how)
        found.append(out)
    if not (found[0].view(np.uint16) == found[1].view(np.uint16)).all():
        return float("nan")
    return float(cupy.linalg.norm(found[0].astype(np.float64) - expected) / cupy.linalg.norm(expected))


class Dense:
    """A step's products in BF16."""

    def __init__(self, linear: Linear) -> None:
        self.step, self.linear, self.linear_swiglu = products.Step(), linear.linear, linear.linear_swiglu
        self.layers, self.num_bytes = self.step.layers, self.step.num_bytes


class Lowbit:
    """The same in one format, with the head in BF16."""

    def __init__(self, quantised: Quantised, made: WeightFormat, dense: Dense) -> None:
        self.linear, self.linear_swiglu = quantised.linear, quantised.linear_swiglu
        self.kernels = tiles_kernels(made)
        self.dequantised = quantised.dequantised
        self.layers = [
            {name: random_matrix(quantised, made, *shape) for name, shape in products.SHAPES.items()}
            for _ in range(products.NUM_LAYERS)
        ]
        codes = sum(matrix.codes.nbytes for layer in self.layers for matrix in layer.values())
        self.num_bytes = codes + dense.step.head.nbytes


def chain(way: Dense | Lowbit, step: products.Step, linear: Linear, norm: Norm, num_tokens: int):
    """All products and norms of a step, the head for its last 256 tokens at most."""
    x, attended = products.random_bf16((num_tokens, products.H)), products.random_bf16((num_tokens, 4096))
    residual = products.random_bf16((num_tokens, products.H)).astype(np.float32)

    def normed(x):
        return norm.add_rms_norm(x, residual, step.norm, eps=1e-6)

    def run() -> None:
        y = normed(x)
        for layer in way.layers:
            way.linear(y, layer["qkv"])
            y = normed(way.linear(attended, layer["o_proj"]))
            y = normed(way.linear(way.linear_swiglu(y, layer["gate_up"]), layer["down"]))
        linear.logits(y[-256:], step.head)

    return run


@contextmanager
def limited(most_tokens: int) -> Iterator[None]:
    """Another number of tokens up to which codes are dequantised in registers."""
    usual = dispatch.MOST_LOWBIT_TOKENS, dispatch.MOST_LOWBIT_TOKENS_OF_BF16_SCALES
    dispatch.MOST_LOWBIT_TOKENS, dispatch.MOST_LOWBIT_TOKENS_OF_BF16_SCALES = (
        dict.fromkeys(each, most_tokens) for each in usual
    )
    try:
        yield
    finally:
        dispatch.MOST_LOWBIT_TOKENS, dispatch.MOST_LOWBIT_TOKENS_OF_BF16_SCALES = usual


@contextmanager
def multiplied_as_e4m3(most_tokens: int) -> Iterator[None]:
    """Another number of tokens up to which codes are not dequantised."""
    usual = dispatch.MOST_E4M3_TOKENS, dispatch.MOST_E4M3_GROUPS_TOKENS
    dispatch.MOST_E4M3_TOKENS, dispatch.MOST_E4M3_GROUPS_TOKENS = (dict.fromkeys(each, most_tokens) for each in usual)
    try:
        yield
    finally:
        dispatch.MOST_E4M3_TOKENS, dispatch.MOST_E4M3_GROUPS_TOKENS = usual


def each_scaling(way, num_tokens: int):
    """Names of what is timed, with codes dequantised or not where there is a choice, in turns; and how it is chosen."""
    if (
        not isinstance(way, Lowbit)
        or num_tokens > MOST_E4M3
        or way.kernels not in dispatch.MOST_E4M3_GROUPS_TOKENS | dispatch.MOST_E4M3_TOKENS
    ):
        return (("", nullcontext),)
    dequantised, e4m3 = (partial(multiplied_as_e4m3, most) for most in (0, MOST_E4M3))
    return ("_bf16_mma", dequantised), ("_e4m3", e4m3), ("_bf16_mma_again", dequantised), ("_e4m3_again", e4m3)


def time_chains(ways, step, linear, norm, num_tokens: int) -> dict[str, float]:
    repeats = 11 if num_tokens <= 256 else 3
    row: dict[str, float] = {"tokens": num_tokens}
    for name, way in ways.items():
        for how, choose in each_scaling(way, num_tokens):
            with choose():
                row[name + how] = products.median_ms(chain(way, step, linear, norm, num_tokens), repeats)
        row[f"{name}_floor_share"] = way.num_bytes / products.BYTES_PER_S * 1e3 / row[name + how]
        if isinstance(way, Lowbit) and num_tokens > 64:
            for label, most in (("in_registers", 1 << 30), ("dequantised", 0)):
                with limited(most):
                    row[f"{name}_{label}"] = products.median_ms(chain(way, step, linear, norm, num_tokens), repeats)
    print("  ".join(f"{key} {value:.3f}" for key, value in row.items()), flush=True)
    return row


def time_product(ways, name: str, num_tokens: int) -> dict[str, float | str]:
    x = products.random_bf16((num_tokens, products.SHAPES[name][1]))
    row: dict[str, float | str] = {"tokens": num_tokens, "product": name}
    for label, way in ways.items():
        multiply = way.linear_swiglu if name == "gate_up" else way.linear
        for how, choose in each_scaling(way, num_tokens):
            with choose():
                call = lambda layer, multiply=multiply: multiply(x, layer[name])  # noqa: E731
                row[f"{label}{how}_us"] = over_layers(way, call)
        if isinstance(way, Lowbit) and num_tokens >= 256:
            row[f"dequantise_{label}_us"] = over_layers(way, lambda layer, way=way: way.dequantised(layer[name]))
            call = lambda layer, multiply=multiply: multiply(x, layer[name])  # noqa: E731
            for how, most in (("in_registers", 1 << 30), ("dequantised", 0)):
                with limited(most):
                    row[f"{label}_{how}_us"] = over_layers(way, call)
    print("  ".join(f"{key} {value:.2f}" if isinstance(value, float) else str(value) for key, value in row.items()))
    return row


def time_partitions(gemm: LowbitGemm, ways, name: str, num_tokens: int) -> Iterator[dict[str, Any]]:
    """By format and partition; the one that is chosen is marked."""
    x = products.random_bf16((num_tokens, products.SHAPES[name][1]))
    epilogue, halves = (Epilogue.SWIGLU, 2) if name == "gate_up" else (Epilogue.STORE, 1)
    out = cupy.empty((num_tokens, products.SHAPES[name][0] // halves), bfloat16)
    dense = ways["bf16"].linear_swiglu if halves == 2 else ways["bf16"].linear

    def product(matrix, partition: Partition | None):
        out.view(np.uint16)[...] = 0xFFFF  # NaN
        gemm.multiply(x, matrix, out, epilogue=epilogue, partition=partition)
        return out.astype(np.float32)

    row: dict[str, Any] = {"tokens": num_tokens, "product": name}
    yield row | {"format": "bf16", "us": over_layers(ways["bf16"], lambda layer: dense(x, layer[name]))}
    for label, way in ways.items():
        if not isinstance(way, Lowbit):
            continue
        first = way.layers[0][name]
        chosen = gemm.partition_of(num_tokens, first)
        expected = product(first, chosen)
        for partition in gemm.partitions_of(num_tokens, first):

            def call(layer, partition=partition):
                gemm.multiply(x, layer[name], out, epilogue=epilogue, partition=partition)

            size, *rest = partition
            found = [product(first, partition) for _ in range(2)]
            yield row | {
                "same_twice": bool((found[0] == found[1]).all()),
                "error": float(cupy.linalg.norm(found[0] - expected) / cupy.linalg.norm(expected)),
                "format": label,
                "partition": [size.tokens, *rest],
                "chosen": partition == chosen,
                "us": over_layers(way, call),
            }


def shown_partitions(rows: list[dict[str, Any]]) -> None:
    """The quickest, what is chosen, and BF16, a line for each format."""
    for each in rows[1:]:
        if not (each["same_twice"] and each["error"] < MOST_ERROR[Epilogue.SWIGLU]):
            print("BAD", each)
    (plain,), kept = [row for row in rows if row["format"] == "bf16"], [row for row in rows if row["format"] != "bf16"]
    for label in dict.fromkeys(row["format"] for row in kept):
        best, *others = sorted((row for row in kept if row["format"] == label), key=lambda row: row["us"])
        chosen = next(row for row in (best, *others) if row["chosen"])
        shown = "  ".join(f"{row['us']:.1f} {row['partition']}" for row in (chosen, best, *others[:2]))
        named = f"{plain['tokens']:>5} {plain['product']:<8} bf16 {plain['us']:.1f}  {label} chosen, best:"
        print(named, shown, flush=True)


def over_layers(way, call) -> float:
    """Microseconds of a call for one layer, over all layers."""
    return products.median_ms(lambda: [call(layer) for layer in way.layers], 5) * 1e3 / len(way.layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=("check", "memcheck", "chains", "single", "partitions"))
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--formats", nargs="+", choices=STEPS, default=["fp8", "int4"])
    parser.add_argument("--quick", action="store_true", help="a warm-up of 20 ms in the place of 150")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device = Device.open()
    linear, norm = Linear(device, DecodeGemm(device), Gemm(device), LibraryProducts(device)), Norm(device)
    quantised, gemm = Quantised(device, GroupedGemm(device), Memory(device), linear), LowbitGemm(device)
    for kernels in MOST_LOWBIT_TOKENS:
        gemm.load(kernels)
    if "memcheck" in given.what:
        check(quantised, gemm, (1, 9, 31, 64, 100, 257), ((256, 416),))
    if "check" in given.what:
        # More tiles than multiprocessors, of which some are left over, and an odd number of them.
        check(quantised, gemm, (5, 130, 192, 250, 400, 520), ((17536, 384),), [CASES[0], CASES[4], CASES[14]])
        odd = (1, 3, 8, 9, 16, 17, 31, 33, 64, 65, 100, 129, 200, 256, 257, 520)
        check(quantised, gemm, odd, ((256, 512), (448, 1184), (136, 640)))
        check(quantised, gemm, (1, 12, 32, 57, 128, 255, 600), ((2560, 1536),))
    if {"chains", "single", "partitions"} & set(given.what):
        time_all(given, device, linear, norm, quantised, gemm)


def time_all(given, device: Device, linear: Linear, norm: Norm, quantised: Quantised, gemm: LowbitGemm) -> None:
    dense = Dense(linear)
    with linear.tuning():
        for tokens in given.tokens:
            chain(dense, dense.step, linear, norm, tokens)()
    ways = {"bf16": dense} | {name: Lowbit(quantised, STEPS[name], dense) for name in given.formats}
    record: dict[str, object] = {"gpu": device.name}
    products.WARM_S = 0.02 if given.quick else products.WARM_S
    if "chains" in given.what:
        record["chains"] = [time_chains(ways, dense.step, linear, norm, tokens) for tokens in given.tokens]
    if "partitions" in given.what:
        record["partitions"] = made = []
        for tokens, name in itertools.product(given.tokens, products.SHAPES):
            rows = list(time_partitions(gemm, ways, name, tokens))
            shown_partitions(rows)
            made += rows
            write(given.json, record)  # after each, as there are many
    if "single" in given.what:
        record["products"] = [time_product(ways, name, tokens) for tokens in given.tokens for name in products.SHAPES]
    write(given.json, record)


def write(path: Path | None, record: dict[str, object]) -> None:
    if path:
        path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

# ruff: noqa: SLF001 - what is between two steps of a product has no other door
"""Products with quantised activations (W8A8) and heads in FP8 on a Hopper GPU: checked, and their parts timed.

    python3 tools/device/low_bit_activations.py [check] [time] [sustained] [--json FILE]

check      codes and scales against the CPU's bit for bit, products against float64 of what the codes stand for, heads;
           with mistakes (scales of the token after, scales of blocks transposed), which must not pass
time       parts of a product in blocks of 128 x 128, at Qwen3-4B's shapes, next to BF16
sustained  products alone for half a second each, with the clock and the power that nvidia-smi reads meanwhile

`low_bit_gate.py` holds whole engines to a gate.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from source_packages import folders

sys.path[:0] = [*folders(), str(Path(__file__).parent)]

import cupy  # noqa: E402
import numpy as np  # noqa: E402
import products  # noqa: E402
from lowbit_products import described, random_part  # noqa: E402

from openinfer_kernels.cpu.gemm.low_bit_activations import e4m3_codes, quantise_rows, rounded_activations  # noqa: E402
from openinfer_kernels.cpu.gemm.quantised import dequantised, upload_quantised  # noqa: E402
from openinfer_kernels.cuda.common.libraries import bfloat16  # noqa: E402
from openinfer_kernels.cuda.gemm import output_head  # noqa: E402
from openinfer_kernels.cuda.lowbit import low_bit_activations as cuda_products  # noqa: E402
from openinfer_kernels.cuda.ops import CudaOps  # noqa: E402
from openinfer_kernels.weights.low_bit_activations import PromptSteps  # noqa: E402
from openinfer_kernels.weights.quantised import Code, ScaleType  # noqa: E402

RNG = np.random.default_rng(11)
TOKENS = (513, 1000, 2048)
BLOCKS = described(Code.E4M3, 128, 128, ScaleType.F32)
SHAPES = {
    BLOCKS: ((6144, 2560), (2560, 9728), (512, 2688), (256, 384)),
    described(Code.E4M3, 1, None, ScaleType.BF16): ((6144, 2560), (2560, 9728), (1152, 576)),
    described(Code.E4M3, None, None, ScaleType.F32): ((512, 2688),),
    described(Code.INT8, 1, None, ScaleType.F32): ((6144, 2560), (2560, 9728), (1152, 576)),
}
HEADS = ((10240, 2560), (1000, 576))
MOST_ERROR = {"store": 4e-3, "swiglu": 1.5e-2}
"""Of the length of a result."""


class Batch:
    """Of a prompt."""

    max_query_tokens = 1 << 20


def activations(tokens: int, columns: int):
    """Rows of sizes that differ by a thousand, some columns far larger than others, and a row of zeros."""
    x = RNG.standard_normal((tokens, columns), dtype=np.float32) * np.exp(RNG.normal(0, 2, (tokens, 1)))
    x[:, RNG.integers(0, columns, 4)] *= 20
    x[1] = 0
    return cupy.asarray(x.astype(np.float32)).astype(bfloat16)


@contextmanager
def mistaken(name: str) -> Generator[None]:
    """Within it, products have one of the mistakes that a gate must find."""
    kind = cuda_products.LowBitActivations
    groups, copied, heads = kind._quantise_groups, kind._copied, output_head.Fp8Heads.quantise

    def of_next_token(self, x, num_tokens):
        codes, scales = groups(self, x, num_tokens)
        return codes, cupy.roll(scales, 1, axis=1)

    def transposed(self, weight, scaling):
        codes, scales = copied(self, weight, scaling)
        return codes, cupy.ascontiguousarray(scales.T).reshape(scales.shape)

    def of_next_row(self, *parts):
        rows = kind.quantise_rows

        def moved(self, matrix):
            codes, scales = rows(self, matrix)
            return codes, cupy.roll(scales, 1)

        kind.quantise_rows = moved
        try:
            return heads(self, *parts)
        finally:
            kind.quantise_rows = rows

    if name == "scales of the token after":
        kind._quantise_groups = of_next_token
    elif name == "scales of blocks transposed":
        kind._copied = transposed
    else:
        output_head.Fp8Heads.quantise = of_next_row
    try:
        yield
    finally:
        kind._quantise_groups, kind._copied = groups, copied
        output_head.Fp8Heads.quantise = heads


# --- check ----------------------------------------------------------------------------------------------------


def check(ops: CudaOps) -> int:
    bad = check_codes(ops)
    for made, shapes in SHAPES.items():
        worst = {"store": 0.0, "swiglu": 0.0}
        for rows, columns in shapes:
            part, weight = random_part(made, rows, columns)
            matrix, host = ops.upload_quantised(part), upload_quantised(part)
            for tokens in TOKENS:
                for epilogue in worst if rows % 128 == 0 else ("store",):
                    error = error_of(ops, matrix, host, weight, tokens, epilogue)
                    worst[epilogue] = max(worst[epilogue], error)
                    if not error < MOST_ERROR[epilogue]:
                        bad += 1
                        print("BAD", made, (rows, columns), tokens, epilogue, error)
        print(made, "  ".join(f"{name} {error:.1e}" for name, error in worst.items()), flush=True)
    part, weight = random_part(BLOCKS, 2560, 2560)
    matrix, host = ops.upload_quantised(part), upload_quantised(part)
    for mistake in ("scales of the token after", "scales of blocks transposed"):
        with mistaken(mistake):
            error = error_of(ops, matrix, host, weight, 1000, "store")
        print(f"control, {mistake}: {error:.1e}", flush=True)
        bad += error < 10 * MOST_ERROR["store"]
    return bad + check_heads(ops)


def check_codes(ops: CudaOps) -> int:
    low_bit = ops._low_bit
    x = activations(600, 2560)
    x[3, 7], x[4, 9] = np.nan, np.inf
    host = x.get().astype(np.float32)
    codes, scales = low_bit._quantise_groups(x, 608)
    groups = host.reshape(600, -1, 128)
    with np.errstate(invalid="ignore"):
        expected = np.maximum(np.abs(groups).max(axis=2), np.float32(1e-12)) / np.float32(448)
        quotients = groups / expected[:, :, None]
    finite = np.isfinite(quotients).all(axis=2)
    expected_codes = e4m3_codes(np.where(finite[:, :, None], quotients, 0)).reshape(600, -1, 128)
    found = codes.get()[:600].reshape(600, -1, 128)
    same = bool(
        (found[finite] == expected_codes[finite]).all() and (scales.get()[:, :600].T[finite] == expected[finite]).all()
    )
    kept = bool((found[3, 0] & 0x7F == 0x7F).all())
    rows, row_scales = low_bit.quantise_rows(x[10:200])
    expected_rows = quantise_rows(host[10:200])
    same_rows = bool(
        (rows.get() == expected_rows.codes).all() and (row_scales.get() == expected_rows.scales[:, 0]).all()
    )
    print(f"codes as on the CPU: groups {same}, rows {same_rows}; NaN kept {kept}", flush=True)
    return 3 - same - kept - same_rows


def error_of(ops: CudaOps, matrix, host, weight, tokens: int, epilogue: str) -> float:
    """NaN where two runs differ."""
    x = activations(tokens, matrix.shape[1])
    rounded = cupy.asarray(rounded_activations(x.get().astype(np.float32), host))
    expected = rounded.astype(np.float64) @ weight.T
    if epilogue == "swiglu":
        gate, up = (half.astype(np.float32).astype(bfloat16).astype(np.float64) for half in cupy.split(expected, 2, 1))
        expected = gate / (1 + cupy.exp(-gate)) * up
    call = ops.linear if epilogue == "store" else ops.linear_swiglu
    first, second = (call(x, matrix, Batch()) for _ in range(2))
    if not (first.view(np.uint16) == second.view(np.uint16)).all():
        return float("nan")
    return float(cupy.linalg.norm(first.astype(np.float64) - expected) / cupy.linalg.norm(expected))


def check_heads(ops: CudaOps) -> int:
    bad = 0
    for rows, columns in HEADS:
        bits = (RNG.standard_normal((rows, columns), dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
        head, expected = ops.quantise_head(bits), quantise_rows((bits.astype(np.uint32) << 16).view(np.float32))
        weight = cupy.asarray(dequantised(expected)).astype(np.float64)
        for tokens in (1, 8, 16, 32, 64, 128, 256, 300):
            hidden = activations(tokens + 2, columns)[2:]
            truth = hidden.astype(np.float64) @ weight.T
            found = ops.logits(hidden, head)
            error = float(cupy.linalg.norm(found.astype(np.float64) - truth) / cupy.linalg.norm(truth))
            limit = 1e-5 if tokens <= 64 else MOST_ERROR["store"]
            print(f"head {rows} x {columns}, {tokens} tokens: {error:.1e}")
            bad += not error < limit
    return bad


# --- time -----------------------------------------------------------------------------------------------------


def time_parts(ops: CudaOps) -> list[dict[str, Any]]:
    """Microseconds of what a product is made of, one after the other for long enough to reach the power limit."""
    shapes = [(tokens, name, *shape) for tokens in (1024, 4096, 8192) for name, shape in products.SHAPES.items()]
    rows = [time_product(ops, *each) for each in shapes]
    for row in rows:
        print("  ".join(f"{key} {value:.1f}" if isinstance(value, float) else str(value) for key, value in row.items()))
    return rows


def time_product(ops: CudaOps, tokens: int, name: str, height: int, columns: int) -> dict[str, Any]:
    part, _ = random_part(BLOCKS, height, columns)
    matrix, x, batch = ops.upload_quantised(part), activations(tokens, columns), Batch()
    dense, both = ops._quantised.dequantised(matrix), cupy.empty((tokens, height), bfloat16)
    multiply = ops.linear_swiglu if name == "gate_up" else ops.linear
    calls = {
        "bf16": lambda: multiply(x, dense, batch),
        "w8a8": lambda: multiply(x, matrix, batch),
        "quantise": lambda: ops._low_bit._quantise_groups(x, tokens),
        "copy_weight": lambda: ops._low_bit._copied(matrix, cuda_products.Scaling.BLOCKS),
        "gate": lambda: ops._linear.swiglu(both),
    }
    return {"tokens": tokens, "product": name} | {key: 1e3 * median_ms(call) for key, call in calls.items()}


def median_ms(call: Callable[[], Any]) -> float:
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    times = []
    for _ in range(3):
        begin.record()
        for _ in range(40):
            call()
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end) / 40)
    return float(np.median(times))


# --- sustained --------------------------------------------------------------------------------------------------


class Meter:
    """Clock and power of the GPU, read twenty times a second."""

    def __init__(self) -> None:
        query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", "50"]
        self._process = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
        self._samples: list[tuple[float, float, float]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def between(self, begin: float, end: float) -> tuple[float, float]:
        """Means of MHz and W."""
        found = [(clock, watts) for at, clock, watts in self._samples if begin < at < end]
        return tuple(np.mean(found, axis=0).tolist()) if found else (0.0, 0.0)

    def close(self) -> None:
        self._process.terminate()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            clock, watts = line.split(",")
            self._samples.append((time.monotonic(), float(clock), float(watts)))


def time_sustained(ops: CudaOps) -> list[dict[str, Any]]:
    meter, rows = Meter(), []
    for tokens in (8192, 16384):
        for name, (height, columns) in products.SHAPES.items():
            for kind, call in sustained_calls(ops, tokens, name, height, columns).items():
                milliseconds, begin, end = half_a_second_of(call)
                clock, watts = meter.between(begin + (end - begin) / 2, end)
                rate = 2e-9 * tokens * height * columns / milliseconds
                row = {"tokens": tokens, "product": name, "kind": kind, "ms": milliseconds, "tflops": rate}
                rows.append(row | {"mhz": clock, "watts": watts})
                print(
                    f"{tokens} {name} {kind}: {milliseconds:.3f} ms, {rate:.0f} TFLOP/s, {clock:.0f} MHz, {watts:.0f} W"
                )
    meter.close()
    return rows


def sustained_calls(ops: CudaOps, tokens: int, name: str, height: int, columns: int) -> dict[str, Callable[[], Any]]:
    multiply = ops._linear.linear_swiglu if name == "gate_up" else ops._linear.linear
    x, weight = (cupy.random.standard_normal(shape, np.float32) for shape in ((tokens, columns), (height, columns)))
    dense = x.astype(bfloat16), weight.astype(bfloat16)
    library = ops._low_bit._products
    (codes, token_scales), (rows, row_scales) = map(ops._low_bit.quantise_rows, dense)
    group_scales = cupy.repeat(token_scales[None], columns // 128, axis=0)
    block_scales = cupy.full((height // 128, -(-columns // 512) * 4), 1e-3, np.float32)
    out, sums = cupy.empty((tokens, height), bfloat16), cupy.empty((tokens, height), np.int32)
    kinds = cuda_products.Scaling
    return {
        "bf16": lambda: multiply(*dense),
        "blocks": lambda: library.multiply(kinds.BLOCKS, codes, rows, out, (block_scales, group_scales)),
        "rows": lambda: library.multiply(kinds.ROWS, codes, rows, out, (row_scales, token_scales)),
        "int8": lambda: library.multiply(kinds.INTEGERS, codes, rows, sums),
    }


def half_a_second_of(call: Callable[[], Any]) -> tuple[float, float, float]:
    """Milliseconds of one, of the second half; when it began and ended."""
    call()
    once, (start, end) = median_ms(call), (cupy.cuda.Event(), cupy.cuda.Event())
    begin, half = time.monotonic(), max(5, int(250 / once))
    for _ in range(half):
        call()
    start.record()
    for _ in range(half):
        call()
    end.record()
    end.synchronize()
    return cupy.cuda.get_elapsed_time(start, end) / half, begin, time.monotonic()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=["check", "time", "sustained", []], default=["check"])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    bad, rows = 0, []
    ops = CudaOps(activations=PromptSteps(), fp8_head=True)
    if "check" in arguments.what:
        bad += check(ops)
    if "time" in arguments.what:
        rows = time_parts(ops)
    sustained = time_sustained(ops) if "sustained" in arguments.what else []
    ops.close()
    if arguments.json:
        arguments.json.write_text(json.dumps({"us": rows, "sustained": sustained}, indent=1) + "\n")
    print("low-bit activations:", f"{bad} BAD" if bad else "ok")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

"""Times the operators of linear attention at Qwen3.5-4B's sizes on a GPU, and compares chunks with steps.

    python3 tools/device/linear_attention.py [--commit COMMIT] [--out FILE] [--rows NAME ...]

Each operator runs in a graph over several layers, whose states are larger than the L2 cache; the figures are of one
layer. Rows with drafts leave states as they are, and their inputs are kept and replayed. `chain` is what a layer has of
all this between its two products, as a step has it: what more tokens of a row cost is the difference of two. At the end
one prompt is computed in chunks, whose operands are BF16, and step by step, all in float32.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from source_packages import folders

sys.path[:0] = folders()

import cupy  # noqa: E402
import msgspec  # noqa: E402
import numpy as np  # noqa: E402

from openinfer_core.provenance import provenance  # noqa: E402
from openinfer_kernels import AttentionBatch  # noqa: E402
from openinfer_kernels.cuda import BatchInvariantCudaOps, CudaOps  # noqa: E402
from openinfer_kernels.cuda.common.libraries import bfloat16  # noqa: E402

KEY_HEADS, HEADS, DIM, TAPS = 16, 32, 128, 4
VALUES = HEADS * DIM
CHANNELS = 2 * KEY_HEADS * DIM + VALUES
PROJECTED = CHANNELS + VALUES + 2 * HEADS
PAST_TOKENS = 1000
ROWS = {
    "1 x 1": [1],
    "8 x 1": [1] * 8,
    "32 x 1": [1] * 32,
    "64 x 1": [1] * 64,
    "1 x 2048": [2048],
    "1 x 8192": [8192],
    "8 x 1024": [1024] * 8,
}
DRAFTED = {"1 x 2": [2], "1 x 3": [3], "1 x 4": [4], "8 x 3": [3] * 8, "8 x 4": [4] * 8, "64 x 3": [3] * 64}
"""Rows with drafts."""
HIDDEN = 2560
WARM_S = 0.3


def random_bf16(*shape: int) -> Any:
    values = cupy.random.default_rng(1).standard_normal(shape, dtype=np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(bfloat16)


def make_batch(rows: list[int]) -> AttentionBatch:
    counts = np.array(rows, np.int32)
    positions = np.concatenate([np.arange(PAST_TOKENS, PAST_TOKENS + count, dtype=np.int32) for count in rows])
    return AttentionBatch(
        positions=cupy.asarray(positions),
        query_starts=cupy.asarray(np.cumsum([0, *rows]).astype(np.int32)),
        context_lens=cupy.asarray(counts + PAST_TOKENS),
        block_tables=(cupy.zeros((len(rows), 1), np.int32),),
        cache_slots=(cupy.full(len(positions), -1, np.int64),),
        max_query_tokens=max(rows),
        max_context_tokens=PAST_TOKENS + max(rows),
        state_slots=cupy.arange(len(rows), dtype=np.int32),
    )


class Layers:
    """The operators over the states of several layers."""

    def __init__(self, ops: CudaOps, rows: list[int], *, layers: int, drafted: bool = False) -> None:
        self.ops, self.batch, self.layers = ops, make_batch(rows), layers
        rng = np.random.default_rng(0)
        self.state = cupy.zeros((len(rows), layers, HEADS, DIM, DIM), np.float32)
        self.conv = ops.zeros((len(rows), layers, CHANNELS, TAPS - 1))
        self.projected, self.taps = random_bf16(sum(rows), PROJECTED), random_bf16(CHANNELS, TAPS)
        self.a_log = ops.upload(np.log(rng.uniform(0.2, 3.0, HEADS)).astype(np.float32))
        self.dt_bias = ops.upload(rng.normal(size=HEADS).astype(np.float32))
        self.norm = cupy.ones(DIM, np.float32)
        self.kept = ops.keep_inputs(conv=self.conv, state=self.state, most_tokens=max(rows)) if drafted else None
        if drafted:
            self.batch = replace(self.batch, kept=self.kept, kept_rows=cupy.ones(len(rows), np.int32))
        self.slots, self.counts = (
            ops.upload(np.array(each, np.int32)) for each in (range(len(rows)), [max(rows) - 1] * len(rows))
        )
        self.x = random_bf16(sum(rows), HIDDEN)
        self.products: list[tuple[Any, Any]] = []
        self.qkv, self.attended = self.convolve(0), None
        self.attended = self.rule(0)

    def convolve(self, layer: int) -> Any:
        u = self.projected[:, :CHANNELS]
        return self.ops.causal_conv_silu(u, self.taps, state=self.conv, layer=layer, batch=self.batch)

    def rule(self, layer: int, ops: CudaOps | None = None) -> Any:
        gates, decays = self.projected[:, CHANNELS + VALUES :], {"a_log": self.a_log, "dt_bias": self.dt_bias}
        run = (ops or self.ops).gated_delta_rule
        return run(self.qkv, gates, **decays, state=self.state, layer=layer, batch=self.batch)

    def gate(self, layer: int) -> Any:
        del layer
        z = self.projected[:, CHANNELS : CHANNELS + VALUES]
        return self.ops.gated_rms_norm(self.attended, z, self.norm, eps=1e-6)

    def chain(self, layer: int) -> Any:
        if not self.products:
            sizes = (PROJECTED, HIDDEN), (HIDDEN, VALUES)
            self.products = [tuple(random_bf16(*size) for size in sizes) for _ in range(self.layers)]
        first, last = self.products[layer]
        projected = self.ops.linear(self.x, first, self.batch)
        given = {"layer": layer, "batch": self.batch}
        qkv = self.ops.causal_conv_silu(projected[:, :CHANNELS], self.taps, state=self.conv, **given)
        decays = {"a_log": self.a_log, "dt_bias": self.dt_bias}
        gates, z = projected[:, CHANNELS + VALUES :], projected[:, CHANNELS : CHANNELS + VALUES]
        out = self.ops.gated_delta_rule(qkv, gates, **decays, state=self.state, **given)
        return self.ops.linear(self.ops.gated_rms_norm(out, z, self.norm, eps=1e-6), last, self.batch)

    def replay(self, layer: int) -> None:
        """Of all layers at once."""
        if layer == 0:
            given = {"conv": self.conv, "state": self.state, "slots": self.slots, "counts": self.counts}
            self.ops.replay_inputs(self.kept, **given)

    def microseconds(self, run: Callable[[int], Any], repeats: int) -> float:
        """Of one layer, in a graph of all of them."""
        stream, begin, end = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event(), cupy.cuda.Event()
        with stream:
            run(0)
            stream.synchronize()
            stream.begin_capture()
            for layer in range(self.layers):
                run(layer)
            graph = stream.end_capture()
            graph.launch(stream)
            begin.record()
            for _ in range(repeats):
                graph.launch(stream)
            end.record()
            end.synchronize()
        return cupy.cuda.get_elapsed_time(begin, end) * 1e3 / repeats / self.layers


def measure(ops: CudaOps, name: str, rows: list[int], *, drafted: bool = False) -> dict[str, Any]:
    steps = drafted or max(rows) == 1
    layers, repeats = (24, 20) if steps else (4, 5)
    made = Layers(ops, rows, layers=layers, drafted=drafted)
    found = {
        "rows": f"{name} drafted" if drafted else name,
        "causal_conv_silu_us": made.microseconds(made.convolve, repeats),
        "gated_delta_rule_us": made.microseconds(made.rule, repeats),
        "gated_rms_norm_us": made.microseconds(made.gate, repeats),
    }
    if steps:
        found["chain_us"] = made.microseconds(made.chain, repeats)
    if drafted:
        found["replay_us"] = made.microseconds(made.replay, repeats)
    elif steps:
        found["state_tb_per_s"] = 2 * made.state.nbytes / layers / found["gated_delta_rule_us"] * 1e-6
    return found


def compare(ops: CudaOps) -> dict[str, float]:
    """Root mean squares of what chunks differ from steps, over those of the steps."""
    made = Layers(ops, [1500], layers=1)
    made.batch.context_lens.fill(1500)  # a prompt from its beginning
    found = []
    for each in (ops, BatchInvariantCudaOps(ops.device)):
        made.state.fill(0)
        out = made.rule(0, each)
        found.append([ops.download(array).astype(np.float64) for array in (out, made.state)])
    return {
        name: float(np.sqrt(np.mean((ours - theirs) ** 2) / np.mean(theirs**2)))
        for name, ours, theirs in zip(("outputs", "states"), *found, strict=True)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", help="where the checkout does not say")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", nargs="+", default=[*ROWS, *DRAFTED], help="some of them; default: all")
    arguments = parser.parse_args()
    ops, warm = CudaOps(), cupy.ones((4096, 4096), np.float32)
    begin = time.perf_counter()
    while time.perf_counter() - begin < WARM_S:
        warm @ warm
        cupy.cuda.Device().synchronize()
    rows = [measure(ops, name, counts) for name, counts in ROWS.items() if name in arguments.rows]
    rows += [measure(ops, name, counts, drafted=True) for name, counts in DRAFTED.items() if name in arguments.rows]
    for row in rows:
        print(
            "  ".join(f"{key} {value:.2f}" if isinstance(value, float) else f"{value:>9}" for key, value in row.items())
        )
    error = compare(ops)
    print("chunks against steps:", "  ".join(f"{name} {value:.5f}" for name, value in error.items()))
    if arguments.out:
        made_of = msgspec.to_builtins(provenance(commit=arguments.commit))
        command = "python3 tools/device/linear_attention.py"
        report = made_of | {"command": command, "rows": rows, "chunks_against_steps": error}
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

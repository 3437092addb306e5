"""Times each operator of a Qwen3-4B prefill step on a GPU, in the step, where the GPU is at its power limit.

    python3 tools/device/prefill_operators.py [--rows N] [--tokens PER_ROW] [--out FILE] [--commit COMMIT]

All layers run one after the other as in a step, with an event between any two operators. A row of the table is the sum
over the layers, median of several steps; the last row is a whole step without events.
"""

import argparse
import collections
import datetime as dt
import itertools
import json
import statistics
import time
from pathlib import Path

import cupy
import numpy as np

from openinfer_kernels import AttentionBatch, PagedCache, RopeParameters, rope_table
from openinfer_kernels.cuda import CudaOps
from openinfer_kernels.cuda.common.libraries import bfloat16

LAYERS, H, QKV, ATTENDED, F, V = 36, 2560, 6144, 4096, 9728, 151936
KV_HEADS, HEAD_DIM, BLOCK = 8, 128, 16
EPS, SCALE = 1e-6, HEAD_DIM**-0.5
WARM_S = 1.0


def random_bf16(*shape):
    rng, out = cupy.random.default_rng(1), cupy.empty(shape, bfloat16)
    bits = out.view(np.uint16).reshape(-1)
    for start in range(0, bits.size, 1 << 26):
        values = rng.standard_normal(min(1 << 26, bits.size - start), dtype=np.float32) / shape[-1] ** 0.5
        bits[start : start + values.size] = values.view(np.uint32) >> 16
    return out


def make_batch(rows, tokens):
    blocks = tokens // BLOCK
    tables = np.random.default_rng(0).permutation(rows * blocks).astype(np.int32).reshape(rows, blocks)
    place = np.arange(tokens)
    slots = tables[:, place // BLOCK].astype(np.int64) * BLOCK + place % BLOCK
    return AttentionBatch(
        positions=cupy.asarray(np.tile(place, rows).astype(np.int32)),
        query_starts=cupy.asarray(np.arange(rows + 1, dtype=np.int32) * tokens),
        context_lens=cupy.full(rows, tokens, np.int32),
        block_tables=(cupy.asarray(tables),),
        cache_slots=(cupy.asarray(slots.reshape(-1)),),
        max_query_tokens=tokens,
        max_context_tokens=tokens,
    )


class Step:
    """The weights, one layer's cache, and a prefill step whose operators are marked by name."""

    def __init__(self, ops, rows, tokens):
        self.ops, self.rows, self.tokens = ops, rows, tokens
        sizes = {"qkv": (QKV, H), "o_proj": (H, ATTENDED), "gate_up": (2 * F, H), "down": (H, F)}
        self.layers = [{name: random_bf16(*size) for name, size in sizes.items()} for _ in range(LAYERS)]
        self.head, self.table, self.norm, self.head_norm = random_bf16(V, H), random_bf16(V, H), random_bf16(H), None
        self.head_norm = random_bf16(HEAD_DIM)
        self.batch = make_batch(rows, tokens)
        data = cupy.zeros((rows * tokens // BLOCK, 1, 2, KV_HEADS, BLOCK, HEAD_DIM), bfloat16)
        self.cache = PagedCache(data=data, layer=0)
        parameters = RopeParameters.from_config({"rope_theta": 1e6})
        self.rope = ops.upload(rope_table(parameters, head_dim=HEAD_DIM, positions=tokens))
        self.ids = ops.upload(np.random.default_rng(0).integers(0, V, rows * tokens).astype(np.int32))
        self.last = ops.upload((np.arange(rows, dtype=np.int32) + 1) * tokens - 1)

    def run(self, mark):
        ops, batch = self.ops, self.batch
        residual = mark("embedding", ops.residual_embedding(self.ids, self.table))
        x = mark("norm", ops.rms_norm(residual, self.norm, eps=EPS))
        for layer in self.layers:
            qkv = mark("qkv", ops.linear(x, layer["qkv"], batch))
            q = ops.qk_norm_rope_append(
                qkv, q_norm=self.head_norm, k_norm=self.head_norm, eps=EPS, rope=self.rope, cache=self.cache,
                batch=batch,
            )  # fmt: skip
            mark("qk_norm_rope_append", q)
            attended = mark("attention", ops.paged_attention(q, self.cache, batch=batch, scale=SCALE))
            x = mark("o_proj", ops.linear(attended, layer["o_proj"], batch))
            x = mark("norm", ops.add_rms_norm(x, residual, self.norm, eps=EPS))
            x = mark("gate_up", ops.linear_swiglu(x, layer["gate_up"], batch))
            x = mark("down", ops.linear(x, layer["down"], batch))
            x = mark("norm", ops.add_rms_norm(x, residual, self.norm, eps=EPS))
        mark("head", ops.logits(ops.embedding(self.last, x), self.head))


def time_operators(step, repeats=5):
    sums = collections.defaultdict(list)
    for _ in range(repeats):
        marks = [("", cupy.cuda.Event())]
        marks[0][1].record()

        def mark(name, value, marks=marks):
            event = cupy.cuda.Event()
            event.record()
            marks.append((name, event))
            return value

        step.run(mark)
        marks[-1][1].synchronize()
        taken = collections.Counter()
        for (_, before), (name, after) in itertools.pairwise(marks):
            taken[name] += cupy.cuda.get_elapsed_time(before, after)
        for name, ms in taken.items():
            sums[name].append(ms)
    return {name: statistics.median(ms) for name, ms in sums.items()}


def time_step(step, repeats=5):
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    begin.record()
    for _ in range(repeats):
        step.run(lambda _, value: value)
    end.record()
    end.synchronize()
    return cupy.cuda.get_elapsed_time(begin, end) / repeats


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    ops = CudaOps()
    with cupy.cuda.Stream(non_blocking=True):
        step = Step(ops, arguments.rows, arguments.tokens)
        with ops.tuning():
            step.run(lambda _, value: value)
        begin = time.perf_counter()
        while time.perf_counter() - begin < WARM_S:
            time_step(step, 1)
        operators, whole_ms = time_operators(step), time_step(step)
    tokens = arguments.rows * arguments.tokens
    for name, ms in sorted(operators.items(), key=lambda item: -item[1]):
        print(f"{name:<20} {ms:8.2f} ms  {100 * ms / sum(operators.values()):5.1f} %")
    print(f"sum {sum(operators.values()):.2f} ms; a step without events {whole_ms:.2f} ms, "
          f"{tokens / whole_ms * 1e3:,.0f} tokens/s")  # fmt: skip
    if arguments.out:
        record = {
            "commit": arguments.commit,
            "gpu": ops.device.name,
            "date": dt.datetime.now(dt.UTC).date().isoformat(),
            "rows": arguments.rows,
            "tokens_per_row": arguments.tokens,
            "operators_ms": operators,
            "step_ms": whole_ms,
        }
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

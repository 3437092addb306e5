"""Times decode attention where it runs: between the products of 36 layers of Qwen3-4B, in one CUDA graph.

    python3 tools/device/attention_step.py OUT.json [ROWSxCONTEXT | ROWSxCONTEXTxTOKENS ...]

With TOKENS, rows have so many at the end of their contexts, as in steps with drafts; such sizes are timed in two ways:
with each token as a row, and by the kernel for prompts.

A chain of layers is the qkv product, RoPE and append, attention and the output product, with weights and a cache of
their own for each layer. What attention costs there is the chain with it minus the chain without it.
"""

import dataclasses
import json
import re
import sys
import time
from pathlib import Path

import attention as alone
import numpy as np

from openinfer_kernels import AttentionBatch, PagedCache
from openinfer_kernels.cuda import CudaOps
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy

HIDDEN, HEADS = 2560, alone.KV_HEADS * alone.GROUP
WIDTH = HEADS * alone.HEAD_DIM
QKV = WIDTH + 2 * alone.KV_HEADS * alone.HEAD_DIM
SIZES = ("1x1024", "8x1024", "16x1024", "32x1024", "64x1024", "128x1024", "256x1024", "1x16384")
WARM_S = 0.3


def random_array(rng, *shape):
    return alone.random_bits(rng, shape).view(bfloat16)


class Layers:
    """Weights and KV of all layers."""

    def __init__(self, ops, num_blocks):
        rng = cupy.random.default_rng(0)
        qkv, out = random_array(rng, QKV, HIDDEN), random_array(rng, HIDDEN, WIDTH)
        self.ops = ops
        self.weights = [(qkv.copy(), out.copy()) for _ in range(alone.LAYERS)]
        self.norm = random_array(rng, alone.HEAD_DIM)
        self.rope = cupy.ones((2, 1 << 15, alone.HEAD_DIM // 2), np.float32)
        self.cache = alone.big_cache(num_blocks)
        self.caches = [PagedCache(data=self.cache, layer=n, is_first_layer=not n) for n in range(alone.LAYERS)]

    def run(self, x, batch, *, attends):
        kept = []
        for cache, (qkv_weight, out_weight) in zip(self.caches, self.weights, strict=True):
            qkv = self.ops.linear(x, qkv_weight, batch)
            q = self.ops.qk_norm_rope_append(qkv, q_norm=self.norm, k_norm=self.norm, eps=1e-6, rope=self.rope,
                                             cache=cache, batch=batch)  # fmt: skip
            out = q.reshape(len(x), WIDTH)
            if attends:
                out = self.ops.paged_attention(q, cache, batch=batch, scale=alone.HEAD_DIM**-0.5)
            x = self.ops.linear(out, out_weight, batch)
            kept += [qkv, q, out, x]
        return kept


def make_batch(rows, num_blocks):
    """The batch of `shape_of` with the positions and slots that an append needs."""
    batch = alone.shape_of(rows, num_blocks)
    counts = np.array([tokens for _, tokens in rows])
    of_row = np.repeat(np.arange(len(rows)), counts)
    positions = np.concatenate([np.arange(context - tokens, context) for context, tokens in rows])
    tables = cupy.asnumpy(batch.block_tables[0])
    blocks = tables[of_row, positions // alone.BLOCK].astype(np.int64)
    return AttentionBatch(
        positions=cupy.asarray(positions.astype(np.int32)), query_starts=batch.query_starts,
        context_lens=batch.context_lens, block_tables=batch.block_tables,
        cache_slots=(cupy.asarray(blocks * alone.BLOCK + positions % alone.BLOCK),),
        max_query_tokens=int(counts.max()), max_context_tokens=int(positions.max()) + 1)  # fmt: skip


def by_token(batch):
    """The batch, whose tokens may be rows of their own."""
    counts = np.diff(cupy.asnumpy(batch.query_starts))
    tables = np.repeat(cupy.asnumpy(batch.block_tables[0]), counts, axis=0)
    num_tokens = int(counts.sum())
    rows = dataclasses.replace(
        batch, query_starts=cupy.arange(num_tokens + 1, dtype=np.int32), context_lens=batch.positions + np.int32(1),
        block_tables=(cupy.asarray(tables),), max_query_tokens=1, newest_tokens=num_tokens)  # fmt: skip
    return dataclasses.replace(batch, token_rows=rows)


def measure_tokens(layers, num_rows, context, tokens):
    """Seconds of a layer's attention in each way."""
    batch = make_batch([(context, tokens)] * num_rows, len(layers.cache))
    x = random_array(cupy.random.default_rng(1), num_rows * tokens, HIDDEN)
    ways = {"token rows": by_token(batch), "prompts": batch}
    for given in ways.values():
        with layers.ops.tuning():
            layers.run(x, given, attends=True)
    without = alone.timed(lambda: layers.run(x, batch, attends=False), replays=7)
    return {
        way: (alone.timed(lambda given=given: layers.run(x, given, attends=True), replays=7) - without) / alone.LAYERS
        for way, given in ways.items()
    }


def measure(layers, size):
    num_rows, context, *tokens = map(int, re.fullmatch(r"(\d+)x(\d+)(?:x(\d+))?", size).groups(default="0"))
    if tokens != [0]:
        ways = measure_tokens(layers, num_rows, context, *tokens)
        us = {way: round(seconds * 1e6, 2) for way, seconds in ways.items()}
        return {"rows": num_rows, "context": context, "tokens": tokens[0], "us": us}
    rows = [(context, 1)] * num_rows
    batch, x = make_batch(rows, len(layers.cache)), random_array(cupy.random.default_rng(1), num_rows, HIDDEN)
    with layers.ops.tuning():
        layers.run(x, batch, attends=True)
    without, with_it = (
        alone.timed(lambda attends=attends: layers.run(x, batch, attends=attends), replays=7) / alone.LAYERS
        for attends in (False, True)
    )
    moved = num_rows * context * 2 * alone.KV_HEADS * alone.HEAD_DIM * 2
    cost = with_it - without
    return {"rows": num_rows, "context": context, "us": cost * 1e6, "chain_without_us": without * 1e6,
            "bytes": moved, "fraction": moved / cost / alone.PEAK_BYTES_PER_S}  # fmt: skip


def main():
    target, *sizes = sys.argv[1:]
    layers = Layers(CudaOps(), 256 * 64 + 64)
    end, batch = time.time() + WARM_S, make_batch([(1024, 1)] * 256, len(layers.cache))
    x = random_array(cupy.random.default_rng(1), 256, HIDDEN)
    while time.time() < end:
        layers.run(x, batch, attends=True)
        cupy.cuda.Device().synchronize()
    results = []
    for size in sizes or SIZES:
        results.append(r := measure(layers, size))
        if "tokens" in r:
            print(f"{r['rows']:4d} x {r['context']:6d} x {r['tokens']}: {r['us']} us", flush=True)
            continue
        cost = f"{r['us']:7.1f} us beside {r['chain_without_us']:6.1f} of the chain"
        print(f"{r['rows']:4d} x {r['context']:6d}: {cost}, {r['fraction']:.3f} of 4.3 TB/s", flush=True)
    Path(target).write_text(json.dumps({"layers": alone.LAYERS, "rows": results}, indent=1))


if __name__ == "__main__":
    main()

"""Checks and times the attention kernels on a GPU.

    python3 tools/device/attention.py CUBIN_FOLDER OUT.json [small] [check] [time]

The folder holds `attention_decode.cubin` and the like. References are computed in float64 from the unpaged values.
"""

import dataclasses
import json
import sys
import time
from pathlib import Path

import numpy as np

from openinfer_kernels import AttentionBatch, PagedCache
from openinfer_kernels.cuda.attention.paged import Attention
from openinfer_kernels.cuda.common.launch import Module
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy

PEAK_BYTES_PER_S = 4.3e12
PEAK_FLOPS_PER_S = 790e12
NAN = 0x7FC0


class Loaded:
    """As much of a `Device` as attention asks for."""

    architecture = "sm_90a"

    def __init__(self, folder: Path) -> None:
        cupy.cuda.runtime.free(0)  # makes the context
        self._modules = {path.stem: Module(path, may_overlap=True) for path in folder.glob("*.cubin")}
        properties = cupy.cuda.runtime.getDeviceProperties(0)
        self.num_multiprocessors = properties["multiProcessorCount"]
        self.max_shared_bytes = properties["sharedMemPerBlockOptin"]

    def has(self, stem: str) -> bool:
        return stem in self._modules

    def kernel(self, stem: str, name: str, *, shared_bytes: int = 0):
        return self._modules[stem].kernel(name, shared_bytes=shared_bytes)


def random_bits(rng, shape):
    return (rng.standard_normal(shape, dtype=cupy.float32).view(cupy.uint32) >> 16).astype(cupy.uint16)


def floats(bits):
    return (bits.astype(cupy.uint32) << 16).view(cupy.float32).astype(cupy.float64)


def make_case(seed, rows, *, group, kv_heads, head_dim, block_tokens, layers=2):
    """A batch over scattered blocks; what no context covers is NaN, what a table does not use is any row's block."""
    host, rng = np.random.default_rng(seed), cupy.random.default_rng(seed)
    counts = [-(-context // block_tokens) for context, _ in rows]
    total = sum(counts) + 3
    ids = host.permutation(np.arange(total))[: sum(counts)]
    cache = cupy.full((total, layers, 2, kv_heads, block_tokens, head_dim), NAN, cupy.uint16)
    tables = host.integers(0, total, (len(rows), max(counts) + 2), dtype=np.int32)
    for row, (context, _) in enumerate(rows):
        mine, ids = ids[: counts[row]], ids[counts[row] :]
        tables[row, : counts[row]] = mine
        cache[cupy.asarray(mine)] = random_bits(rng, (counts[row], *cache.shape[1:]))
        if context % block_tokens:
            cache[int(mine[-1]), :, :, :, context % block_tokens :] = NAN
    starts = np.cumsum([0, *(queries for _, queries in rows)]).astype(np.int32)
    contexts = np.array([context for context, _ in rows], np.int32)
    q = random_bits(rng, (int(starts[-1]), group * kv_heads, head_dim))
    batch = make_batch(starts, contexts, tables)
    return q, cache, batch


def make_batch(starts, contexts, tables):
    empty = cupy.zeros(0, np.int32)
    return AttentionBatch(
        positions=empty, query_starts=cupy.asarray(starts), context_lens=cupy.asarray(contexts),
        block_tables=(cupy.asarray(tables),), cache_slots=(empty,), max_query_tokens=int(np.diff(starts).max()),
        max_context_tokens=int(contexts.max()))  # fmt: skip


def reference(q, cache, batch, layer, scale):
    starts, contexts, tables = (
        cupy.asnumpy(x) for x in (batch.query_starts, batch.context_lens, batch.block_tables[0])
    )
    kv_heads, block_tokens, head_dim = cache.shape[3:]
    out = cupy.empty(q.shape, cupy.float64)
    for row, context in enumerate(contexts.tolist()):
        blocks = cupy.asarray(tables[row, : -(-context // block_tokens)])
        both = cache[blocks, layer].transpose(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, head_dim)[:, :, :context]
        keys, values = floats(both)
        mine = floats(q[starts[row] : starts[row + 1]])
        n = len(mine)
        mine = mine.reshape(n, kv_heads, -1, head_dim).transpose(1, 2, 0, 3)
        scores = cupy.matmul(mine, keys[:, None].swapaxes(2, 3)) * scale
        hidden = cupy.arange(context)[None] > (context - n + cupy.arange(n))[:, None]
        scores = cupy.where(hidden, -cupy.inf, scores)
        weights = cupy.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = cupy.matmul(weights, values[:, None])
        out[starts[row] : starts[row + 1]] = mixed.transpose(2, 0, 1, 3).reshape(n, -1, head_dim)
    return out.reshape(len(q), -1)


def error_of(out, expected):
    return float(cupy.linalg.norm(floats(out.view(cupy.uint16)) - expected) / cupy.linalg.norm(expected))


DECODE = [
    ([(1, 1)], 4, 8, 128, 16),
    ([(15, 1), (16, 1), (17, 1), (1, 1), (64, 1), (65, 1)], 4, 8, 128, 16),
    ([(1023, 1)], 4, 8, 128, 16),
    ([(16384, 1)], 4, 8, 128, 16),
    ([(40000, 1), (3, 1)], 4, 2, 128, 16),
    ([(1 + 37 * i % 2000, 1) for i in range(256)], 4, 8, 128, 16),
    ([(1000 + i, 1) for i in range(33)], 1, 4, 128, 16),
    ([(1000 + i, 1) for i in range(7)], 2, 4, 128, 32),
    ([(1000 + i, 1) for i in range(7)], 8, 2, 128, 64),
    ([(1000 + i, 1) for i in range(7)], 16, 2, 128, 16),
    ([(777 + i, 1) for i in range(9)], 12, 3, 128, 16),
    ([(1, 1), (500, 1), (16384, 1)], 8, 1, 64, 16),
    ([(16384, 1)], 1, 1, 64, 16),
    ([(100 + 61 * i, 1) for i in range(40)], 4, 4, 64, 32),
    ([(333, 1), (64, 1)], 16, 2, 64, 16),
    ([(1, 1), (1023, 1), (5000, 1)], 8, 2, 256, 16),
    ([(77, 1), (300, 1)], 3, 2, 256, 64),
    ([(2049, 1), (1024, 1)], 16, 2, 256, 16),
]
PREFILL = [
    ([(2, 2)], 4, 8, 128, 16),
    ([(7, 7), (33, 20), (64, 64)], 4, 8, 128, 16),
    ([(1024, 1024)], 4, 8, 128, 16),
    ([(700, 123), (129, 129), (2000, 3)], 4, 8, 128, 16),
    ([(4096, 512)], 4, 2, 128, 16),
    ([(300, 300)], 1, 2, 128, 32),
    ([(300, 300), (90, 17)], 3, 2, 128, 64),
    ([(200, 200)], 16, 1, 128, 16),
    ([(513, 260), (65, 64)], 8, 2, 64, 16),
    ([(513, 260), (65, 64)], 8, 2, 256, 16),
    ([(1000, 999)], 2, 2, 256, 32),
    ([(40 + i, 2 + i % 9) for i in range(300)], 4, 2, 128, 16),
    ([(16384, 16)], 4, 8, 128, 16),
    ([(16384, 16), (9000, 5), (33, 20), (1500, 30)], 4, 2, 128, 16),
    ([(5000, 256)], 4, 8, 128, 16),
    ([(3000, 17), (2000, 200)], 1, 2, 128, 32),
    ([(9000, 33), (700, 9)], 16, 1, 64, 16),
    ([(9000, 33), (700, 9)], 5, 2, 256, 16),
    ([(40000, 2)], 8, 1, 128, 16),
    ([(1100, 6)], 4, 2, 128, 16),
    ([(900, 3), (1200, 20)], 8, 1, 64, 16),
    ([(900, 3), (1200, 20)], 8, 1, 256, 16),
]
MIXED = [
    ([(1000, 1), (300, 300), (17, 1), (900, 40), (1, 1)], 4, 8, 128, 16),
    ([(100 + i, 1 + 30 * (i % 5 == 0)) for i in range(60)], 4, 2, 64, 16),
    ([(100 + i, 1 + 30 * (i % 5 == 0)) for i in range(60)], 8, 2, 256, 16),
]


def check(attention, *, most_tokens):
    worst = {}
    for kind, cases in (("decode", DECODE), ("prefill", PREFILL), ("mixed", MIXED)):
        for index, (rows, group, kv_heads, head_dim, block_tokens) in enumerate(cases):
            if sum(context for context, _ in rows) > most_tokens:
                continue
            shape = {"group": group, "kv_heads": kv_heads, "head_dim": head_dim, "block_tokens": block_tokens}
            q, cache, batch = make_case(index, rows, **shape)
            scale = head_dim**-0.5 * 2
            expected = reference(q, cache, batch, 1, scale)
            there = q.view(bfloat16), PagedCache(data=cache.view(bfloat16), layer=1)
            outs = []
            for _ in range(3):
                poison = cupy.full(q.size, NAN, cupy.uint16)
                del poison
                out = attention.paged_attention(*there, batch=batch, scale=scale)
                outs.append(out.view(cupy.uint16).copy())
            try:
                cupy.cuda.Device().synchronize()
            except cupy.cuda.runtime.CUDARuntimeError:
                print(f"FAILED {kind} {index}")
                raise
            error = error_of(outs[0], expected)
            same = all(bool((out == outs[0]).all()) for out in outs)
            if not (error < 6e-3 and same):
                print(f"WRONG {kind} {index}: error {error:.2e} same {same} rows {rows[:4]} {shape}")
            worst[kind] = max(worst.get(kind, 0), error if error == error else 9.0)
    print("largest relative errors", {kind: f"{value:.2e}" for kind, value in worst.items()})
    return worst


def check_replay(attention):
    """A captured launch serves other contexts, and leaves its counters as it found them."""
    worst = 0.0
    q, cache, batch = make_case(1, [(3000, 1)] * 8, group=4, kv_heads=8, head_dim=128, block_tokens=16)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        layer = PagedCache(data=cache.view(bfloat16), layer=1)
        out = attention.paged_attention(q.view(bfloat16), layer, batch=batch, scale=0.1)
        graph = stream.end_capture()
    for lens in ([3000] * 8, [1, 2, 3, 2999, 16, 17, 1000, 64], [1] * 8, [640] * 8, [0, 0, 100, 0, 5, 0, 0, 0]):
        batch.context_lens.set(np.array(lens, np.int32))
        out.view(cupy.uint16)[...] = NAN
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        rows = [row for row, n in enumerate(lens) if n]
        some = dataclasses.replace(batch, context_lens=batch.context_lens[rows],
                                   block_tables=(batch.block_tables[0][rows],),
                                   query_starts=cupy.arange(len(rows) + 1, dtype=np.int32))  # fmt: skip
        expected = reference(q[rows], cache, some, 1, 0.1)
        worst = max(worst, error_of(out.view(cupy.uint16)[rows], expected))
    print(f"graph replay with other contexts: largest error {worst:.2e}")
    return worst


def check_replay_of_pieces(attention):
    """A captured launch for 16 tokens of up to 4 rows serves any division into rows, and any contexts."""
    worst = 0.0
    q, cache, batch = make_case(2, [(6000, 4)] * 4, group=4, kv_heads=8, head_dim=128, block_tokens=16)
    batch = dataclasses.replace(batch, max_query_tokens=16)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        layer = PagedCache(data=cache.view(bfloat16), layer=1)
        out = attention.paged_attention(q.view(bfloat16), layer, batch=batch, scale=0.1)
        graph = stream.end_capture()
    for rows in ([(6000, 16)], [(5999, 13), (20, 3)], [(6000, 2), (16, 12), (3000, 1), (1, 1)], [(5, 5), (4000, 11)]):
        ends = np.cumsum([n for _, n in rows])
        starts = np.full(5, ends[-1])
        starts[: len(rows) + 1] = [0, *ends]
        batch.query_starts.set(starts.astype(np.int32))
        batch.context_lens.set(np.array([*(c for c, _ in rows), 0, 0, 0, 0][:4], np.int32))
        out.view(cupy.uint16)[...] = NAN
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        graph.launch(stream)
        stream.synchronize()
        some = dataclasses.replace(batch, context_lens=batch.context_lens[: len(rows)],
                                   block_tables=(batch.block_tables[0][: len(rows)],),
                                   query_starts=batch.query_starts[: len(rows) + 1])  # fmt: skip
        expected = reference(q, cache, some, 1, 0.1)
        worst = max(worst, error_of(out.view(cupy.uint16), expected))
    print(f"graph replay with other pieces: largest error {worst:.2e}")
    return worst


def timed(function, *, replays=5):
    """Median seconds of a captured call."""
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        kept = function()
        graph = stream.end_capture()
        graph.launch(stream)
        times = []
        for _ in range(replays):
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3)
    del kept
    return float(np.median(times))


LAYERS, KV_HEADS, GROUP, HEAD_DIM, BLOCK = 36, 8, 4, 128, 16


def big_cache(num_blocks):
    """Random keys and values of Qwen3-4B."""
    cache = cupy.empty((num_blocks, LAYERS, 2, KV_HEADS, BLOCK, HEAD_DIM), cupy.uint16)
    flat = cache.reshape(-1)
    piece = random_bits(cupy.random.default_rng(0), (1 << 26,))
    for start in range(0, flat.size, piece.size):
        part = flat[start : start + piece.size]
        part[...] = piece[: part.size]
    return cache.view(bfloat16)


def shape_of(rows, num_blocks):
    counts = [-(-context // BLOCK) for context, _ in rows]
    ids = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
    tables = np.zeros((len(rows), max(counts)), np.int32)
    for row, count in enumerate(counts):
        tables[row, :count], ids = ids[:count], ids[count:]
    starts = np.cumsum([0, *(n for _, n in rows)]).astype(np.int32)
    return make_batch(starts, np.array([c for c, _ in rows], np.int32), tables)


def attend_layers(attention, q, cache, batch, layers):
    scale = HEAD_DIM**-0.5
    caches = [PagedCache(data=cache, layer=n, is_first_layer=not n) for n in range(layers)]
    return [attention.paged_attention(q, each, batch=batch, scale=scale) for each in caches]


def time_decode(attention, cache, rows):
    batch = shape_of(rows, len(cache))
    q = random_bits(cupy.random.default_rng(1), (len(rows), KV_HEADS * GROUP, HEAD_DIM)).view(bfloat16)
    seconds = timed(lambda: attend_layers(attention, q, cache, batch, LAYERS)) / LAYERS
    moved = sum(context for context, _ in rows) * 2 * KV_HEADS * HEAD_DIM * 2
    return {"rows": len(rows), "context": rows[0][0], "us": seconds * 1e6, "bytes": moved,
            "fraction": moved / seconds / PEAK_BYTES_PER_S}  # fmt: skip


def time_prefill(attention, cache, rows, *, calls=4):
    batch = shape_of(rows, len(cache))
    num_tokens = sum(n for _, n in rows)
    q = random_bits(cupy.random.default_rng(1), (num_tokens, KV_HEADS * GROUP, HEAD_DIM)).view(bfloat16)
    seconds = timed(lambda: attend_layers(attention, q, cache, batch, calls), replays=3) / calls
    pairs = sum(n * (context - n) + n * (n + 1) // 2 for context, n in rows)
    flops = 4 * pairs * KV_HEADS * GROUP * HEAD_DIM
    return {
        "rows": rows[:2],
        "num_rows": len(rows),
        "us": seconds * 1e6,
        "flops": flops,
        "tflops": flops / seconds / 1e12,
        "fraction": flops / seconds / PEAK_FLOPS_PER_S,
    }


def main():
    folder, target, *what = sys.argv[1:]
    attention, results = Attention(Loaded(Path(folder))), {}
    began = time.time()
    if "small" in what:  # for compute-sanitizer
        check(attention, most_tokens=3000)
    if "check" in what:
        results["errors"] = {**check(attention, most_tokens=1 << 30), "replay": check_replay(attention),
                             "replay_of_pieces": check_replay_of_pieces(attention)}  # fmt: skip
        print(f"checked in {time.time() - began:.1f} s")
    if "time" in what:
        cache = big_cache(256 * 64 + 64)
        results["decode"] = [time_decode(attention, cache, [(1024, 1)] * rows) for rows in (1, 8, 16, 32, 64, 128, 256)]
        results["decode"] += [time_decode(attention, cache, [(16384, 1)]), time_decode(attention, cache, [(64, 1)]),
                              time_decode(attention, cache, [(64 + 120 * i, 1) for i in range(64)])]  # fmt: skip
        for r in results["decode"]:
            size = f"{r['bytes'] / 1e6:8.1f} MB"
            print(f"decode {r['rows']:4d} x {r['context']:6d}: {r['us']:8.2f} us  {size}  {r['fraction']:.3f}")
        prompts = [(1024, 1024)] * 8, [(16384, 16384)], [(16384, 512)], [(1024, 1024)], [(4096, 4096)] * 2
        prompts += tuple([(context, pieces)] for context in (1024, 16384) for pieces in (16, 64, 128, 256))
        results["prefill"] = [time_prefill(attention, cache, rows) for rows in prompts]
        for r in results["prefill"]:
            speed = f"{r['tflops']:6.1f} TFLOP/s  {r['fraction']:.3f}"
            print(f"prefill {r['num_rows']} x {r['rows'][0]}: {r['us']:9.1f} us  {speed}")
    print(f"all in {time.time() - began:.1f} s")
    Path(target).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

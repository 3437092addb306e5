"""Times attention over latents on a GPU, at the sizes of DeepSeek-V2-Lite.

    python3 tools/device/latent_attention.py OUT.json [--heads 16] [--commit COMMIT]

Decode steps run from graphs of many layers, each with its own cache; the kernels of a layer are told apart by leaving
out the last ones. Prompts run one by one; the attention kernel alone is timed by events around it.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from source_packages import folders

sys.path[:0] = folders()

import msgspec  # noqa: E402
import numpy as np  # noqa: E402

from openinfer_core.provenance import provenance  # noqa: E402
from openinfer_kernels import Array, AttentionBatch, PagedCache  # noqa: E402
from openinfer_kernels.cuda.common.graphs import Stream  # noqa: E402
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy  # noqa: E402
from openinfer_kernels.cuda.mla import expanded as latent_expanded  # noqa: E402
from openinfer_kernels.cuda.ops import CudaOps  # noqa: E402

LAYERS, BLOCK_TOKENS, ENTRY, HEAD = 27, 16, 576, 192
MOST_CACHE_BYTES = 12e9
WARM_S = 0.25
DECODE = ((1, 1024), (8, 1024), (32, 1024), (64, 1024), (256, 1024), (1, 16384), (8, 16384), (64, 4096))
PROMPTS = ([(16384, 16384)], [(1024, 1024)] * 8, [(8192, 8192)], [(16384, 8192)], [(16384, 200)], [(512, 512)])
"""Context and query tokens of each row."""


class Bench:
    """One number of heads on one GPU."""

    def __init__(self, num_heads: int) -> None:
        self.ops, self.num_heads = CudaOps(), num_heads
        self._stream = Stream(self.ops.device)
        self._rng = cupy.random.default_rng(0)
        self._weight = self._random(num_heads * 256, 512, scale=512**-0.5)

    def _random(self, *shape: int, scale: float = 1.0) -> Array:
        values = self._rng.standard_normal(shape, dtype=cupy.float32) * np.float32(scale)
        return (values.view(cupy.uint32) >> 16).astype(cupy.uint16).view(bfloat16)

    def _cache(self, num_blocks: int, layers: int) -> Array:
        cache = cupy.empty((num_blocks, layers, 1, 1, BLOCK_TOKENS, ENTRY), bfloat16)
        cache.view(cupy.uint16)[...] = self._random(BLOCK_TOKENS, ENTRY).view(cupy.uint16)
        return cache

    def decode(self, rows: int, context: int) -> dict[str, Any]:
        """Microseconds per layer, of all and of each kernel."""
        num_blocks, batch = make_batch(self.ops, [(context, 1)] * rows)
        layers = min(LAYERS, max(2, int(MOST_CACHE_BYTES // (num_blocks * BLOCK_TOKENS * ENTRY * 2))))
        cache, q = self._cache(num_blocks, layers), self._random(rows, self.num_heads, HEAD)

        def attend() -> None:
            for layer in range(layers):
                self._attend(q, cache, layer, batch)

        attend()
        absorbed = self.ops._latent_attention._absorbed  # noqa: SLF001 - its kernels are left out one by one
        kernels = {name: getattr(absorbed, name) for name in ("_attend", "_merge", "_values")}
        found = [self._graph_us(attend, layers)]
        for name in reversed(kernels):
            nothing = dict.fromkeys(kernels["_values"], _nothing) if name == "_values" else _nothing
            setattr(absorbed, name, nothing)
            found.append(self._graph_us(attend, layers))
        for name, kernel in kernels.items():
            setattr(absorbed, name, kernel)
        everything, without_values, without_merge, queries = found
        num_bytes = rows * context * ENTRY * 2
        return {
            "rows": rows,
            "context": context,
            "us": everything,
            "queries_us": queries,
            "attention_us": without_merge - queries,
            "merge_us": without_values - without_merge,
            "values_us": everything - without_values,
            "floor_us": num_bytes / 4.3e6,
        }

    def prompt(self, rows: list[tuple[int, int]]) -> dict[str, Any]:
        """Milliseconds per layer in either form."""
        num_blocks, batch = make_batch(self.ops, rows)
        told = dataclasses.replace(batch, chunk_context_tokens=sum(context for context, _ in rows))
        cache, q = self._cache(num_blocks, 2), self._random(sum(n for _, n in rows), self.num_heads, HEAD)
        expanded = self.ops._latent_attention._expanded  # noqa: SLF001 - its last kernel is timed alone
        kernel, marks = expanded._attend, []  # noqa: SLF001

        def timed(*arguments: Any, **named: Any) -> None:
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record()
            kernel(*arguments, **{**named, "overlap": False})
            end.record()
            marks.append((begin, end))

        all_ms = event_ms(lambda: self._attend(q, cache, 1, told), 5)
        expanded._attend = timed  # noqa: SLF001
        self._attend(q, cache, 1, told)
        cupy.cuda.get_current_stream().synchronize()
        expanded._attend = kernel  # noqa: SLF001
        attention_ms = sum(cupy.cuda.get_elapsed_time(*each) for each in marks)
        pairs = sum(n * (context - n) + n * (n + 1) / 2 for context, n in rows)
        return {
            "rows": len(rows),
            "context": rows[0][0],
            "tokens": rows[0][1],
            "ms": all_ms,
            "attention_ms": attention_ms,
            "attention_tflops": pairs * self.num_heads * 640 / attention_ms / 1e9,
            "absorbed_ms": event_ms(lambda: self._attend(q, cache, 1, batch), 1),
        }

    def heads_in_groups_are_equal(self) -> bool:
        """Whether keys and values made for some heads at a time give the same bits."""
        rows = [(900, 600), (2, 1), (513, 513), (40, 30)]
        num_blocks, batch = make_batch(self.ops, rows)
        batch = dataclasses.replace(batch, chunk_context_tokens=sum(context for context, _ in rows))
        cache, q = self._random(num_blocks, 1, 1, 1, BLOCK_TOKENS, ENTRY), self._random(1144, self.num_heads, HEAD)
        together = self._attend(q, cache, 0, batch).get()
        before, latent_expanded._MOST_SCRATCH_BYTES = latent_expanded._MOST_SCRATCH_BYTES, 1460 * 512 * 5  # noqa: SLF001
        apart = self._attend(q, cache, 0, batch).get()
        latent_expanded._MOST_SCRATCH_BYTES = before  # noqa: SLF001
        return together.tobytes() == apart.tobytes()

    def _attend(self, q: Array, cache: Array, layer: int, batch: AttentionBatch) -> Array:
        paged = PagedCache(data=cache, layer=layer, is_first_layer=layer == 0)
        return self.ops.latent_attention(q, paged, kv_b_proj=self._weight, batch=batch, scale=0.1147213868)

    def _graph_us(self, work: Callable[[], None], layers: int, *, repeats: int = 20) -> float:
        with self._stream:
            work()
            self._stream.synchronize()
            with self._stream.private_pool():
                graph, _ = self._stream.capture(work)
            begin_s = time.perf_counter()
            while time.perf_counter() - begin_s < WARM_S:
                graph.launch()
                self._stream.synchronize()
            return event_ms(graph.launch, repeats) * 1e3 / layers


def _nothing(*arguments: object, **named: object) -> None:
    del arguments, named


def event_ms(work: Callable[[], object], repeats: int) -> float:
    """Mean of some runs behind one that is not counted."""
    work()
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    begin.record()
    for _ in range(repeats):
        work()
    end.record()
    end.synchronize()
    return cupy.cuda.get_elapsed_time(begin, end) / repeats


def make_batch(ops: CudaOps, rows: list[tuple[int, int]]) -> tuple[int, AttentionBatch]:
    """Number of blocks, scattered, and the batch of `(context, query tokens)` rows over them."""
    counts = [-(-context // BLOCK_TOKENS) for context, _ in rows]
    ids = np.random.default_rng(0).permutation(sum(counts)).astype(np.int32)
    tables = np.zeros((len(rows), max(counts)), np.int32)
    positions, slots = [], []
    for row, ((context, queries), first) in enumerate(zip(rows, np.cumsum([0, *counts]).tolist(), strict=False)):
        tables[row, : counts[row]] = ids[first : first + counts[row]]
        of_row = np.arange(context - queries, context)
        positions.append(of_row)
        slots.append(tables[row, of_row // BLOCK_TOKENS].astype(np.int64) * BLOCK_TOKENS + of_row % BLOCK_TOKENS)
    return sum(counts), AttentionBatch(
        positions=ops.upload(np.concatenate(positions).astype(np.int32)),
        query_starts=ops.upload(np.cumsum([0, *(queries for _, queries in rows)]).astype(np.int32)),
        context_lens=ops.upload(np.array([context for context, _ in rows], np.int32)),
        block_tables=(ops.upload(tables),),
        cache_slots=(ops.upload(np.concatenate(slots)),),
        max_query_tokens=max(queries for _, queries in rows),
        max_context_tokens=max(context for context, _ in rows),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--commit", help="where the checkout does not say")
    arguments = parser.parse_args()
    bench = Bench(arguments.heads)
    report: dict[str, Any] = msgspec.to_builtins(provenance(commit=arguments.commit))
    report |= {"heads": arguments.heads, "heads_in_groups_are_equal": bench.heads_in_groups_are_equal()}
    print(f"heads in groups are equal: {report['heads_in_groups_are_equal']}")
    report |= {"decode": [], "prompts": []}
    for rows, context in DECODE:
        report["decode"].append(row := bench.decode(rows, context))
        print("  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
    for prompts in PROMPTS:
        report["prompts"].append(row := bench.prompt(prompts))
        print("  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

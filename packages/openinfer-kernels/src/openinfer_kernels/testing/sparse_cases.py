"""What the operators over windows, compressed entries and residual streams are tried with by the conformance kit."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from openinfer_kernels.ops import (
    AttentionBatch,
    CompressedEntries,
    HostArray,
    HyperMix,
    HyperWeights,
)
from openinfer_kernels.rope import RopeParameters, rope_table
from openinfer_kernels.testing.case import Case
from openinfer_kernels.testing.expert_cases import HostQuantised, random_part
from openinfer_kernels.testing.paged import make_paged_case
from openinfer_kernels.weights.quantised import FP8_BLOCK_128

_ROWS = ((1, 1), (37, 1), (50, 17), (16, 16), (90, 3), (160, 150))
"""Context and query tokens: the first token of all, decoding, chunks, a whole prompt, many windows in one step."""
_BLOCK_TOKENS = 16
_EPS = 1e-6
_TABLES = ("rope", "ape", "state", "sinks", "weights.fn", "weights.base", "weights.scale", "mix.post", "mix.mixing")
"""What stays in float32."""


def sparse_case(
    rng: np.random.Generator, rows: Sequence[tuple[int, int]], *, block_tokens: int = _BLOCK_TOKENS
) -> AttentionBatch:
    """A batch of `(context tokens, query tokens)` rows with scattered blocks and state slots."""
    batch = make_paged_case(rng, rows, num_kv_heads=1, head_dim=1, block_tokens=block_tokens).batch
    slots = rng.permutation(len(rows) + 2)[: len(rows)].astype(np.int32)
    return dataclasses.replace(batch, state_slots=slots, block_tokens=block_tokens)


def sparse_cache(
    rng: np.random.Generator, batch: AttentionBatch, ratio: int, dim: int, *, layers: int = 2
) -> HostArray:
    """Compressed entries `[blocks, layers, 1, rows, dim]`; NaN wherever no row has one."""
    block_tokens = batch.block_tokens
    num_blocks = int(batch.block_tables[0].max()) + 1
    cache = np.full((num_blocks, layers, 1, -(-block_tokens // ratio), dim), np.nan, np.float32)
    for row, context in enumerate(batch.context_lens.tolist()):
        for end in range(ratio - 1, context, ratio):
            block = batch.block_tables[0][row, end // block_tokens]
            cache[block, :, 0, end % block_tokens // ratio] = rng.normal(size=(layers, dim))
    return cache


def sparse_state(
    rng: np.random.Generator, batch: AttentionBatch, shape: tuple[int, ...], *, layers: int = 2
) -> HostArray:
    """States `[slots, layers, *shape]`; NaN in unused slots and in those of rows that begin their sequence."""
    assert batch.state_slots is not None
    state = np.full((int(batch.state_slots.max()) + 2, layers, *shape), np.nan, np.float32)
    counts = np.diff(batch.query_starts)
    for slot, context, count in zip(batch.state_slots, batch.context_lens, counts, strict=True):
        if context > count:
            state[slot] = rng.normal(size=(layers, *shape))
    return state


def _floats(rng: np.random.Generator, *shape: int) -> HostArray:
    return rng.normal(size=shape).astype(np.float32)


def _rope(rotated: int) -> HostArray:
    return rope_table(RopeParameters(theta=1e4), head_dim=rotated, positions=256)


def _norm_rope_tail(rng: np.random.Generator) -> Iterable[Case]:
    for heads, dim, rotated, has_weight in ((1, 512, 64, True), (8, 512, 64, False), (3, 64, 64, True)):
        batch = sparse_case(rng, _ROWS)
        x = _floats(rng, len(batch.positions), heads, dim)
        x[2] = np.nan
        weight = _floats(rng, dim) if has_weight else None
        keywords = {"eps": _EPS, "rope": _rope(rotated), "batch": batch}
        yield Case(name=f"{heads} x {dim}, {rotated} rotated", positional=(x, weight), keywords=keywords, exact=_TABLES)


def _rope_tail(rng: np.random.Generator) -> Iterable[Case]:
    batch = sparse_case(rng, _ROWS)
    x = _floats(rng, len(batch.positions), 3, 128)
    x[2] = np.nan
    yield Case(name="3 x 128", positional=(x,), keywords={"rope": _rope(64), "batch": batch}, exact=_TABLES)


def _compressor(*, overlapping: bool) -> Callable[[np.random.Generator], Iterable[Case]]:
    def cases(rng: np.random.Generator) -> Iterable[Case]:
        for ratio, dim in ((4, 128), (128, 64), (16, 512)) if not overlapping else ((4, 128), (4, 512), (2, 64)):
            batch = sparse_case(rng, _ROWS)
            halves = 2 if overlapping else 1
            state = sparse_state(rng, batch, (2 * ratio, 4 * dim) if overlapping else (3, dim))
            if not overlapping:
                state[:, :, 1] = np.abs(state[:, :, 1]) + 1
            keywords = {
                "ape": _floats(rng, ratio, halves * dim),
                "norm": _floats(rng, dim),
                "eps": _EPS,
                "rope": _rope(64),
                "state": state,
                "cache": sparse_cache(rng, batch, ratio, dim),
                "layer": 1,
                "batch": batch,
            }
            yield Case(
                name=f"{ratio} tokens of {dim}",
                positional=(_floats(rng, len(batch.positions), 2 * halves * dim),),
                keywords=keywords,
                mutated=("state", "cache"),
                exact=(*_TABLES, 0),
            )

    return cases


def _index_scores(rng: np.random.Generator) -> Iterable[Case]:
    for heads, dim, ratio in ((64, 128, 4), (16, 128, 4)):
        batch = sparse_case(rng, _ROWS)
        tokens = len(batch.positions)
        keywords = {"cache": sparse_cache(rng, batch, ratio, dim), "layer": 1, "ratio": ratio, "scale": dim**-0.5}
        yield Case(
            name=f"{heads} heads of {dim}",
            positional=(_floats(rng, tokens, heads, dim), _floats(rng, tokens, heads)),
            keywords=keywords | {"batch": batch},
            exact=(1,),
            in_float32=(0,),
        )


def _select_entries(rng: np.random.Generator) -> Iterable[Case]:
    for tokens, entries, k in ((1, 1, 4), (5, 40, 8), (7, 1000, 512), (3, 17, 512), (2, 9000, 512)):
        scores = np.round(_floats(rng, tokens, entries), 1)  # with equals
        for token in range(tokens):
            scores[token, int(rng.integers(0, entries + 1)) :] = -np.inf
        yield Case(name=f"{k} of {entries}", positional=(scores, k), keywords={}, exact=(0,))


def _window_attention(rng: np.random.Generator) -> Iterable[Case]:
    dim, window = 512, 128
    # The last one as a drafter has it: room for tokens that may not come to stay, and no key at the first position.
    for heads, ratio, chosen, room in (
        (16, 0, 0, window),
        (16, 4, 20, window),
        (64, 16, 0, window),
        (8, 4, 512, window),
        (16, 0, 0, window + 3),
    ):
        seen = {} if room == window else {"num_seen": window, "first_key": 1}
        batch = sparse_case(rng, _ROWS)
        tokens = len(batch.positions)
        entries = None
        if ratio:
            cache = sparse_cache(rng, batch, ratio, dim)
            selected = _selected(rng, batch, ratio, chosen) if chosen else None
            entries = CompressedEntries(cache=cache, layer=1, ratio=ratio, selected=selected)
        q = _floats(rng, tokens, heads, dim)
        q[2] = np.nan
        keywords = {
            "sinks": _floats(rng, heads),
            "window": sparse_state(rng, batch, (room, dim), layers=3),
            "layer": 2,
            "entries": entries,
            "rope": _rope(64),
            "scale": dim**-0.5,
            "batch": batch,
        }
        yield Case(
            name=f"{heads} heads, {chosen or 'all'} of {ratio} tokens per entry, room for {room}",
            positional=(q, _floats(rng, tokens, dim)),
            keywords=keywords | seen,
            mutated=("window",),
            exact=_TABLES,
        )


def _append_window(rng: np.random.Generator) -> Iterable[Case]:
    for room in (128, 131):
        batch = sparse_case(rng, _ROWS)
        window = sparse_state(rng, batch, (room, 512), layers=3)
        kv = _floats(rng, len(batch.positions), 512)
        keywords = {"window": window, "layer": 2, "batch": batch}
        yield Case(name=f"room for {room}", positional=(kv,), keywords=keywords, mutated=("window",))


def _selected(rng: np.random.Generator, batch: AttentionBatch, ratio: int, k: int) -> HostArray:
    """Some of the entries that each token can see, ascending."""
    selected = np.full((len(batch.positions), k), -1, np.int32)
    positions: list[int] = batch.positions.tolist()
    for token, position in enumerate(positions):
        seen = (position + 1) // ratio
        some = rng.permutation(seen)[: min(k, int(rng.integers(0, seen + 1)))].tolist()
        selected[token, : len(some)] = sorted(some)
    return selected


def _grouped_linear(rng: np.random.Generator) -> Iterable[Case]:
    for tokens, groups, inner, outer in ((1, 8, 128, 64), (9, 2, 256, 192), (70, 3, 64, 72)):
        name = f"{tokens} x {groups} x {inner} -> {outer}"
        x, weight = _floats(rng, tokens, groups * inner), _floats(rng, groups, outer, inner)
        yield Case(name=name, positional=(x, weight), keywords={})
        part = random_part(rng, FP8_BLOCK_128, groups * outer, inner)
        weight = HostQuantised(parts=(part,), num_matrices=groups, grouped=True)
        yield Case(name=f"{name}, FP8", positional=(x, weight), keywords={})


def _hyper_streams(rng: np.random.Generator) -> Iterable[Case]:
    yield Case(name="4 streams", positional=(_floats(rng, 5, 128), 4), keywords={})


def _hyper_weights(rng: np.random.Generator, streams: int, h: int) -> HyperWeights:
    outputs = 2 * streams + streams**2
    fn = _floats(rng, outputs, streams * h) / np.float32(np.sqrt(streams * h))
    return HyperWeights(fn=fn, base=_floats(rng, outputs), scale=rng.uniform(0.5, 1.5, 3).astype(np.float32))


def _hyper_read(rng: np.random.Generator) -> Iterable[Case]:
    for tokens, h in ((1, 128), (37, 512), (700, 512)):
        residual = _floats(rng, tokens, 4, h)
        residual[2:3] = np.nan
        keywords = {"weights": _hyper_weights(rng, 4, h), "eps": _EPS, "mix_eps": 1e-6, "num_iterations": 20}
        yield Case(
            name=f"{tokens} x 4 x {h}", positional=(residual,), keywords=keywords, exact=_TABLES, in_float32=(1, 2)
        )


def _hyper_write(rng: np.random.Generator) -> Iterable[Case]:
    for tokens, h in ((1, 128), (37, 520)):
        mixing = rng.uniform(size=(tokens, 4, 4)).astype(np.float32)
        mix = HyperMix(post=_floats(rng, tokens, 4), mixing=mixing)
        arrays = _floats(rng, tokens, h), _floats(rng, tokens, 4, h)
        yield Case(name=f"{tokens} x 4 x {h}", positional=arrays, keywords={"mix": mix}, mutated=(1,), exact=_TABLES)


def _hyper_add(rng: np.random.Generator) -> Iterable[Case]:
    for tokens, h in ((1, 128), (37, 520)):
        arrays = _floats(rng, tokens, h), _floats(rng, tokens, 4, h)
        yield Case(name=f"{tokens} x 4 x {h}", positional=arrays, keywords={}, mutated=(1,))


def _hyper_head(rng: np.random.Generator) -> Iterable[Case]:
    for tokens, h in ((1, 128), (37, 512), (1100, 512)):
        residual = _floats(rng, tokens, 4, h)
        residual[2:3] = np.nan
        fn = _floats(rng, 4, 4 * h) / np.float32(np.sqrt(4 * h))
        yield Case(
            name=f"{tokens} x 4 x {h}",
            positional=(residual, fn, _floats(rng, 4), _floats(rng, 1)),
            keywords={"eps": _EPS, "mix_eps": 1e-6},
            exact=(1, 2, 3),
        )


SPARSE_CASES: Mapping[str, Callable[[np.random.Generator], Iterable[Case]]] = {
    "append_window": _append_window,
    "compress_overlapping_windows": _compressor(overlapping=True),
    "compress_windows": _compressor(overlapping=False),
    "grouped_linear": _grouped_linear,
    "hyper_add": _hyper_add,
    "hyper_head": _hyper_head,
    "hyper_read": _hyper_read,
    "hyper_streams": _hyper_streams,
    "hyper_write": _hyper_write,
    "index_scores": _index_scores,
    "norm_rope_tail": _norm_rope_tail,
    "rope_tail": _rope_tail,
    "select_entries": _select_entries,
    "window_attention": _window_attention,
}

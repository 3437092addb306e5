"""What each operator is tried with by the conformance kit: odd sizes, a row of NaN, padding, shuffled blocks."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from openinfer_kernels.ops import AttentionBatch, HostArray
from openinfer_kernels.rope import RopeParameters, rope_table
from openinfer_kernels.testing.case import Case
from openinfer_kernels.testing.expert_cases import EXPERT_CASES, quantised_gated_cases, quantised_linear_cases
from openinfer_kernels.testing.paged import PagedCase, make_batch, make_paged_case, make_state_case
from openinfer_kernels.testing.sparse_cases import SPARSE_CASES

_HEAD_DIM = 64
_BLOCK_TOKENS = 16
"""Sizes that every implementation takes, also those that are particular."""
_ROWS = ((1, 1), (37, 1), (50, 17), (16, 16), (90, 3))
"""Context and query tokens: the first token of all, decoding, a chunk after a context, a whole prompt."""


def _floats(rng: np.random.Generator, *shape: int) -> HostArray:
    return rng.normal(size=shape).astype(np.float32)


def _embedding(rng: np.random.Generator) -> Iterable[Case]:
    for tokens, vocab, h in ((1, 7, 8), (5, 100, 24), (130, 33, 136)):
        token_ids = rng.integers(0, vocab, tokens).astype(np.int32)
        yield Case(name=f"{tokens} of {vocab} x {h}", positional=(token_ids, _floats(rng, vocab, h)), keywords={})


def _residual_embedding(rng: np.random.Generator) -> Iterable[Case]:
    for case in _embedding(rng):
        yield dataclasses.replace(case, in_float32=(0,))
        scaled = {"scale": 59.75}
        yield dataclasses.replace(case, name=f"{case.name}, scaled", keywords=scaled, in_float32=(0,))


def _linear(rng: np.random.Generator) -> Iterable[Case]:
    for tokens, inner, outer in ((1, 128, 64), (7, 40, 24), (33, 256, 192), (130, 128, 72)):
        x, weight = _floats(rng, tokens, inner), _floats(rng, outer, inner)
        yield Case(name=f"{tokens} x {inner} -> {outer}", positional=(x, weight, make_batch(tokens)), keywords={})
        with_bias = (_with_nan(x), weight, make_batch(tokens), _floats(rng, outer))
        yield Case(name=f"{tokens} x {inner} -> {outer}, bias, NaN", positional=with_bias, keywords={})
    yield from quantised_linear_cases(rng)


def _gated_linear(rng: np.random.Generator) -> Iterable[Case]:
    for tokens, inner, width in ((1, 128, 64), (9, 128, 192), (70, 40, 24)):
        x, gate_up = _floats(rng, tokens, inner), _floats(rng, 2 * width, inner) / np.float32(np.sqrt(inner))
        name = f"{tokens} x {inner} -> {width}"
        batch = make_batch(tokens)
        yield Case(name=name, positional=(x, gate_up, batch), keywords={})
        yield Case(name=f"{name}, NaN", positional=(_with_nan(x), gate_up, batch), keywords={})
    yield from quantised_gated_cases(rng)


def _geglu(rng: np.random.Generator) -> Iterable[Case]:
    for tokens, width in ((1, 8), (5, 33), (40, 1032)):
        gate_up = _with_nan(_floats(rng, tokens, 2 * width) * np.float32(3))
        yield Case(name=f"{tokens} x {width}", positional=(gate_up,), keywords={})


def _soft_cap(rng: np.random.Generator) -> Iterable[Case]:
    for tokens, vocab, cap in ((1, 7, 30.0), (5, 640, 0.5), (33, 1025, 30.0)):
        logits = _with_nan(_floats(rng, tokens, vocab) * np.float32(40))
        yield Case(
            name=f"{tokens} x {vocab} within {cap}",
            positional=(logits,),
            keywords={"cap": cap},
            mutated=(0,),
            unrounded=(0,),
            exact=(0,),
        )


_ADAPTER_SLOTS = (2, -1, 0, 0, 1, -1, 2)


def _lora_shrink(rng: np.random.Generator) -> Iterable[Case]:
    for inner, pieces, rank in ((128, 3, 8), (40, 1, 16), (256, 2, 72)):
        slots = np.array(_ADAPTER_SLOTS, np.int32)
        x, a = _with_nan(_floats(rng, len(slots), inner)), _floats(rng, 3, pieces, rank, inner) / np.float32(8)
        name = f"{pieces} of rank {rank} x {inner}"
        yield Case(name=name, positional=(x, a, slots), keywords={}, in_float32=(0,))


def _lora_expand(rng: np.random.Generator) -> Iterable[Case]:
    for heights, rank in (((64, 24, 24), 8), ((72,), 16), ((33, 250), 72)):
        slots, starts = np.array(_ADAPTER_SLOTS, np.int32), (0, *np.cumsum(heights).tolist())
        shrunk = _floats(rng, 2, len(slots), len(heights), rank)
        y, b = _floats(rng, len(slots), starts[-1]), _floats(rng, 3, starts[-1], rank) / np.float32(8)
        yield Case(
            name=f"{heights} of rank {rank}",
            positional=(y, shrunk, b, slots),
            keywords={"starts": starts},
            mutated=(0,),
            exact=(1,),
        )


def _lora_expand_swiglu(rng: np.random.Generator) -> Iterable[Case]:
    for width, rank in ((64, 8), (200, 24)):
        slots, starts = np.array(_ADAPTER_SLOTS, np.int32), (0, width, 2 * width)
        shrunk = _floats(rng, 2, len(slots), 2, rank)
        gate_up, b = _floats(rng, len(slots), 2 * width), _floats(rng, 3, 2 * width, rank) / np.float32(8)
        yield Case(
            name=f"{width} of rank {rank}",
            positional=(gate_up, shrunk, b, slots),
            keywords={"starts": starts},
            exact=(1,),
        )


def _logits(rng: np.random.Generator) -> Iterable[Case]:
    for tokens, h, vocab in ((1, 128, 192), (9, 256, 640), (40, 40, 72)):
        hidden, head = _with_nan(_floats(rng, tokens, h)), _floats(rng, vocab, h)
        yield Case(name=f"{tokens} x {h} -> {vocab}", positional=(hidden, head), keywords={}, in_float32=(0,))


def _rms_norm(rng: np.random.Generator) -> Iterable[Case]:
    for tokens, h in ((1, 8), (3, 200), (9, 1025), (130, 64)):
        for eps in (1e-6, 0.5):
            x = _with_nan(_floats(rng, tokens, h) * np.float32(3))
            case = Case(name=f"{tokens} x {h}, eps {eps}", positional=(x, _floats(rng, h)), keywords={"eps": eps})
            yield case
            yield dataclasses.replace(case, name=f"{case.name}, of a residual", exact=(0,))


def _add_rms_norm(rng: np.random.Generator) -> Iterable[Case]:
    for tokens, h in ((1, 8), (3, 200), (9, 1025), (130, 64)):
        arrays = _with_nan(_floats(rng, tokens, h)), _floats(rng, tokens, h), _floats(rng, h)
        case = Case(
            name=f"{tokens} x {h}",
            positional=arrays,
            keywords={"eps": 1e-5},
            mutated=(1,),
            unrounded=(1,),
            exact=(1,),
        )
        yield case
        yield dataclasses.replace(case, name=f"{case.name}, of experts", exact=(0, 1))


def _qk_norm_rope_append(rng: np.random.Generator) -> Iterable[Case]:
    for heads, kv_heads, table in ((4, 4, 0), (6, 2, 1)):
        shape = {"num_kv_heads": kv_heads, "head_dim": _HEAD_DIM, "block_tokens": _BLOCK_TOKENS}
        case = make_paged_case(rng, _ROWS, **shape, table=table)
        batch = _with_padding(case.batch)
        keywords = {
            "q_norm": _floats(rng, _HEAD_DIM),
            "k_norm": _floats(rng, _HEAD_DIM),
            "eps": 1e-6,
            "rope": rope_table(RopeParameters(theta=1e4), head_dim=_HEAD_DIM, positions=128),
            "cache": case.cache(1),
            "batch": batch,
        }
        qkv = _with_nan(_floats(rng, case.num_tokens, (heads + 2 * kv_heads) * _HEAD_DIM))
        yield Case(
            name=f"{heads} heads over {kv_heads}, block table {table}",
            positional=(qkv,),
            keywords=keywords,
            mutated=("cache.data",),
            exact=("rope",),
        )


def _with_padding(batch: AttentionBatch) -> AttentionBatch:
    """The last two tokens are padding."""
    padded = tuple(np.append(slots[:-2], np.full(2, -1)) for slots in batch.cache_slots)
    return dataclasses.replace(batch, cache_slots=padded)


def _rope_append(rng: np.random.Generator) -> Iterable[Case]:
    for case in _qk_norm_rope_append(rng):
        keywords = {name: value for name, value in case.keywords.items() if name not in {"q_norm", "k_norm", "eps"}}
        yield dataclasses.replace(case, keywords=keywords)


def _paged_attention(rng: np.random.Generator) -> Iterable[Case]:
    for rows in (_ROWS, ((5, 1), (200, 1), (33, 1)), ((40, 40),)):
        for heads, kv_heads, table in ((2, 2, 0), (8, 2, 1)):
            shape = {"num_kv_heads": kv_heads, "head_dim": _HEAD_DIM, "block_tokens": _BLOCK_TOKENS}
            case = make_paged_case(rng, rows, **shape, table=table)
            q = _with_nan(_floats(rng, case.num_tokens, heads, _HEAD_DIM))
            keywords = {"batch": case.batch, "scale": _HEAD_DIM**-0.5}
            name = f"rows {rows}, {heads} heads over {kv_heads}, block table {table}"
            yield Case(name=name, positional=(q, case.cache(1)), keywords=keywords)
            for asked in _scores_asked(rng, heads):
                batch = case.behind_window(asked["window"]) if "window" in asked else case.batch
                yield Case(
                    name=f"{name}, {', '.join(asked)}",
                    positional=(q, case.cache(1)),
                    keywords={**keywords, "batch": batch, **asked},
                    exact=("sinks",),
                )


def _scores_asked(rng: np.random.Generator, heads: int) -> Iterable[dict[str, Any]]:
    """Each of what scores may be asked for, alone and together; a window that ends at a block and ones that do not."""
    sinks = _floats(rng, heads) * np.float32(2)
    for window in (1, _BLOCK_TOKENS, 37, 1000):
        yield {"window": window}
    yield {"soft_cap": 1.5}
    yield {"sinks": sinks}
    yield {"window": _BLOCK_TOKENS + 1, "soft_cap": 1.5, "sinks": sinks}


_LATENT = {"latent_dim": 512, "rope_dim": 64, "nope_dim": 128, "value_dim": 128}
"""The sizes of every published model with latent attention, which implementations may be made for."""


def _latent_cases(rng: np.random.Generator) -> Iterable[tuple[int, PagedCase]]:
    """Query heads, and rows over a cache of latents; one of them is long enough to be expanded."""
    for rows, heads, table in ((_ROWS, 16, 0), (((300, 200), (5, 1)), 2, 1)):
        case = make_paged_case(
            rng,
            rows,
            num_kv_heads=1,
            head_dim=_LATENT["latent_dim"] + _LATENT["rope_dim"],
            block_tokens=_BLOCK_TOKENS,
            table=table,
        )
        case.kv_cache = np.ascontiguousarray(case.kv_cache[:, :, :1])  # a latent is key and value
        yield heads, case


def _latent_norm_rope_append(rng: np.random.Generator) -> Iterable[Case]:
    head_dim = _LATENT["nope_dim"] + _LATENT["rope_dim"]
    for heads, case in _latent_cases(rng):
        keywords = {
            "head_dim": head_dim,
            "norm": _floats(rng, _LATENT["latent_dim"]),
            "eps": 1e-6,
            "rope": rope_table(RopeParameters(theta=1e4), head_dim=_LATENT["rope_dim"], positions=512),
            "cache": case.cache(1),
            "batch": _with_padding(case.batch),
        }
        q = _with_nan(_floats(rng, case.num_tokens, heads * head_dim))
        latent = _with_nan(_floats(rng, case.num_tokens, _LATENT["latent_dim"] + _LATENT["rope_dim"]))
        yield Case(
            name=f"{heads} heads",
            positional=(q, latent),
            keywords=keywords,
            mutated=("cache.data",),
            exact=("rope",),
        )


def _latent_attention(rng: np.random.Generator) -> Iterable[Case]:
    head_dim = _LATENT["nope_dim"] + _LATENT["rope_dim"]
    for heads, case in _latent_cases(rng):
        rows = heads * (_LATENT["nope_dim"] + _LATENT["value_dim"])
        keywords = {
            "kv_b_proj": _floats(rng, rows, _LATENT["latent_dim"]) / np.float32(np.sqrt(_LATENT["latent_dim"])),
            "batch": case.batch,
            "scale": head_dim**-0.5,
        }
        q = _with_nan(_floats(rng, case.num_tokens, heads, head_dim))
        # queries and what is attended to are rounded before they are multiplied, or keys and values are
        yield Case(name=f"{heads} heads", positional=(q, case.cache(1)), keywords=keywords, rounded_inside=True)


def _zero_centred_rms_norm(rng: np.random.Generator) -> Iterable[Case]:
    for tokens, h in ((1, 8), (3, 200), (9, 1025)):
        x = _with_nan(_floats(rng, tokens, h) * np.float32(3))
        case = Case(name=f"{tokens} x {h}", positional=(x, _floats(rng, h)), keywords={"eps": 1e-6})
        yield case
        yield dataclasses.replace(case, name=f"{case.name}, of a residual", exact=(0,))


def _gated_rms_norm(rng: np.random.Generator) -> Iterable[Case]:
    for tokens, heads, n in ((1, 2, 8), (3, 5, 24), (9, 4, 128)):
        x, gate = _with_nan(_floats(rng, tokens, heads * n)), _floats(rng, tokens, heads * n)
        keywords = {"eps": 1e-6}
        yield Case(name=f"{tokens} x {heads} x {n}", positional=(x, gate, _floats(rng, n)), keywords=keywords)


def _gated_qk_norm_rope_append(rng: np.random.Generator) -> Iterable[Case]:
    for heads, kv_heads, rotated, table in ((4, 4, _HEAD_DIM, 0), (6, 2, _HEAD_DIM // 4, 1)):
        shape = {"num_kv_heads": kv_heads, "head_dim": _HEAD_DIM, "block_tokens": _BLOCK_TOKENS}
        case = make_paged_case(rng, _ROWS, **shape, table=table)
        keywords = {
            "q_norm": _floats(rng, _HEAD_DIM),
            "k_norm": _floats(rng, _HEAD_DIM),
            "eps": 1e-6,
            "rope": rope_table(RopeParameters(theta=1e4), head_dim=rotated, positions=128),
            "cache": case.cache(1),
            "batch": case.batch,
        }
        projected = _with_nan(_floats(rng, case.num_tokens, 2 * (heads + kv_heads) * _HEAD_DIM))
        yield Case(
            name=f"{heads} heads over {kv_heads}, {rotated} dimensions rotated",
            positional=(projected,),
            keywords=keywords,
            mutated=("cache.data",),
            exact=("rope",),
        )


def _output_gate(rng: np.random.Generator) -> Iterable[Case]:
    for tokens, heads, kv_heads in ((1, 2, 1), (9, 4, 4)):
        attended = _with_nan(_floats(rng, tokens, heads * _HEAD_DIM))
        projected = _floats(rng, tokens, 2 * (heads + kv_heads) * _HEAD_DIM)
        keywords = {"head_dim": _HEAD_DIM}
        yield Case(name=f"{tokens} x {heads} heads", positional=(attended, projected), keywords=keywords)


def _causal_conv_silu(rng: np.random.Generator) -> Iterable[Case]:
    for channels, width in ((5, 2), (24, 4)):
        batch, state = make_state_case(rng, _ROWS, (channels, width - 1))
        x = _with_nan(_floats(rng, len(batch.positions), channels))
        yield Case(
            name=f"{channels} channels, {width} taps",
            positional=(x, _floats(rng, channels, width)),
            keywords={"state": state, "layer": 1, "batch": batch},
            mutated=("state",),
        )


def _gated_delta_rule(rng: np.random.Generator) -> Iterable[Case]:
    for key_heads, value_heads, key_dim, value_dim in ((1, 1, 3, 5), (2, 4, 16, 24)):
        batch, state = make_state_case(rng, (*_ROWS, (150, 150)), (value_heads, key_dim, value_dim))
        tokens, width = len(batch.positions), 2 * key_heads * key_dim + value_heads * value_dim
        yield Case(
            name=f"{value_heads} heads over {key_heads}, {key_dim} x {value_dim}",
            positional=(_with_nan(_floats(rng, tokens, width)), _floats(rng, tokens, 2 * value_heads)),
            keywords={
                "a_log": np.log(rng.uniform(0.2, 3.0, value_heads)).astype(np.float32),
                "dt_bias": _floats(rng, value_heads),
                "state": state,
                "layer": 1,
                "batch": batch,
            },
            mutated=("state",),
            exact=("a_log", "state"),
        )


def _with_nan(x: HostArray) -> HostArray:
    """A copy whose third row is NaN, where there are so many: it must stay there."""
    x = x.copy()
    x[2:3] = np.nan
    return x


CASES: Mapping[str, Callable[[np.random.Generator], Iterable[Case]]] = {
    "add_rms_norm": _add_rms_norm,
    "add_zero_centred_rms_norm": _add_rms_norm,
    "causal_conv_silu": _causal_conv_silu,
    "embedding": _embedding,
    "gated_delta_rule": _gated_delta_rule,
    "gated_qk_norm_rope_append": _gated_qk_norm_rope_append,
    "gated_rms_norm": _gated_rms_norm,
    "geglu": _geglu,
    "latent_attention": _latent_attention,
    "latent_norm_rope_append": _latent_norm_rope_append,
    "linear": _linear,
    "linear_geglu": _gated_linear,
    "linear_swiglu": _gated_linear,
    "lora_expand": _lora_expand,
    "lora_expand_swiglu": _lora_expand_swiglu,
    "lora_shrink": _lora_shrink,
    "logits": _logits,
    "output_gate": _output_gate,
    "paged_attention": _paged_attention,
    "qk_norm_rope_append": _qk_norm_rope_append,
    "residual_embedding": _residual_embedding,
    "rms_norm": _rms_norm,
    "rope_append": _rope_append,
    "soft_cap": _soft_cap,
    "zero_centred_qk_norm_rope_append": _qk_norm_rope_append,
    "zero_centred_rms_norm": _zero_centred_rms_norm,
    **EXPERT_CASES,
    **SPARSE_CASES,
}

"""What the operators of experts and of quantised weights are tried with by the conformance kit."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from openinfer_kernels.ops import ExpertChoice, HostArray, LinearWeight, Ops
from openinfer_kernels.testing.case import Case
from openinfer_kernels.testing.paged import make_batch
from openinfer_kernels.weights.quantised import (
    FP8_BLOCK_128,
    INT4_GROUP_32,
    MXFP4,
    Code,
    QuantisedPart,
    ScaleType,
    WeightFormat,
)

FORMATS = (FP8_BLOCK_128, INT4_GROUP_32, MXFP4)
"""What every implementation of the operators serves."""
_E4M3_MASK = 0xBF
"""Leaves numbers below 2, hence no NaN."""
_SPREADS = {Code.E4M3: 0.6, Code.INT8: 74.0, Code.INT4: 4.6, Code.E2M1: 2.9}
"""Root of the mean square of what random codes stand for."""
_EXPERTS: Mapping[str, Any] = {"exact": ("1.weights",), "in_float32": (0,), "rounded_inside": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostQuantised:
    """A quantised weight before it is uploaded."""

    parts: tuple[QuantisedPart, ...]
    num_matrices: int | None = None
    grouped: bool = False
    """For `grouped_linear`."""

    def upload(self, ops: Ops) -> LinearWeight:
        return ops.upload_quantised(*self.parts, num_matrices=self.num_matrices, grouped=self.grouped)


def random_part(rng: np.random.Generator, weight_format: WeightFormat, rows: int, columns: int) -> QuantisedPart:
    """Codes and scales as readers bring them, of values that spread by about `columns ** -0.5`."""
    code = weight_format.code
    codes = rng.integers(0, 256, (rows, columns * code.bits // 8)).astype(np.uint8)
    if code is Code.E4M3:
        codes &= np.uint8(_E4M3_MASK)
    grid = tuple(
        1 if group is None else -(-size // group)
        for size, group in zip((rows, columns), weight_format.groups, strict=True)
    )
    spread = float(columns) ** -0.5 / _SPREADS[code]
    sizes = (spread * rng.uniform(0.5, 2, grid)).astype(np.float32)
    highest = (1 << code.bits) - 1
    return QuantisedPart(
        format=weight_format,
        codes=codes,
        scales=_stored_scales(rng, weight_format.scales, sizes),
        zero_points=rng.integers(0, highest + 1, grid).astype(np.uint8) if weight_format.zero_points else None,
        minimums=(-highest * rng.uniform(0.3, 0.7, grid) * sizes).astype(np.float16)
        if weight_format.minimums
        else None,
        global_scale=spread if weight_format.global_scale else 1.0,
    )


def _stored_scales(rng: np.random.Generator, stored: ScaleType, sizes: HostArray) -> HostArray:
    """Scales of about such sizes; of E4M3, from 0.5 to 2, for a global scale to multiply."""
    match stored:
        case ScaleType.F32:
            return sizes
        case ScaleType.F16:
            return sizes.astype(np.float16)
        case ScaleType.BF16:
            return (sizes.view(np.uint32) >> 16).astype(np.uint16)
        case ScaleType.E8M0:
            return (np.rint(np.log2(sizes)) + 127).astype(np.uint8)
        case ScaleType.E4M3:
            return rng.integers(0x30, 0x41, sizes.shape).astype(np.uint8)


def _random_choice(rng: np.random.Generator, tokens: int, experts: int, per_token: int) -> ExpertChoice:
    """Distinct experts per token; the last token is padding where there are several."""
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :per_token].astype(np.int32)
    weights = rng.uniform(0.1, 1, (tokens, per_token)).astype(np.float32)
    if tokens > 1:
        ids[-1], weights[-1] = -1, 0
    return ExpertChoice(ids=ids, weights=weights)


def _experts(rng: np.random.Generator) -> Iterable[Case]:
    """Dense and quantised experts; all of them here, or some on other ranks; none hit, few, all."""
    for tokens, h, width, experts, per_token in ((1, 64, 32, 5, 2), (3, 96, 64, 8, 3), (70, 128, 96, 6, 4)):
        gate_up = _floats(rng, experts, 2 * width, h) / np.float32(h**0.5)
        down = _floats(rng, experts, h, width) / np.float32(width**0.5)
        choice = _random_choice(rng, tokens, experts, per_token)
        name = f"{tokens} x {h}, {per_token} of {experts} of width {width}"
        yield Case(
            name=name, positional=(_with_nan(_floats(rng, tokens, h)), choice, gate_up, down), keywords={}, **_EXPERTS
        )
        keywords = {"first_expert": 2, "limit": 0.5, "shared": _floats(rng, tokens, h)}
        x = _floats(rng, tokens, h)
        yield Case(
            name=f"{name}, a limit and some elsewhere",
            positional=(x, choice, gate_up, down),
            keywords=keywords,
            **_EXPERTS,
        )
    for weight_format in FORMATS:
        quantised = [_stack(rng, weight_format, 4, *shape) for shape in ((2 * 128, 256), (256, 128))]
        choice = _random_choice(rng, 19, 4, 2)
        x = _floats(rng, 19, 256)
        yield Case(name=f"{weight_format}", positional=(x, choice, *quantised), keywords={"limit": 2.0}, **_EXPERTS)


def quantised_linear_cases(rng: np.random.Generator) -> Iterable[Case]:
    """Whole and partial blocks."""
    for weight_format in FORMATS:
        for tokens, inner, outer in ((1, 256, 64), (7, 128, 192), (130, 64, 72)):
            weight = HostQuantised(parts=(random_part(rng, weight_format, outer, inner),))
            x = _with_nan(_floats(rng, tokens, inner))
            yield Case(
                name=f"{weight_format}, {tokens} x {inner} -> {outer}",
                positional=(x, weight, make_batch(tokens)),
                keywords={},
            )


def quantised_gated_cases(rng: np.random.Generator) -> Iterable[Case]:
    """Few tokens, and more than multiply codes on a GPU."""
    for weight_format in FORMATS:
        for tokens in (5, 70):
            gate_up = HostQuantised(parts=tuple(random_part(rng, weight_format, 64, 128) for _ in range(2)))
            name = f"{weight_format}, {tokens} x 128 -> 64"
            given = _with_nan(_floats(rng, tokens, 128)), gate_up, make_batch(tokens)
            yield Case(name=name, positional=given, keywords={})


def _swiglu(rng: np.random.Generator) -> Iterable[Case]:
    """With a limit and without."""
    for tokens, width in ((1, 8), (5, 33), (40, 1032)):
        gate_up = _with_nan(_floats(rng, tokens, 2 * width))
        yield Case(name=f"{tokens} x {width}", positional=(gate_up,), keywords={})
        yield Case(name=f"{tokens} x {width}, a limit", positional=(gate_up,), keywords={"limit": 0.75})


def _stack(rng: np.random.Generator, weight_format: WeightFormat, count: int, rows: int, columns: int) -> HostQuantised:
    parts = tuple(random_part(rng, weight_format, rows, columns) for _ in range(count))
    return HostQuantised(parts=parts, num_matrices=count)


def _floats(rng: np.random.Generator, *shape: int) -> HostArray:
    return rng.normal(size=shape).astype(np.float32)


def _with_nan(x: HostArray) -> HostArray:
    """A copy whose third row is NaN, where there are so many: it must stay there."""
    x = x.copy()
    x[2:3] = np.nan
    return x


EXPERT_CASES: Mapping[str, Callable[[np.random.Generator], Iterable[Case]]] = {
    "experts": _experts,
    "swiglu": _swiglu,
}

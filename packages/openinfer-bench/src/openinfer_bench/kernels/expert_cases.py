"""What is measured of mixtures of experts: routers and experts at published shapes, routed evenly at random.

Bytes are those of the experts that some token chose, so that a share of the roofline means what it means elsewhere; how
many were hit is in the shape. Calls take turns with several choices, so that experts come from memory.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from openinfer_bench.kernels.cases import Call, Case, Filler
from openinfer_kernels.ops import ExpertChoice, HostArray, LinearWeight, Ops, Routing, Scoring
from openinfer_kernels.weights.plain import RandomWeight
from openinfer_kernels.weights.quantised import (
    FP8_BLOCK_128,
    INT4_GROUP_32,
    MXFP4,
    Code,
    QuantisedPart,
    RandomCodes,
    ScaleType,
    WeightFormat,
)

_CHOICES = 6
_BF16_BYTES, _FLOAT32_BYTES = 2, 4
INT4_GROUP_128 = WeightFormat(code=Code.INT4, group_rows=1, group_columns=128, scales=ScaleType.BF16)
_SCALES = {ScaleType.F32: np.float32(0.02), ScaleType.BF16: np.uint16(0x3B80), ScaleType.E8M0: np.uint8(119)}
"""Of any size: 0.02, 2^-8 in BF16, 2^-8 in E8M0."""
_BITS = {None: 16.0, FP8_BLOCK_128: 8.0, INT4_GROUP_32: 4.5, INT4_GROUP_128: 4.125, MXFP4: 4.25}
"""Of a weight, with its part of a scale."""
_QWEN_MIXTURES = {
    "30B-A3B": {"h": 2048, "f": 768, "num_experts": 128},
    "35B-A3B": {"h": 2048, "f": 512, "num_experts": 256},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """The experts of one layer on one rank."""

    model: str
    """DeepSeek-V2-Lite, Kimi-K2, DeepSeek-V4-Flash, Qwen3's mixtures, and which share of the experts."""
    h: int
    f: int
    num_experts: int
    """Of the layer."""
    num_local: int
    """Of them on this rank."""
    per_token: int
    weight_format: WeightFormat | None
    """None is BF16."""


SHAPES = (
    ExpertShape(model="V2-Lite BF16", h=2048, f=1408, num_experts=64, num_local=64, per_token=6, weight_format=None),
    ExpertShape(
        model="K2 INT4, 1/8",
        h=7168,
        f=2048,
        num_experts=384,
        num_local=48,
        per_token=8,
        weight_format=INT4_GROUP_32,
    ),
    ExpertShape(
        model="K2 FP8, 1/8",
        h=7168,
        f=2048,
        num_experts=384,
        num_local=48,
        per_token=8,
        weight_format=FP8_BLOCK_128,
    ),
    ExpertShape(
        model="V4 FP4, 1/8",
        h=4096,
        f=2048,
        num_experts=256,
        num_local=32,
        per_token=6,
        weight_format=MXFP4,
    ),
    *(
        ExpertShape(model=f"{model} {name}", **sizes, num_local=sizes["num_experts"], per_token=8, weight_format=made)
        for model, sizes in _QWEN_MIXTURES.items()
        for name, made in (("BF16", None), ("FP8", FP8_BLOCK_128), ("INT4", INT4_GROUP_128))
    ),
)


def expert_cases(shapes: Sequence[ExpertShape], *, tokens: Sequence[int]) -> Iterator[Case]:
    """The routers and the experts of some shapes, for each number of tokens."""
    routers = {(shape.num_experts, shape.per_token): shape for shape in shapes}
    for shape in routers.values():
        yield from (_router(shape, count) for count in tokens)
    for shape in shapes:
        yield from (_experts(shape, count) for count in tokens)


def _router(shape: ExpertShape, tokens: int) -> Case:
    routing = Routing(
        scoring=Scoring.SIGMOID, num_experts=shape.num_experts, num_experts_per_token=shape.per_token, normalised=True
    )

    def prepare(ops: Ops, fill: Filler) -> Call:
        del fill
        logits = ops.upload(np.random.default_rng(0).normal(size=(tokens, shape.num_experts)).astype(np.float32))
        return lambda: ops.top_experts(logits, routing=routing)

    return Case(
        operator="top_experts",
        shape=f"{tokens}: {shape.per_token} of {shape.num_experts}",
        tokens=tokens,
        bytes=tokens * (_FLOAT32_BYTES * shape.num_experts + 2 * _FLOAT32_BYTES * shape.per_token),
        flops=0,
        prepare=prepare,
    )


def _experts(shape: ExpertShape, tokens: int) -> Case:
    choices = _choices(shape, tokens)
    local = [ids[ids < shape.num_local] for ids in choices]
    hit = sum(len(np.unique(ids)) for ids in local) / len(local)
    slots = sum(len(ids) for ids in local) / len(local)
    expert_values = 3 * shape.f * shape.h

    def prepare(ops: Ops, fill: Filler) -> Call:
        gate_up = random_matrices(ops, shape.weight_format, (shape.num_local, 2 * shape.f, shape.h))
        down = random_matrices(ops, shape.weight_format, (shape.num_local, shape.h, shape.f))
        x, weights = fill(tokens, shape.h), np.full((tokens, shape.per_token), 0.2, np.float32)
        made = [
            ExpertChoice(ids=ops.upload(ids), weights=ops.upload(weights), num_experts=shape.num_experts)
            for ids in choices
        ]
        turns = itertools.cycle(made)
        return lambda: ops.experts(x, next(turns), gate_up, down)

    return Case(
        operator="experts",
        shape=f"{shape.model}: {tokens}, {hit:.1f} hit",
        tokens=tokens,
        bytes=int(hit * expert_values * _BITS[shape.weight_format] / 8)
        + tokens * shape.h * (_BF16_BYTES + _FLOAT32_BYTES),
        flops=int(slots * 2 * expert_values),
        prepare=prepare,
    )


def _choices(shape: ExpertShape, tokens: int) -> list[HostArray]:
    """Distinct experts for each token, all equally likely."""
    rng = np.random.default_rng(tokens)
    drawn = (rng.random((tokens, shape.num_experts)) for _ in range(_CHOICES))
    return [np.argsort(each, axis=1)[:, : shape.per_token].astype(np.int32) for each in drawn]


def random_matrices(ops: Ops, weight_format: WeightFormat | None, shape: tuple[int, int, int]) -> LinearWeight:
    """Some matrices, `[matrices, out, in]`; None is BF16."""
    count, rows, columns = shape
    if weight_format is None:
        recipe = RandomWeight.whole((count * rows, columns), seed=1, mean=0.0, spread=columns**-0.5)
        return ops.upload_weight(recipe).reshape(shape)
    block_rows, block_columns = weight_format.groups
    grid = -(-rows // (block_rows or rows)), -(-columns // (block_columns or columns))
    codes = RandomCodes.whole((rows, columns * weight_format.code.bits // 8), seed=1, mask=0xBF, itemsize=1)
    scales = np.full(grid, _SCALES[weight_format.scales])
    part = QuantisedPart(format=weight_format, codes=codes, scales=scales)
    return ops.upload_quantised(*[part] * count, num_matrices=count)

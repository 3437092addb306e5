"""Experts against float64 loops over one token: dense, quantised, limited, cut across ranks."""

from dataclasses import replace

import numpy as np
import pytest

from openinfer_kernels import ExpertChoice, Ops, QuantisedPart, ScaleType
from openinfer_kernels.cpu import BatchInvariantCpuOps, CpuOps
from openinfer_kernels.testing.expert_cases import FORMATS, random_part
from openinfer_kernels.testing.paged import make_batch
from openinfer_kernels.weights.quantised import FP8_BLOCK_128, INT4_GROUP_32, MXFP4, Code, WeightFormat

BATCH = make_batch(1)
"""Products do not look at it."""


def naive_swiglu(gate: np.ndarray, up: np.ndarray, limit: float | None) -> np.ndarray:
    if limit is not None:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate / (1 + np.exp(-gate)) * up


def naive_experts(
    x: np.ndarray, ids: np.ndarray, weights: np.ndarray, gate_up: np.ndarray, down: np.ndarray, limit: float | None
) -> np.ndarray:
    """All experts on one rank, in float64."""
    x, gate_up, down = (each.astype(np.float64) for each in (x, gate_up, down))
    width = gate_up.shape[1] // 2
    out = np.zeros(x.shape)
    for token, chosen in enumerate(ids):
        for place, expert in enumerate(chosen):
            if expert >= 0:
                both = gate_up[expert] @ x[token]
                out[token] += weights[token, place] * (down[expert] @ naive_swiglu(both[:width], both[width:], limit))
    return out


class Case:
    """Random experts and a choice among them, on the device of some operators."""

    def __init__(
        self, ops: Ops, *, tokens: int, h: int, width: int, experts: int, per_token: int, hit: int = 0
    ) -> None:
        """`hit`: of how many experts the tokens choose; 0 for all."""
        rng = np.random.default_rng(tokens + h)
        self.ids = np.argsort(rng.random((tokens, hit or experts)), axis=1)[:, :per_token].astype(np.int32)
        self.ids[tokens // 2, 1:] = -1
        self.weights = rng.uniform(0.05, 1, self.ids.shape).astype(np.float32)
        self.x = ops.upload_weight(rng.normal(size=(tokens, h)).astype(np.float32))
        gate_up = rng.normal(size=(experts * 2 * width, h)).astype(np.float32) / np.float32(h**0.5)
        down = rng.normal(size=(experts * h, width)).astype(np.float32) / np.float32(width**0.5)
        self.gate_up = ops.upload_weight(gate_up).reshape(experts, 2 * width, h)
        self.down = ops.upload_weight(down).reshape(experts, h, width)
        self.choice = ExpertChoice(ids=ops.upload(self.ids), weights=ops.upload(self.weights))
        self._ops = ops

    def expected(self, limit: float | None = None) -> np.ndarray:
        x, gate_up, down = (self._ops.download(a).astype(np.float32) for a in (self.x, self.gate_up, self.down))
        return naive_experts(x, self.ids, self.weights, gate_up, down, limit)


SIZES = [
    {"tokens": 1, "h": 96, "width": 64, "experts": 16, "per_token": 4},
    {"tokens": 5, "h": 64, "width": 24, "experts": 3, "per_token": 2},
    {"tokens": 40, "h": 128, "width": 96, "experts": 64, "per_token": 6},
    {"tokens": 300, "h": 128, "width": 64, "experts": 8, "per_token": 3},
    {"tokens": 150, "h": 64, "width": 32, "experts": 300, "per_token": 2, "hit": 2},
]


def require_close(got: np.ndarray, expected: np.ndarray, ops: Ops) -> None:
    """Relative to the typical value of a result, as sums cancel; BF16 is rounded three times on the way."""
    errors = np.abs(got - expected) / np.sqrt((expected**2).mean())
    assert errors.max() < (2e-5 if ops.name == "cpu" else 2.0**-4)
    assert np.sqrt((errors**2).mean()) < (2e-6 if ops.name == "cpu" else 2.0**-7)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size['tokens']}-of-{size['experts']}")
@pytest.mark.parametrize("limit", [None, 0.5])
def test_experts_equal_float64(ops, size, limit):
    case = Case(ops, **size)
    out = ops.experts(case.x, case.choice, case.gate_up, case.down, limit=limit)
    assert out.dtype == np.float32
    require_close(ops.download(out), case.expected(limit), ops)


def test_ranks_sum_to_the_whole_and_shared_experts_come_last(ops):
    case = Case(ops, **SIZES[2])
    shared = ops.upload_weight(np.full(case.x.shape, 0.25, np.float32))
    parts = [
        ops.experts(
            case.x,
            case.choice,
            case.gate_up[first : first + 16],
            case.down[first : first + 16],
            first_expert=first,
            shared=shared if first == 16 else None,
        )
        for first in range(0, 64, 16)
    ]
    require_close(sum(ops.download(part) for part in parts), case.expected() + 0.25, ops)


def test_nan_and_padding_stay_within_their_tokens(ops):
    case = Case(ops, **SIZES[2])
    clean = ops.download(ops.experts(case.x, case.choice, case.gate_up, case.down))
    x, ids = ops.download(case.x).copy(), case.ids.copy()
    x[3], x[7], ids[7] = np.nan, np.nan, -1
    choice = ExpertChoice(ids=ops.upload(ids), weights=case.choice.weights)
    out = ops.download(ops.experts(ops.upload(x), choice, case.gate_up, case.down))
    assert np.isnan(out[3]).all()
    assert (out[7] == 0).all()
    others = np.delete(np.arange(40), [3, 7])
    require_close(out[others], clean[others], ops)


def test_same_bits_twice_and_whatever_else_is_in_the_batch():
    case = Case(BatchInvariantCpuOps(), **SIZES[2])
    ops = BatchInvariantCpuOps()
    whole = ops.experts(case.x, case.choice, case.gate_up, case.down)
    np.testing.assert_array_equal(whole, ops.experts(case.x, case.choice, case.gate_up, case.down))
    some = [11, 2, 30]
    choice = ExpertChoice(ids=case.ids[some], weights=case.weights[some])
    np.testing.assert_array_equal(ops.experts(case.x[some], choice, case.gate_up, case.down), whole[some])


@pytest.mark.gpu
def test_two_calls_give_the_same_bits(ops):
    case = Case(ops, **SIZES[3])
    first, second = (ops.download(ops.experts(case.x, case.choice, case.gate_up, case.down)) for _ in range(2))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("width", [8, 33, 1032])
def test_swiglu_equals_float64_rounded_once(ops, activation, host, rounded, rounded_once, limit, width):
    both = activation(np.random.default_rng(width).normal(size=(7, 2 * width)).astype(np.float32))
    values = host(both).astype(np.float64)
    out = host(ops.swiglu(both, limit=limit))
    rounded_once(out, naive_swiglu(values[:, :width], values[:, width:], limit))


@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
def test_quantised_experts_equal_those_of_their_values(ops, weight_format):
    rng = np.random.default_rng(9)
    codes_per_entry = {FP8_BLOCK_128: 1, INT4_GROUP_32: 2, MXFP4: 2}
    scale_shape = {FP8_BLOCK_128: lambda o, i: (-(-o // 128), -(-i // 128))}
    experts, width, h = 4, 64, 96

    def part(rows: int, columns: int) -> QuantisedPart:
        codes = rng.integers(0, 0x40, (rows, columns // codes_per_entry[weight_format])).astype(np.uint8)
        shape = scale_shape.get(weight_format, lambda o, i: (o, i // 32))(rows, columns)
        scales = rng.integers(118, 122, shape).astype(np.uint8)
        if weight_format is INT4_GROUP_32:
            return QuantisedPart(format=weight_format, codes=codes.view(np.int32), scales=scales.astype(np.uint16) << 7)
        return QuantisedPart(format=replace(weight_format, scales=ScaleType.E8M0), codes=codes, scales=scales)

    stacks = [[part(*shape) for _ in range(experts)] for shape in ((2 * width, h), (h, width))]
    values = [
        np.stack([CpuOps().linear(np.eye(each.shape[1], dtype=np.float32),
                                            CpuOps().upload_quantised(each), BATCH).T for each in stack])
        for stack in stacks
    ]  # fmt: skip
    ids = np.array([[0, 2], [3, 1], [2, 3]], np.int32)
    weights, x = rng.uniform(0.1, 1, ids.shape).astype(np.float32), rng.normal(size=(3, h)).astype(np.float32)
    uploaded = [ops.upload_quantised(*stack, num_matrices=experts) for stack in stacks]
    choice = ExpertChoice(ids=ops.upload(ids), weights=ops.upload(weights))
    given = ops.upload_weight(x)
    out = ops.download(ops.experts(given, choice, *uploaded))
    host = ops.download(given).astype(np.float32)
    require_close(out, naive_experts(host, ids, weights, *values, None), ops)


INT4_ZEROS = WeightFormat(code=Code.INT4, group_rows=1, group_columns=128, scales=ScaleType.F16, zero_points=True)
"""As AWQ and GPTQ have them."""


@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize(
    ("tokens", "experts", "per_token"), [(1, 16, 4), (5, 16, 4), (40, 8, 2), (100, 4, 2), (700, 5, 3)]
)
@pytest.mark.parametrize("weight_format", [*FORMATS, INT4_ZEROS], ids=str)
def test_experts_in_whole_tiles_equal_those_of_their_values(ops, weight_format, tokens, experts, per_token, limit):
    """On Hopper in tiles; some experts are another rank's, and one token is padding."""
    rng, h, width = np.random.default_rng(tokens), 384, 256
    stacks = [
        [random_part(rng, weight_format, *shape) for _ in range(experts)] for shape in ((2 * width, h), (h, width))
    ]
    values = [np.stack([CpuOps().upload_dequantised(part) for part in stack]) for stack in stacks]
    own = experts - 1
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :per_token].astype(np.int32)
    ids[tokens // 2, 1:] = -1
    weights, x = rng.uniform(0.1, 1, ids.shape).astype(np.float32), rng.normal(size=(tokens, h)).astype(np.float32)
    uploaded = [ops.upload_quantised(*stack[1:], num_matrices=own) for stack in stacks]
    choice = ExpertChoice(ids=ops.upload(ids), weights=ops.upload(weights), num_experts=experts)
    given = ops.upload_weight(x)
    found = [ops.download(ops.experts(given, choice, *uploaded, first_expert=1, limit=limit)) for _ in range(2)]
    np.testing.assert_array_equal(*found)
    host, there = ops.download(given).astype(np.float32), np.where(ids >= 1, ids, -1)
    require_close(found[0], naive_experts(host, there, weights, *values, limit), ops)


@pytest.mark.gpu
def test_one_tile_gives_a_token_the_same_bits_in_any_batch(ops):
    """What `BatchInvariantCudaOps` makes its products of."""
    if ops.name == "cpu":
        pytest.skip("tiles are the GPU's")
    from openinfer_kernels.cuda.gemm.grouped_gemm import GroupedGemm
    from openinfer_kernels.cuda.moe.experts import Experts

    experts = Experts(ops.device, GroupedGemm(ops.device, tile_tokens=32))
    case = Case(ops, **SIZES[3])
    same = {"first_expert": 0, "limit": None, "shared": None}
    whole = ops.download(experts.experts(case.x, case.choice, case.gate_up, case.down, **same))
    some = [250, 3, 77]
    choice = ExpertChoice(ids=ops.upload(case.ids[some]), weights=ops.upload(case.weights[some]))
    few = experts.experts(case.x[some], choice, case.gate_up, case.down, **same)
    np.testing.assert_array_equal(ops.download(few), whole[some])

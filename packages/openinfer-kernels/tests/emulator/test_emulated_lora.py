"""Low-rank adapters as the CUDA kernels add them, emulated, against the CPU's operators."""

import ctypes
import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from openinfer_kernels import ArrayMismatchError
from openinfer_kernels.cpu import CpuOps

KERNELS = [f"lora_{name}_{groups}" for name in ("shrink", "expand", "expand_swiglu") for groups in (1, 4)]
CALLS = "".join(
    f'if (!strcmp(kind, "{kernel}")) return launch({kernel}, nullptr, given, bytes, blocks, threads);\n'
    for kernel in KERNELS
)
SOURCE = f"""#include "fibers.hpp"
#undef __shared__
#define __shared__ static
inline float __fdividef(float value, float by) {{ return value / by; }}
inline float __expf(float value) {{ return std::exp(value); }}
#include "lora/lora.cu"
#include "lora/shrink_halves.cu"
using namespace emulated;
extern "C" __attribute__((visibility("default"))) int run(
    const char* kind, const void* given, size_t bytes, int blocks, int threads) {{
  {CALLS}
  return kNoSuchKernel;
}}
extern "C" __attribute__((visibility("default"))) int run_halves(
    int groups, const Shrink* given, const ShrunkHalves* target, int blocks, int threads) {{
  const Shrink shrink = *given;
  const ShrunkHalves halves = *target;
  return run_grid(blocks, threads, [&] {{
    groups == 1 ? shrink_halves_1(shrink, halves) : shrink_halves_4(shrink, halves); }});
}}
extern "C" __attribute__((visibility("default"))) int run_copies(
    const WeightCopies* given, size_t bytes, int blocks, int copies, int threads) {{
  if (bytes != sizeof(WeightCopies)) return kOtherArguments;
  const WeightCopies all = *given;
  gridDim = {{blocks, copies, 1}};
  for (int copy = 0; copy < copies; copy++) {{
    const int outcome = run_grid(blocks, threads, [&] {{ blockIdx.y = copy, lora_place_weights(all); }});
    if (outcome != kDone) return outcome;
  }}
  return kDone;
}}
"""


class Kernel:
    """As `openinfer_kernels.cuda.common.launch.Kernel` is called."""

    def __init__(self, library: ctypes.CDLL, kind: str) -> None:
        self._run, self._halves, self._kind = library.run, library.run_halves, kind.encode()

    def __call__(self, grid: Any, block: Any, arguments: list[Any], *, overlap: bool, cluster: int = 1) -> None:
        assert cluster == 1, "clusters are not emulated"
        given, *more = arguments
        if more:
            groups = int(self._kind[-1:])
            assert self._halves(groups, ctypes.byref(given), ctypes.byref(*more), grid[0], block[0]) == 0
            return
        size = ctypes.c_size_t(ctypes.sizeof(given))
        assert self._run(self._kind, ctypes.byref(given), size, grid[0], block[0]) == 0


class Copying:
    """The kernel that places weights, as `Kernel` is called."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._run = library.run_copies
        self.copies: list[int] = []
        """Of each launch."""

    def __call__(self, grid: Any, block: Any, arguments: list[Any]) -> None:
        (given,) = arguments
        self.copies.append(grid[1])
        size = ctypes.c_size_t(ctypes.sizeof(given))
        assert self._run(ctypes.byref(given), size, grid[0], grid[1], block[0]) == 0


TILE_UNITS = 4
"""Of 16 rows, in the boxes of weights here."""


class Boxes:
    """In the place of `TensorMaps`: a map's words are the number of its box."""

    def __init__(self) -> None:
        self.boxes: list[Any] = []

    def of(self, box: Any) -> Any:
        from openinfer_kernels.cuda.common.tensor_maps import TensorMap

        self.boxes.append(box)
        made = TensorMap()
        made.words[0] = len(self.boxes) - 1
        return made


def copied(box: Any, at: tuple[int, ...]) -> np.ndarray:
    """What the copy engine brings of a map from these coordinates on: zeros beyond the array, on either side."""
    import ml_dtypes

    found = np.zeros(box.box[::-1], np.float32)
    for place in np.ndindex(*box.box):
        source = [first + i for first, i in zip(at, place, strict=True)]
        if all(0 <= i < size for i, size in zip(source, box.sizes, strict=True)):
            offset = 2 * source[0] + sum(i * stride for i, stride in zip(source[1:], box.strides_bytes, strict=True))
            bits = ctypes.c_uint16.from_address(box.address + offset).value
            found[place[::-1]] = np.array(bits, np.uint16).view(ml_dtypes.bfloat16)
    return found


class Products:
    """In the place of the kernels of products: NumPy, and what their maps bring, tile by tile as they ask for it."""

    def __init__(self, boxes: list[Any]) -> None:
        self._boxes = boxes

    def serves(self, x: Any, weight: Any) -> bool:
        return False

    def parts_partition(self, epilogue: Any, num_tokens: int, *shape: int, shrink_rows: int) -> None:
        """What A x is where it comes ahead of a product is tested here."""

    def adapted_partition(self, epilogue: Any, num_tokens: int, *shape: int, shrink_rows: int) -> Any:
        return (SimpleNamespace(columns=16 * TILE_UNITS, tokens=num_tokens), 1, 1), False

    def multiply_adapted(
        self, epilogue: Any, partition: Any, x: Any, weight: Any, out: Any, *, adapters: Any, shrink_tiles: int
    ) -> None:
        assert shrink_tiles == 0
        maps = adapters
        y = np.asarray(x, np.float32) @ np.asarray(weight, np.float32).T
        is_gated = str(epilogue) == "swiglu"
        half = len(weight) // 2
        for tile in range(-(-len(weight) // (16 * TILE_UNITS))):
            units = range(tile * TILE_UNITS, (tile + 1) * TILE_UNITS)
            strides = ((unit * 8, half + unit * 8) if is_gated else (unit * 16, unit * 16 + 8) for unit in units)
            rows = np.array([first + i for pair in strides for first in pair for i in range(8)])
            for piece in range(maps.pieces):
                for column in range(0, maps.columns, 64):
                    at = (column, 0, -piece if is_gated else 0, tile * TILE_UNITS - maps.starts[piece])
                    b = copied(self._boxes[maps.b[piece].words[0]], at).reshape(-1, 64)
                    for which in range(maps.halves):
                        place = ((piece * 2 + which) * maps.columns + column, 0)
                        y[:, rows] += copied(self._boxes[maps.shrunk.words[0]], place) @ b.T
        out[...] = CpuOps.swiglu(y) if is_gated else y


@pytest.fixture(scope="module")
def lora(compile_emulated: Any) -> Iterator[Any]:
    """`Lora` over arrays of NumPy."""
    library = ctypes.CDLL(str(compile_emulated("lora", SOURCE)))
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=np.ndarray, empty=filled))
        patch.setitem(sys.modules, "cuda.bindings.driver", MagicMock())
        arrays = importlib.import_module("openinfer_kernels.cuda.common.arrays")
        patch.setattr(arrays, "address", lambda array: array.ctypes.data)
        module = importlib.import_module("openinfer_kernels.cuda.lora.lora")
        device = SimpleNamespace(kernel=lambda stem, name: Kernel(library, name))
        made = module.Lora(device)
        made.invariant = module.Lora(device, divides=False)
        fused = importlib.import_module("openinfer_kernels.cuda.lora.adapted_gemm")
        boxes = Boxes()
        patch.setattr(fused, "TensorMaps", lambda: boxes)
        made.fused = fused.AdaptedGemm(device, Products(boxes.boxes), Products(boxes.boxes))
        memory = importlib.import_module("openinfer_kernels.cuda.common.memory")
        made.copying = Copying(library)
        made.memory = memory.Memory(SimpleNamespace(kernel=lambda stem, name: made.copying))
        yield made
    for name in set(sys.modules) - before:
        if name.startswith("openinfer_kernels.cuda"):
            del sys.modules[name]


def filled(shape: Any, dtype: Any) -> np.ndarray:
    """What no kernel writes is seen."""
    return np.full(shape, np.nan, dtype)


def product(
    rng: np.random.Generator, on_device: Any, *, inner: int, heights: tuple[int, ...], rank: int, num_tokens: int = 7
) -> Any:
    """x, y, A, B and starts of a product of some tokens and three slots."""
    draw = lambda *shape: on_device(rng.normal(0, 0.5, shape))  # noqa: E731
    starts = (0, *np.cumsum(heights).tolist())
    return (
        draw(num_tokens, inner),
        draw(num_tokens, starts[-1]),
        draw(3, len(heights), rank, inner),
        draw(3, starts[-1], rank),
        starts,
    )


def slots_of(num_tokens: int) -> np.ndarray:
    """Three slots and none, every one of them among any eight."""
    return np.resize(np.array([2, -1, 0, 0, -1, 1, 2], np.int32), num_tokens)


SLOTS = slots_of(7)
SHAPES = [
    {"inner": 96, "heights": (192, 64, 64), "rank": 8},
    {"inner": 37, "heights": (300,), "rank": 16},
    {"inner": 1064, "heights": (33, 290), "rank": 72},
    {"inner": 8, "heights": (1, 2, 3, 4), "rank": 8},
    {"inner": 1160, "heights": (48,), "rank": 24, "num_tokens": 45},
    {"inner": 40, "heights": (24, 40), "rank": 16, "num_tokens": 133},
]


def described(shape: dict[str, Any]) -> str:
    return f"{shape['heights']} of rank {shape['rank']} for {shape.get('num_tokens', 7)}"


@pytest.mark.parametrize("shape", SHAPES, ids=described)
def test_kernels_add_what_the_cpu_adds(lora: Any, on_device: Any, shape: Any) -> None:
    x, y, a, b, starts = product(np.random.default_rng(shape["rank"]), on_device, **shape)
    slots = slots_of(len(x))
    shrunk = lora.lora_shrink(x, a, slots)
    wide = [np.asarray(each, np.float32) for each in (x, y, a, b)]
    expected_shrunk = CpuOps.lora_shrink(wide[0], wide[2], slots)
    np.testing.assert_allclose(shrunk.sum(0), expected_shrunk[0], rtol=1e-4, atol=1e-3)
    expected, before = wide[1].copy(), y.copy()
    CpuOps.lora_expand(expected, shrunk, wide[3], slots, starts=starts)
    lora.lora_expand(y, shrunk, b, slots, starts=starts)
    np.testing.assert_allclose(np.asarray(y, np.float32), expected, rtol=2**-7, atol=1e-2)
    none = slots < 0
    assert (y[none] == before[none]).all()
    assert not shrunk[:, none].any()
    assert (y[~none] != before[~none]).mean() > 0.5


@pytest.mark.parametrize("num_tokens", [7, 45])
def test_gate_is_that_of_the_sum(lora: Any, on_device: Any, num_tokens: int) -> None:
    rng = np.random.default_rng(8)
    x, y, a, b, starts = product(rng, on_device, inner=64, heights=(200, 200), rank=16, num_tokens=num_tokens)
    slots = slots_of(num_tokens)
    shrunk = lora.lora_shrink(x, a, slots)
    gated = lora.lora_expand_swiglu(y.copy(), shrunk, b, slots, starts=starts)
    lora.lora_expand(y, shrunk, b, slots, starts=starts)
    expected = CpuOps.swiglu(np.asarray(y, np.float32))
    np.testing.assert_allclose(np.asarray(gated, np.float32), expected, rtol=2**-7, atol=1e-6)


# Of A's of 24 and 72 rows, that no copy brings 16 at a time: test_emulated_adapted_products.py has the others.
FUSED = [
    {"inner": 128, "heights": (80, 16, 32), "rank": 8},
    {"inner": 640, "heights": (192,), "rank": 8},
    {"inner": 128, "heights": (192,), "rank": 40, "num_tokens": 33},
]


@pytest.mark.parametrize("shape", FUSED, ids=described)
def test_product_with_adapters_in_it_is_that_of_the_sum(lora: Any, on_device: Any, shape: Any) -> None:
    """The sums in halves and the maps of B, as a product's copies find them."""
    rng = np.random.default_rng(shape["rank"])
    x, _, a, b, starts = product(rng, on_device, **shape)
    num_slots = 1 if shape["rank"] == 40 else 3
    a, b, slots = a[:num_slots], b[:num_slots], slots_of(len(x)) % num_slots
    slots = np.where(slots_of(len(x)) < 0, -1, slots).astype(np.int32)
    weight = on_device(rng.normal(0, 0.5, (starts[-1], shape["inner"])))
    width = lora.fused.columns(weight, num_slots=num_slots, rank=shape["rank"], starts=starts)
    if shape["rank"] == 40:
        assert not width, "320 columns are too many"
        return
    columns = on_device(np.zeros((starts[-1], width)))
    columns.reshape(starts[-1], -1, shape["rank"])[:, :num_slots] = b.transpose(1, 0, 2)
    wide = [np.asarray(each, np.float32) for each in (x, weight, a, b)]
    expected = wide[0] @ wide[1].T
    CpuOps.lora_expand(expected, CpuOps.lora_shrink(wide[0], wide[2], slots), wide[3], slots, starts=starts)
    found = lora.fused.linear(x, weight, a, columns, slots, starts=starts)
    np.testing.assert_allclose(np.asarray(found, np.float32), expected, rtol=2**-7, atol=2e-2)
    plain = wide[0] @ wide[1].T
    assert (np.abs(expected - plain)[slots >= 0].mean(axis=1) > 0.5).all()
    # Where the view of slots is, kernels of their own find the same.
    view = columns.reshape(starts[-1], -1, shape["rank"])[:, :num_slots].transpose(1, 0, 2)
    y = on_device(plain)
    lora.lora_expand(y, lora.lora_shrink(x, a, slots), view, slots, starts=starts)
    np.testing.assert_allclose(np.asarray(y, np.float32), expected, rtol=2**-6, atol=5e-2)


def test_rank_is_summed_in_float32(lora: Any, on_device: Any) -> None:
    """What a rounded sum over A would lose: terms of B that cancel."""
    ones = on_device(np.ones((1, 8)))
    a = np.zeros((1, 1, 8, 8))
    a[0, 0, :2, 0], a[0, 0, 1, 1] = 1, 2**-9
    b = np.zeros((1, 16, 8))
    b[..., 0], b[..., 1] = -1, 1
    y = on_device(np.zeros((1, 16)))
    slots = np.zeros(1, np.int32)
    lora.lora_expand(y, lora.lora_shrink(ones, on_device(a), slots), on_device(b), slots, starts=(0, 16))
    assert (np.asarray(y, np.float32) == 2**-9).all()


@pytest.mark.parametrize("num_tokens", [7, 45])
def test_token_is_the_same_alone_and_among_others(lora: Any, on_device: Any, num_tokens: int) -> None:
    rng = np.random.default_rng(3)
    lora = lora.invariant
    x, y, a, b, starts = product(rng, on_device, inner=1400, heights=(40, 8), rank=16, num_tokens=num_tokens)
    slots = slots_of(num_tokens)
    together = y.copy()
    lora.lora_expand(together, lora.lora_shrink(x, a, slots), b, slots, starts=starts)
    for token in (0, 2, 3, 5, num_tokens - 1):
        alone, own = on_device(np.asarray(y[token : token + 1])), slots[token : token + 1].copy()
        lora.lora_expand(alone, lora.lora_shrink(on_device(x[token : token + 1]), a, own), b, own, starts=starts)
        assert alone.tobytes() == together[token].tobytes()


def test_rows_of_no_piece_stay(lora: Any, on_device: Any) -> None:
    x, y, a, b, _ = product(np.random.default_rng(4), on_device, inner=16, heights=(20, 20), rank=8)
    before = y.copy()
    lora.lora_expand(y, lora.lora_shrink(x, a, SLOTS), b, SLOTS, starts=(4, 20, 31))
    assert (y[:, :4] == before[:, :4]).all()
    assert (y[:, 31:] == before[:, 31:]).all()
    assert (y[0, 4:31] != before[0, 4:31]).any()


def test_slot_beyond_the_arena_changes_nothing(lora: Any, on_device: Any) -> None:
    x, y, a, b, starts = product(np.random.default_rng(5), on_device, inner=16, heights=(8,), rank=8)
    slots, before = np.full(7, 3, np.int32), y.copy()
    lora.lora_expand(y, lora.lora_shrink(x, a, slots), b, slots, starts=starts)
    assert (y == before).all()


@pytest.mark.parametrize("starts", [(0, 8, 4), (0, 8), (-1, 4, 8), (0, 4, 9)])
def test_other_pieces_are_refused(lora: Any, on_device: Any, starts: Any) -> None:
    x, y, a, b, _ = product(np.random.default_rng(6), on_device, inner=16, heights=(4, 4), rank=8)
    with pytest.raises(ArrayMismatchError, match="are not those of 2 pieces"):
        lora.lora_expand(y, lora.lora_shrink(x, a, SLOTS), b, SLOTS, starts=starts)


def test_weights_are_placed_in_rows_that_lie_apart_and_in_whole_arrays(lora: Any) -> None:
    """More copies than a launch has, of other sizes each, and zeros where there is none."""
    rng = np.random.default_rng(3)
    draw = lambda *shape: rng.integers(1, 1 << 16, shape, dtype=np.uint16)  # noqa: E731
    copies, expected = [], []
    for number in range(70):
        whole, wide = draw(3, 8, 40 + 8 * number), draw(5 + 40 * number, 64)
        apart = wide[:, 16:32]
        sources = (None, None) if number == 7 else (draw(*whole.shape), draw(*apart.shape))
        copies += zip(sources, (whole, apart), strict=True)
        kept = wide.copy()
        kept[:, 16:32] = 0 if sources[1] is None else sources[1]
        expected += [(whole, 0 if sources[0] is None else sources[0]), (wide, kept)]
    lora.memory.copy_weights(copies)
    assert lora.copying.copies == [64, 64, 12]
    for array, wanted in expected:
        assert (array == wanted).all()


def test_weights_are_placed_times_their_scales_rounded_once(lora: Any, on_device: Any) -> None:
    rng = np.random.default_rng(4)
    sources = [on_device(rng.normal(size=(5, 16))) for _ in range(4)]
    targets, scales = [on_device(np.zeros((5, 16))) for _ in range(4)], (1.0, 0.3, 2.0, -7.7)
    lora.memory.copy_weights([*zip(sources[:3], targets[:3], strict=True), (None, targets[3])], scales=scales)
    for source, target, scale in zip(sources[:3], targets[:3], scales[:3], strict=True):
        expected = (np.asarray(source, np.float32) * np.float32(scale)).astype(target.dtype)
        assert target.tobytes() == expected.tobytes()
    assert not targets[3].astype(np.float32).any()

"""Products of low-bit matrices as the CUDA kernels compute them, clusters and all, emulated, against float64.

Codes are put into tiles here, by the words of `csrc/lowbit/lowbit_tiles.cuh`, not by the code that does so on a GPU.
"""

import ctypes
import dataclasses
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import numpy as np
import pytest

from openinfer_kernels import WeightValueError
from openinfer_kernels.weights.code_values import E2M1_VALUES, E4M3_VALUES
from openinfer_kernels.weights.gpu_kernels import tiles_kernels
from openinfer_kernels.weights.quantised import Code, QuantisedPart, ScaleType, WeightFormat

CLUSTERS = {1: 6, 2: 3, 3: 2, 4: 1, 5: 1}
"""A small GPU of six multiprocessors: clusters that run at a time, by their blocks."""
SIZES = {
    8: ("sums", "e4m3", "weights"),
    16: ("sums", "e4m3", "weights"),
    64: ("sums",),
    128: ("weights",),
    192: ("weights",),
    256: ("weights",),
}
"""Tokens of a tile, and what is scaled; others are as these."""
KERNELS = [
    f"lowbit_gemm_{code}_{epilogue}_{scaling}_{tokens}"
    for code in ("fp8", "int4")
    for epilogue in ("store", "swiglu")
    for tokens, scalings in SIZES.items()
    for scaling in scalings
] + [
    f"lowbit_gemm_int4_{epilogue}_{scaling}"
    for epilogue in ("store", "swiglu")
    for scaling in ("e4m3groups_8", "e4m3groups_16", *(f"bf16groups_{tokens}" for tokens in SIZES), "woven_128")
]
BODIES = {
    ("lowbit/lowbit_tiles.cuh", "uint32_t and_or("): "return (a & b) | c;",
    ("lowbit/lowbit_gemm.cuh", "void load_bulk("): "memcpy(target, from, bytes); hopper::complete(barrier, bytes);",
    ("lowbit/lowbit_gemm.cuh", "uint32_t transposed("): "return emulated::transposed(matrix);",
}
NAMED_BARRIER = re.compile(r'asm volatile\("bar\.sync (\d), %0;" ::"n"\((\S+?)\) : "memory"\);')
SHARED = "extern __shared__ __align__(kAlignment) uint8_t raw[];"


class Kernel:
    """As `openinfer_kernels.cuda.common.launch.Kernel` is called."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self._run, self._name = library.run, name

    def __call__(self, grid: Any, block: Any, arguments: list[Any], *, overlap: bool, cluster: int) -> None:
        given_map, problem = arguments
        sizes = ctypes.c_size_t(ctypes.sizeof(problem)), grid[0], cluster, block[0]
        outcome = self._run(self._name.encode(), ctypes.byref(given_map), ctypes.byref(problem), *sizes)
        assert outcome == 0, (self._name, outcome)

    def most_clusters(self, blocks: int, *, threads: int) -> int:
        return CLUSTERS.get(blocks, 0)


def kernel_of(family: str, code: str, epilogue: str, scaling: str, tokens: str) -> str:
    """Its line, as the sources of all kernels of a code have it."""
    kind = scaling.capitalize().replace("groups", "Groups")
    names = f"k{kind}, {scaling}, k{epilogue.capitalize()}, {epilogue}"
    return f"LOWBIT_{family.upper()}({code.title().replace('_', '')}, {code}, {tokens}, {names})"


def parts_of(name: str) -> list[str]:
    """`gemm` or `experts`; code, epilogue, scaling, tokens."""
    family, rest = name.removeprefix("lowbit_").split("_", 1)
    return [family, *rest.rsplit("_", 3)]


def source_of(names: list[str]) -> str:
    """A library that runs these kernels."""
    problems = ["lowbit::Problem" + ("WithFactors" if "_nvfp4_" in name else "") for name in names]
    calls = "".join(f"  OPENINFER_RUN({name}, {each})\n" for name, each in zip(names, problems, strict=True))
    kernels = "".join(f"{kernel_of(*parts_of(name))}\n" for name in names)
    return f"""#include "bfloat16.hpp"
#include "clusters.hpp"
#include "lowbit/lowbit_gemm.cuh"
{kernels}using namespace emulated;
#define OPENINFER_RUN(NAME, PROBLEM) \\
  if (!strcmp(kind, #NAME)) {{ \\
    if (bytes != sizeof(PROBLEM)) return kOtherArguments; \\
    const auto* given = static_cast<const PROBLEM*>(problem); \\
    return run_clusters(blocks, cluster, threads, [=] {{ NAME(*map, *given); }}); \\
  }}
extern "C" __attribute__((visibility("default"))) int run(
    const char* kind, const CUtensorMap* map, const void* problem, size_t bytes, int blocks, int cluster,
    int threads) {{
{calls}  return kNoSuchKernel;
}}
"""


@pytest.fixture(scope="module")
def make_library(tmp_path_factory: pytest.TempPathFactory, emulation: Any) -> Callable[..., ctypes.CDLL]:
    """Of kernels; `mistake` is a text of their source and what stands in its place."""

    def make(names: list[str], mistake: tuple[str, str] | None = None) -> ctypes.CDLL:
        folder = emulation.sources(tmp_path_factory)
        for name in ("common/hopper.cuh", "lowbit/wgmma_registers.cuh"):
            text = (emulation.here / "cluster_hopper.cuh").read_text("utf-8")
            (folder / "csrc" / name).write_text(text, "utf-8")
        for name in ("cuda_fp16.h", "cuda_bf16.h"):
            (folder / name).write_text('#include "bfloat16.hpp"\n', "utf-8")
        for (name, function), body in BODIES.items():
            path = folder / "csrc" / name
            path.write_text(emulation.with_body(path.read_text("utf-8"), function, body), "utf-8")
        path = folder / "csrc/lowbit/lowbit_gemm.cuh"
        text = NAMED_BARRIER.sub(r"emulated::barriers[\1].sync(\2);", path.read_text("utf-8"))
        assert text.count(SHARED) == 1
        path.write_text(text.replace(SHARED, "uint8_t* raw = emulated::shared_memory();"), "utf-8")
        if mistake:
            old, new = mistake
            headers = [folder / "csrc/lowbit" / name for name in ("lowbit_gemm.cuh", "lowbit_tiles.cuh")]
            (path,) = [each for each in headers if old in each.read_text("utf-8")]
            text = path.read_text("utf-8")
            assert text.count(old) == 1, old
            path.write_text(text.replace(old, new), "utf-8")
        return ctypes.CDLL(str(emulation.build(folder, "lowbit", source_of(names))))

    return make


@pytest.fixture(scope="module")
def library(make_library: Callable[..., ctypes.CDLL]) -> ctypes.CDLL:
    return make_library(KERNELS)


@pytest.fixture(scope="module")
def modules(emulation: Any) -> Iterator[SimpleNamespace]:
    """Those of the product, over arrays of NumPy."""

    class TensorMaps:
        """`CUtensorMap` of `cuda.hpp`: address, columns, rows, rows of a box; or all that is said of four axes."""

        def of(self, tensor: Any) -> Any:
            assert tensor.box[0] == 64
            if len(tensor.sizes) == 4:
                return emulation.tensor_map((tensor.address, *tensor.sizes, *tensor.strides_bytes, *tensor.box))
            return emulation.tensor_map((tensor.address, *tensor.sizes, tensor.box[1]))

    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=np.ndarray))
        patch.setitem(sys.modules, "cuda.bindings.driver", MagicMock())
        arrays = importlib.import_module("openinfer_kernels.cuda.common.arrays")
        maps = importlib.import_module("openinfer_kernels.cuda.common.tensor_maps")
        patch.setattr(arrays, "address", lambda array: array.ctypes.data)
        patch.setattr(maps, "TensorMaps", TensorMaps)
        yield SimpleNamespace(
            gemm=importlib.import_module("openinfer_kernels.cuda.lowbit.lowbit_gemm"),
            scaling=importlib.import_module("openinfer_kernels.cuda.lowbit.lowbit_gemm").Scaling,
            tiles=importlib.import_module("openinfer_kernels.cuda.lowbit.lowbit_tiles"),
            epilogue=importlib.import_module("openinfer_kernels.cuda.gemm.tiles").Epilogue,
            experts=importlib.import_module("openinfer_kernels.cuda.lowbit.lowbit_experts"),
            grouped=importlib.import_module("openinfer_kernels.cuda.gemm.grouped_gemm"),
        )
    for name in set(sys.modules) - before:
        if name.startswith("openinfer_kernels.cuda"):
            del sys.modules[name]


class Device:
    """As much of one as the product asks for."""

    num_multiprocessors = CLUSTERS[1]

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def kernel(self, stem: str, name: str, *, shared_bytes: int) -> Kernel:
        assert shared_bytes <= 227 * 1024
        return Kernel(self._library, name)


class Matrix(NamedTuple):
    """In tiles, and what it stands for in float64."""

    tiled: Any
    values: np.ndarray


def in_tiles(codes: np.ndarray, code: str) -> np.ndarray:
    """`[tiles, chunks, bytes]` of codes `[rows, columns]`, one a byte; zeros where there are none."""
    rows, columns = codes.shape
    bits = 8 if code in ("fp8", "int8") else 4
    tiles = np.zeros((-(-rows // 64) * 2, -(-columns // 128), 32 * 128 * bits // 8), np.uint8)
    r, c = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    tile, row, step = r // 64 * 2 + r // 8 % 2, r // 16 % 4 * 8 + r % 8, c % 128 // 16
    thread, half = row * 4 + c % 8 // 2, c // 8 % 2
    if bits == 8:
        order = np.array([1, 3, 0, 2] if code == "fp8" else [0, 1, 2, 3])
        at = step // 4 * 2048 + thread * 16 + step % 4 * 4 + order[c % 2 + 2 * half]
        tiles[tile, c // 128, at] = codes
    else:
        at = (thread * 4 + step // 2) * 4 + step % 2 + 2 * (c % 2)
        np.add.at(tiles, (tile, c // 128, at), (codes << (4 * half)).astype(np.uint8))
    return tiles


def of_tiles(values: np.ndarray, num_tiles: int) -> np.ndarray:
    """`[tiles, chunks, groups, 32 rows]` of values `[rows, chunks, groups]`."""
    rows, chunks, groups = values.shape
    out = np.zeros((num_tiles, chunks, groups, 32), values.dtype)
    r = np.arange(rows)
    out[r // 64 * 2 + r // 8 % 2, :, :, r // 16 % 4 * 8 + r % 8] = values
    return out


def fp8_matrix(modules: Any, rows: int, columns: int, scale_type: ScaleType = ScaleType.F32) -> Matrix:
    """E4M3 in blocks of 64 x 128."""
    rng = np.random.default_rng(rows)
    codes = rng.integers(0, 256, (rows, columns), dtype=np.uint8)
    codes = np.where(codes & 0x7F == 0x7F, codes & 0x3F, codes)
    scales = rng.uniform(1e-4, 1e-3, (-(-rows // 64), -(-columns // 128))).astype(np.float32)
    if scale_type is ScaleType.BF16:
        scales = (scales.view(np.uint32) & 0xFFFF0000).view(np.float32)
    tiles = in_tiles(codes, "fp8")
    end = np.zeros((*tiles.shape[:2], 16), np.uint8)
    end[..., :4] = np.repeat(scales, 2, axis=0)[..., None].view(np.uint8)
    made = WeightFormat(code=Code.E4M3, group_rows=64, group_columns=128, scales=scale_type)
    spread = np.repeat(np.repeat(scales, 64, axis=0)[:rows], 128, axis=1)[:, :columns]
    values = E4M3_VALUES[codes].astype(np.float64) * spread
    return Matrix(tiled(modules, made, (rows, columns), np.concatenate([tiles, end], axis=2), (64, 128)), values)


def int4_matrix(modules: Any, rows: int, columns: int, *, group: int, minimums: bool = False) -> Matrix:
    """Float16 scales and zero points, as AWQ and GPTQ have them, or minimums, as GGUF has."""
    rng = np.random.default_rng(rows + group)
    chunks, groups = -(-columns // 128), 128 // group
    codes = rng.integers(0, 16, (rows, columns), dtype=np.uint8)
    scales = rng.uniform(5e-3, 2e-2, (rows, chunks, groups)).astype(np.float16)
    zeros = rng.integers(0, 16, (rows, chunks, groups))
    tiles = in_tiles(codes, "int4")
    middle = rng.normal(size=zeros.shape).astype(np.float32).view(np.uint32) >> 16 << 16  # in BF16
    stored = middle if minimums else (zeros + 128).astype(np.float32).view(np.uint32)
    middles = (stored >> 16).astype(np.uint16)
    parts = [of_tiles(part, len(tiles)).reshape(*tiles.shape[:2], -1).view(np.uint8) for part in (scales, middles)]
    made = WeightFormat(
        code=Code.INT4,
        group_rows=1,
        group_columns=group,
        scales=ScaleType.F16,
        zero_points=not minimums,
        minimums=minimums,
    )
    of_columns = [np.repeat(each.reshape(rows, -1), group, axis=1)[:, :columns] for each in (zeros, scales)]
    values = (codes.astype(np.float64) - (8 if minimums else of_columns[0])) * of_columns[1].astype(np.float64)
    if minimums:
        values += np.repeat(middle.view(np.float32).reshape(rows, -1), group, axis=1)[:, :columns]
    whole = np.concatenate([tiles, *parts], axis=2)
    return Matrix(tiled(modules, made, (rows, columns), whole, (1, group)), values)


def symmetric_matrix(modules: Any, rows: int, columns: int, *, group: int) -> Matrix:
    """Four bits with BF16 scales and no zero points, as compressed-tensors has them."""
    rng, chunks, groups = np.random.default_rng(rows + group), -(-columns // 128), 128 // group
    codes = rng.integers(0, 16, (rows, columns), dtype=np.uint8)
    bits = rng.uniform(5e-3, 2e-2, (rows, chunks, groups)).astype(np.float32).view(np.uint32) & 0xFFFF0000
    tiles = in_tiles(codes, "int4")
    end = of_tiles((bits >> 16).astype(np.uint16), len(tiles)).reshape(*tiles.shape[:2], -1).view(np.uint8)
    made = WeightFormat(code=Code.INT4, group_rows=1, group_columns=group, scales=ScaleType.BF16)
    spread = np.repeat(bits.view(np.float32).reshape(rows, -1), group, axis=1)[:, :columns]
    whole = np.concatenate([tiles, end], axis=2)
    given = tiled(modules, made, (rows, columns), whole, (1, group), zeros=0, float16_scales=False)
    return Matrix(given, (codes.astype(np.float64) - 8) * spread)


def int8_matrix(modules: Any, rows: int, columns: int, *, zero_points: bool = False) -> Matrix:
    """Scales for each row and 128 columns that are BF16 numbers, as compressed-tensors has them."""
    rng, chunks = np.random.default_rng(rows), -(-columns // 128)
    codes = rng.integers(0, 256, (rows, columns), dtype=np.uint8)
    codes[:, :256] = np.arange(256)  # every code
    bits = rng.uniform(1e-4, 1e-3, (rows, chunks, 1)).astype(np.float32).view(np.uint32) & 0xFFFF0000
    scales = bits.view(np.float32)
    zeros = rng.integers(100, 160, (rows, chunks, 1)) if zero_points else np.full((rows, chunks, 1), 128)
    tiles = in_tiles(codes, "int8")
    stored = (scales, zeros.astype(np.float16)) if zero_points else (scales,)
    ends = [of_tiles(each, len(tiles)).reshape(*tiles.shape[:2], -1).view(np.uint8) for each in stored]
    made = WeightFormat(code=Code.INT8, group_rows=1, group_columns=128, scales=ScaleType.BF16, zero_points=zero_points)
    spread, less = (np.repeat(each.reshape(rows, -1), 128, axis=1)[:, :columns] for each in (scales, zeros))
    values = (codes.astype(np.float64) - less) * spread
    whole = np.concatenate([tiles, *ends], axis=2)
    zeros_at = 4096 + 128 if zero_points else 0
    return Matrix(tiled(modules, made, (rows, columns), whole, (1, 128), zeros=zeros_at), values)


def fp4_matrix(modules: Any, rows: int, columns: int) -> Matrix:
    """E2M1 with a power of two for each 32 columns, which tiles hold in BF16."""
    rng, chunks = np.random.default_rng(rows), -(-columns // 128)
    codes = rng.integers(0, 16, (rows, columns), dtype=np.uint8)
    exponents = rng.integers(-9, -3, (rows, chunks, 4))
    scales = ((exponents + 127) << 7).astype(np.uint16)
    tiles = in_tiles(codes, "fp4")
    end = of_tiles(scales, len(tiles)).reshape(*tiles.shape[:2], -1).view(np.uint8)
    made = WeightFormat(code=Code.E2M1, group_rows=1, group_columns=32, scales=ScaleType.E8M0)
    spread = np.repeat(np.ldexp(1.0, exponents).reshape(rows, -1), 32, axis=1)[:, :columns]
    whole = np.concatenate([tiles, end], axis=2)
    return Matrix(tiled(modules, made, (rows, columns), whole, (1, 32)), E2M1_VALUES[codes] * spread)


def nvfp4_matrix(modules: Any, rows: int, columns: int) -> Matrix:
    """E2M1 with a number of E4M3 for each 16 columns, and two scales of the matrix, of some rows and of the others."""
    rng, chunks = np.random.default_rng(rows), -(-columns // 128)
    codes = rng.integers(0, 16, (rows, columns), dtype=np.uint8)
    scales = rng.integers(0, 256, (rows, chunks, 8), dtype=np.uint8)
    scales = E4M3_VALUES[np.where(scales & 0x7F == 0x7F, 0x7E, scales)]
    scales[:, :, 3] = 0
    scales[1:2, :, 2] = 2.0**-9  # the smallest
    first = rows // 32 * 16 + 8  # between the two rows of a thread, too
    wholes = np.repeat(np.array([3e-5, 1e-3], np.float32), [first, rows - first])
    tiles = in_tiles(codes, "nvfp4")
    stored = ((scales * np.float32(2.0**64)).view(np.uint32) >> 16).astype(np.uint16)
    end = of_tiles(stored, len(tiles)).reshape(*tiles.shape[:2], -1).view(np.uint8)
    made = WeightFormat(code=Code.E2M1, group_rows=1, group_columns=16, scales=ScaleType.E4M3, global_scale=True)
    spread = np.repeat(scales.astype(np.float64).reshape(rows, -1), 16, axis=1)[:, :columns]
    whole = np.concatenate([tiles, end], axis=2)
    tiled_one = tiled(modules, made, (rows, columns), whole, (1, 16), factors=wholes * np.float32(2.0**62))
    return Matrix(tiled_one, E2M1_VALUES[codes] * spread * wholes[:, None].astype(np.float64))


def tiled(
    modules: Any, made: WeightFormat, shape: tuple[int, int], tiles: np.ndarray, block: tuple[int, int], **more: Any
) -> Any:
    is_int4 = made.code is Code.INT4
    given = {
        "kernels": tiles_kernels(made),
        "scale_rows": 1 if made.code is Code.E4M3 else 32,
        "zeros": 2048 + 64 * 128 // block[1] if is_int4 else 0,
        "float16_scales": is_int4,
    }
    return modules.tiles.TiledWeight(
        format=made,
        shape=shape,
        codes=np.ascontiguousarray(tiles),
        scales=tiles,
        block_rows=block[0],
        block_columns=block[1],
        groups=128 // block[1],
        **(given | more),
    )


def expected(x: np.ndarray, values: np.ndarray, *, gates: bool) -> np.ndarray:
    y = x.astype(np.float64) @ values.T
    if not gates:
        return y
    gate, up = (half.astype(x.dtype).astype(np.float64) for half in np.split(y, 2, axis=1))
    return gate / (1 + np.exp(-gate)) * up


def check(gemm: Any, modules: Any, matrix: Matrix, x: np.ndarray, *, gates: bool, **how: Any) -> None:
    """Twice the same bits, all of them written, and near float64."""
    epilogue = modules.epilogue.SWIGLU if gates else modules.epilogue.STORE
    wanted, found = expected(x, matrix.values, gates=gates), []
    for _ in range(2):
        out = np.full(wanted.shape, np.nan, x.dtype)
        gemm.multiply(x, matrix.tiled, out, epilogue=epilogue, **how)
        found.append(out)
    assert (found[0].view(np.uint16) == found[1].view(np.uint16)).all()
    error = np.linalg.norm(found[0].astype(np.float64) - wanted) / np.linalg.norm(wanted)
    assert error < (1.5e-2 if gates else 4e-3), error
    largest = np.abs(wanted).max()
    np.testing.assert_allclose(found[0].astype(np.float64), wanted, atol=2e-2 * largest)


def gemm_of(modules: Any, library: ctypes.CDLL, code: str) -> Any:
    gemm = modules.gemm.LowbitGemm(Device(library))
    gemm.load(code)
    return gemm


@pytest.mark.parametrize(
    ("num_tokens", "gates"),
    [
        (1, False),
        (7, True),
        (11, False),
        (11, True),
        (60, False),
        (100, True),
        (150, False),
        (150, True),
        (200, False),
        (300, False),
        (300, True),
    ],
)
@pytest.mark.parametrize("code", ["fp8", "int4"])
def test_every_partition_is_right_and_the_same_twice(modules, library, on_device, code, num_tokens, gates):
    # So many rows that some tiles are left over. The last tile of 128 rows has 64, but for a gate, whose halves are
    # multiples of 64; the last chunk of columns is not whole.
    shape = (1024 if num_tokens <= 256 else 512) - (0 if gates else 64), 352
    matrix = fp8_matrix(modules, *shape) if code == "fp8" else int4_matrix(modules, *shape, group=128)
    gemm = gemm_of(modules, library, code)
    x = on_device(np.random.default_rng(num_tokens).standard_normal((num_tokens, shape[1])))
    found = [each for each in gemm.partitions_of(num_tokens, matrix.tiled) if each.size.tokens in SIZES]
    for partition in found:
        woven = ("woven",) if code == "int4" and partition.size.tokens == 128 else ()
        for scaling in (*SIZES[partition.size.tokens], *woven):
            check(gemm, modules, matrix, x, gates=gates, partition=partition, scaling=modules.scaling(scaling))
    ways = {(each.splits > 1, each.multicast_ctas > 1, each.whole_tiles > 0) for each in found}
    if num_tokens > 256:
        assert {(False, True, False), (True, True, True)} <= ways
    elif num_tokens > 128:
        assert {(True, False, True), (False, False, False)} <= ways


@pytest.mark.parametrize("code", ["fp8", "int4"])
def test_few_tokens_may_have_five_splits(modules, library, on_device, code):
    matrix = fp8_matrix(modules, 64, 1000) if code == "fp8" else int4_matrix(modules, 64, 1000, group=128)
    gemm = gemm_of(modules, library, code)
    x = on_device(np.random.default_rng(5).standard_normal((3, 1000)))
    found = gemm.partitions_of(3, matrix.tiled)
    assert {1, 4, 5} <= {each.splits for each in found}
    for partition in found:
        for scaling in SIZES[8]:
            check(gemm, modules, matrix, x, gates=False, partition=partition, scaling=modules.scaling(scaling))


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("num_tokens", [1, 5, 11, 140])
def test_groups_within_a_tile_have_scales_of_their_own(modules, library, on_device, num_tokens, group):
    matrix = int4_matrix(modules, 192, 288, group=group)
    x = on_device(np.random.default_rng(group).standard_normal((num_tokens, 288)))
    gemm = gemm_of(modules, library, "int4")
    for partition in gemm.partitions_of(num_tokens, matrix.tiled):
        for scaling in gemm.scalings_of(matrix.tiled, partition.size) if partition.size.tokens in SIZES else ():
            check(gemm, modules, matrix, x, gates=False, partition=partition, scaling=scaling)


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize(
    ("num_tokens", "gates"), [(1, True), (5, False), (11, False), (60, True), (100, False), (140, True)]
)
def test_groups_with_bf16_scales_have_kernels_of_their_own(modules, library, on_device, num_tokens, gates, group):
    matrix = symmetric_matrix(modules, 256 if gates else 192, 288, group=group)
    x = on_device(np.random.default_rng(group).standard_normal((num_tokens, 288)))
    gemm, own = gemm_of(modules, library, "int4"), modules.scaling.BF16_GROUPS
    found = [each for each in gemm.partitions_of(num_tokens, matrix.tiled) if each.size.tokens in SIZES]
    assert found
    for partition in found:
        assert gemm.scalings_of(matrix.tiled, partition.size)[0] is own
        check(gemm, modules, matrix, x, gates=gates, partition=partition, scaling=own)


def test_groups_with_zero_points_or_float16_scales_do_not(modules, library):
    gemm, symmetric = gemm_of(modules, library, "int4"), symmetric_matrix(modules, 64, 128, group=32)
    others = [
        int4_matrix(modules, 64, 128, group=32),
        told(int4_matrix(modules, 64, 128, group=32), ScaleType.BF16),
        told(symmetric, ScaleType.F16),
        symmetric_matrix(modules, 64, 128, group=128),
    ]
    for size in modules.gemm.SIZES:
        assert modules.scaling.BF16_GROUPS in gemm.scalings_of(symmetric.tiled, size)
        for other in others:
            assert modules.scaling.BF16_GROUPS not in gemm.scalings_of(other.tiled, size)


@pytest.mark.parametrize(
    "mistake",
    [
        ("own(rows, p.scales, (box * kStepsOfBox + first)", "own(rows, p.scales, (box * kStepsOfBox)"),
        ("rows.template stored_scale<uint16_t>(s, 1, group)", "rows.template stored_scale<uint16_t>(s, 0, group)"),
        ("zeros[0] = zeros[1] = Format::zero(Format::kNoZeros);", "zeros[0] = zeros[1] = Format::zero(0x4307);"),
    ],
    ids=["scales of the box's first columns", "scales of the lower row", "a zero point one too low"],
)
def test_mistakes_in_groups_with_bf16_scales_are_noticed(modules, make_library, on_device, mistake):
    gemm = gemm_of(modules, make_library(["lowbit_gemm_int4_store_bf16groups_64"], mistake), "int4")
    matrix = symmetric_matrix(modules, 192, 288, group=32)
    x = on_device(np.random.default_rng(5).standard_normal((60, 288)))
    partition = gemm.partition_of(60, matrix.tiled)
    with pytest.raises(AssertionError):
        check(gemm, modules, matrix, x, gates=False, partition=partition)


@pytest.mark.parametrize("columns", [320, 640])
@pytest.mark.parametrize("num_tokens", [1, 7, 11, 60])
@pytest.mark.parametrize("code", ["fp8", "int4"])
def test_slots_of_activations_are_copied_at_once(modules, library, on_device, code, num_tokens, columns):
    """Where columns are whole boxes: with a chunk of one box, too, and slots that end in columns of another split."""
    matrix = fp8_matrix(modules, 192, columns) if code == "fp8" else int4_matrix(modules, 192, columns, group=128)
    gemm = gemm_of(modules, library, code)
    x = on_device(np.random.default_rng(num_tokens).standard_normal((num_tokens, columns)))
    for partition in gemm.partitions_of(num_tokens, matrix.tiled):
        box, is_whole = modules.gemm.box_of_tokens(x, partition.size)
        assert is_whole
        assert box.box == (64, partition.size.tokens, partition.size.boxes, 1)
        for scaling in gemm.scalings_of(matrix.tiled, partition.size):
            if scaling in SIZES.get(partition.size.tokens, ()):
                check(gemm, modules, matrix, x, gates=False, partition=partition, scaling=scaling)


@pytest.mark.parametrize(
    "mistake",
    [
        ("int box = piece.first_chunk * kBoxesOfTile;", "int box = 0;"),
        ("        box += S::kBoxes;\n", ""),
    ],
    ids=["columns of the first split", "the same columns each time"],
)
def test_mistakes_in_slots_that_are_copied_at_once_are_noticed(modules, make_library, on_device, mistake):
    gemm = gemm_of(modules, make_library(["lowbit_gemm_int4_store_sums_8"], mistake), "int4")
    matrix = int4_matrix(modules, 192, 640, group=128)
    x = on_device(np.random.default_rng(5).standard_normal((5, 640)))
    found = gemm.partitions_of(5, matrix.tiled)
    (partition, *_) = [each for each in found if each.splits == 2 and not each.whole_tiles]
    with pytest.raises(AssertionError):
        check(gemm, modules, matrix, x, gates=False, partition=partition, scaling=modules.scaling.SUMS)


WEIGHTS_SIZES = (8, 64, 128, 256)
"""Tokens of a tile of kernels that scale weights."""


@pytest.fixture(scope="module")
def int8_library(make_library: Callable[..., ctypes.CDLL]) -> ctypes.CDLL:
    weights = [f"lowbit_gemm_int8_store_weights_{tokens}" for tokens in WEIGHTS_SIZES]
    return make_library([*weights, "lowbit_gemm_int8_store_sums_8", "lowbit_gemm_int8_store_sums_64"])


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("num_tokens", [3, 60, 100, 200])
def test_every_code_of_int8_is_multiplied(modules, int8_library, on_device, num_tokens, zero_points):
    """Where 128 is subtracted in BF16, of more tokens than 64 if scales are BF16 numbers, else in float32."""
    matrix = int8_matrix(modules, 192, 352, zero_points=zero_points)
    gemm = gemm_of(modules, int8_library, "int8")
    x = on_device(np.random.default_rng(num_tokens).standard_normal((num_tokens, 352)))
    for partition in gemm.partitions_of(num_tokens, matrix.tiled):
        scalings = gemm.scalings_of(matrix.tiled, partition.size) if partition.size.tokens in WEIGHTS_SIZES else ()
        for scaling in scalings:
            check(gemm, modules, matrix, x, gates=False, partition=partition, scaling=scaling)
    if num_tokens == 100:
        in_bf16, in_any = (product_of(gemm, modules, told(matrix, each), x) for each in (ScaleType.BF16, ScaleType.F32))
        assert (in_bf16 == in_any).all()


@pytest.mark.parametrize(
    "mistake",
    [
        ("(halves & 0x00800080u) ^ 0x43804380u", "0x43804380u"),
        ("0x4140 + 0x0202 * pair", "0x4140"),
        (" && !(Format::kHighOfMiddle && p.scales.zeros != 0)", ""),
    ],
    ids=["codes from 128 on", "bytes of the pair before", "zero points left out"],
)
def test_mistakes_with_int8_are_noticed(modules, make_library, on_device, mistake):
    gemm = gemm_of(modules, make_library(["lowbit_gemm_int8_store_weights_128"], mistake), "int8")
    matrix = int8_matrix(modules, 192, 352, zero_points=mistake[1] == "")
    x = on_device(np.random.default_rng(5).standard_normal((100, 352)))
    (partition, *_) = [each for each in gemm.partitions_of(100, matrix.tiled) if each.size.tokens == 128]
    with pytest.raises(AssertionError):
        check(gemm, modules, matrix, x, gates=False, partition=partition)


@pytest.mark.parametrize("num_tokens", [3, 60, 100, 200])
def test_mxfp4_is_scaled_in_one_product(modules, fp4_library, on_device, num_tokens):
    matrix = fp4_matrix(modules, 192, 352)
    gemm = gemm_of(modules, fp4_library, "fp4")
    x = on_device(np.random.default_rng(num_tokens).standard_normal((num_tokens, 352)))
    found = [each for each in gemm.partitions_of(num_tokens, matrix.tiled) if each.size.tokens in WEIGHTS_SIZES]
    assert found
    for partition in found:
        check(gemm, modules, matrix, x, gates=False, partition=partition, scaling=modules.scaling.WEIGHTS)


@pytest.fixture(scope="module")
def fp4_library(make_library: Callable[..., ctypes.CDLL]) -> ctypes.CDLL:
    return make_library([f"lowbit_gemm_fp4_store_weights_{tokens}" for tokens in WEIGHTS_SIZES])


NVFP4_SIZES = {8: ("e4m3groups", "weights"), 16: ("e4m3groups", "weights"), 64: ("weights",), 256: ("weights",)}
"""Tokens of a tile, and what is scaled."""


@pytest.fixture(scope="module")
def nvfp4_library(make_library: Callable[..., ctypes.CDLL]) -> ctypes.CDLL:
    return make_library(
        [
            f"lowbit_gemm_nvfp4_{epilogue}_{scaling}_{tokens}"
            for epilogue in ("store", "swiglu")
            for tokens, scalings in NVFP4_SIZES.items()
            for scaling in scalings
        ]
    )


@pytest.mark.parametrize("gates", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 7, 11, 60, 200, 300])
def test_nvfp4_is_multiplied_with_the_factor_of_each_row(modules, nvfp4_library, on_device, num_tokens, gates):
    # Gate has one factor, up another; the last tile of 128 rows has 64 or 8, but for a gate.
    matrix = nvfp4_matrix(modules, 384 if gates else 328, 352)
    gemm = gemm_of(modules, nvfp4_library, "nvfp4")
    x = on_device(np.random.default_rng(num_tokens).standard_normal((num_tokens, 352)))
    for partition in gemm.partitions_of(num_tokens, matrix.tiled):
        for scaling in NVFP4_SIZES.get(partition.size.tokens, ()):
            check(gemm, modules, matrix, x, gates=gates, partition=partition, scaling=modules.scaling(scaling))


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("store_weights_64", ("d[i] *= of[i / 2 % 2]", "d[i] *= of[0]")),
        ("swiglu_weights_64", ("const int next = kEpilogue == kSwiglu ? p.n : 8", "const int next = 8")),
        (
            "store_weights_64",
            ("own(rows, p.scales, (box * kStepsOfBox + first)", "own(rows, p.scales, (box * kStepsOfBox)"),
        ),
    ],
    ids=["the lower row's factor", "up with the factor of gate", "scales of the box's first columns"],
)
def test_mistakes_with_factors_of_rows_are_noticed(modules, make_library, on_device, name, mistake):
    gemm = gemm_of(modules, make_library([f"lowbit_gemm_nvfp4_{name}"], mistake), "nvfp4")
    # a thread has rows r and r + 8: the halves, with factors of their own, meet between such
    matrix = nvfp4_matrix(modules, 384 if name.startswith("swiglu") else 304, 352)
    x = on_device(np.random.default_rng(5).standard_normal((60, 352)))
    (partition, *_) = [each for each in gemm.partitions_of(60, matrix.tiled) if each.size.tokens == 64]
    with pytest.raises(AssertionError):
        check(gemm, modules, matrix, x, gates=name.startswith("swiglu"), partition=partition)


def told(matrix: Matrix, scales: ScaleType) -> Matrix:
    """The same tiles with scales that are said to be of another type."""
    made = dataclasses.replace(matrix.tiled.format, scales=scales)
    return matrix._replace(tiled=dataclasses.replace(matrix.tiled, format=made))


def product_of(gemm: Any, modules: Any, matrix: Matrix, x: np.ndarray) -> np.ndarray:
    out = np.full((len(x), len(matrix.values)), np.nan, x.dtype)
    gemm.multiply(x, matrix.tiled, out, epilogue=modules.epilogue.STORE)
    return out.view(np.uint16)


@pytest.mark.parametrize("num_tokens", [100, 200])
@pytest.mark.parametrize("code", ["fp8", "int4"])
def test_scales_that_are_bf16_numbers_take_fewer_products_and_give_the_same_bits(
    modules, library, on_device, code, num_tokens
):
    if code == "fp8":
        matrix, others = fp8_matrix(modules, 192, 352, ScaleType.BF16), fp8_matrix(modules, 192, 352)
    else:
        matrix, others = (int4_matrix(modules, 192, 352, group=128) for _ in range(2))
        matrix.tiled.codes[:, :, 2048:2112].view(np.uint16)[...] &= 0xFFF8  # of float16: 8 bits, as BF16 has
    gemm = gemm_of(modules, library, code)
    x = on_device(np.random.default_rng(num_tokens).standard_normal((num_tokens, 352)))
    in_bf16, in_any = (product_of(gemm, modules, told(matrix, each), x) for each in (ScaleType.BF16, ScaleType.F32))
    assert (in_bf16 == in_any).all()
    if code == "fp8":
        check(gemm, modules, matrix, x, gates=False)
    # What is no BF16 number would lose its lower half so.
    in_bf16, in_any = (product_of(gemm, modules, told(others, each), x) for each in (ScaleType.BF16, ScaleType.F32))
    assert (in_bf16 != in_any).any()


@pytest.mark.parametrize(
    "mistake",
    [
        ("weights<false>(a[next][0], factors, next, 0)", "weights<false>(a[next][0], factors, box, 0)"),
        ("weights<false>(a[next][step], factors, next, step)", "weights<false>(a[next][step], factors, next, 1)"),
        ("          factors = Factors<Format>(from, p.scales, 0);\n", ""),
    ],
    ids=["columns of the same box", "the same columns each time", "scales of the chunk before"],
)
def test_mistakes_in_what_is_dequantised_while_products_run_are_noticed(modules, make_library, on_device, mistake):
    gemm = gemm_of(modules, make_library(["lowbit_gemm_int4_store_woven_128"], mistake), "int4")
    matrix = int4_matrix(modules, 192, 352, group=128)
    x = on_device(np.random.default_rng(5).standard_normal((100, 352)))
    (partition, *_) = [each for each in gemm.partitions_of(100, matrix.tiled) if each.size.tokens == 128]
    with pytest.raises(AssertionError):
        check(gemm, modules, matrix, x, gates=False, partition=partition, scaling=modules.scaling.WOVEN)


def test_products_with_float16_scales_are_woven_and_others_are_not(modules, library):
    gemm = gemm_of(modules, library, "int4")
    (size,) = [each for each in modules.gemm.SIZES if each.tokens == 128]
    matrix = int4_matrix(modules, 192, 352, group=128)
    assert gemm.scalings_of(matrix.tiled, size) == [modules.scaling.WOVEN, modules.scaling.WEIGHTS]
    for other in (told(matrix, ScaleType.BF16), int4_matrix(modules, 192, 352, group=64)):
        assert gemm.scalings_of(other.tiled, size) == [modules.scaling.WEIGHTS]


@pytest.mark.parametrize(("scale", "is_refused"), [(127.9, False), (-128, True), (np.inf, True), (np.nan, True)])
def test_scales_of_e4m3_that_leave_no_room_for_its_exponent_are_refused(modules, scale, is_refused):
    memory = MagicMock()
    tiles, made = modules.tiles.LowbitTiles(MagicMock(), memory), fp8_matrix(modules, 64, 256).tiled
    scales = np.array([[1e-3, scale]], np.float32)
    part = QuantisedPart(format=made.format, codes=np.zeros((64, 256), np.uint8), scales=scales, name="down")
    if is_refused:
        with pytest.raises(WeightValueError, match=r"down: a scale of E4M3 is .* less than 128"):
            tiles.fill_scales(made, (part,))
    else:
        tiles.fill_scales(made, (part,))
        assert (memory.upload.call_args.args[0] == scales).all()


def test_scales_of_e2m1_that_leave_no_room_for_its_exponent_are_refused(modules):
    tiles, made = modules.tiles.LowbitTiles(MagicMock(), MagicMock()), fp4_matrix(modules, 64, 128).tiled
    refused = pytest.raises(WeightValueError, match=r"down: a scale of E2M1 is .* less than 4")
    for exponent, outcome in ((128, nullcontext()), (129, refused), (255, refused)):  # 2, 4, not a number
        scales = np.full((64, 4), 120, np.uint8)
        scales[3, 1] = exponent
        part = QuantisedPart(format=made.format, codes=np.zeros((64, 64), np.uint8), scales=scales, name="down")
        with outcome:
            tiles.fill_scales(made, (part,))


@pytest.mark.parametrize("what", ["scales of the rows after", "zero points one higher", "codes of the chunk after"])
def test_mistakes_in_a_matrix_are_noticed(modules, library, on_device, what):
    matrix = int4_matrix(modules, 192, 384, group=128)
    tiles = matrix.tiled.codes
    if what.startswith("scales"):
        tiles[:, :, 2048:2112] = np.roll(tiles[:, :, 2048:2112], 2, axis=2)
    elif what.startswith("zero"):
        tiles[:, :, 2112:].view(np.uint16)[...] += 1
    else:
        tiles[:, :, :2048] = np.roll(tiles[:, :, :2048], 1, axis=1)
    x = on_device(np.random.default_rng(3).standard_normal((150, 384)))
    with pytest.raises(AssertionError):
        check(gemm_of(modules, library, "int4"), modules, matrix, x, gates=False)


@pytest.mark.parametrize(
    "mistake",
    [
        ("column, first_token + part, policy", "column, first_token, policy"),
        ("return {tile(wide, split_tile % multicast_ctas)", "return {tile(wide, 0)"),
        ("int column = piece.first_chunk * kTileColumns;", "int column = 0;"),
    ],
    ids=["tokens of the first share", "another tile", "another split's columns"],
)
def test_mistakes_of_splits_that_were_multicast_ctas_are_noticed(modules, make_library, on_device, mistake):
    name = "lowbit_gemm_fp8_store_weights_256"
    gemm = modules.gemm.LowbitGemm(Device(make_library([name], mistake)))
    gemm.load("fp8")
    matrix = fp8_matrix(modules, 448, 352)
    x = on_device(np.random.default_rng(1).standard_normal((500, 352)))
    both = [each for each in gemm.partitions_of(500, matrix.tiled) if each.splits == each.multicast_ctas == 2]
    (partition,) = [each for each in both if each.size.tokens == 256]
    with pytest.raises(AssertionError):
        check(gemm, modules, matrix, x, gates=False, partition=partition)


E4M3_KERNELS = {
    "fp8": "fp8_float32_e4m3",
    "int4": "int4_float32_e4m3",
    "int4 in groups": "int4_float32_e4m3groups",
    "int4 with minimums": "int4_min_float32_e4m3groups",
    "fp4": "fp4_float32_e4m3groups",
    "nvfp4": "nvfp4_float32_e4m3groups",
}
"""Of matrices whose codes are multiplied as E4M3, with results in float32."""


@pytest.fixture(scope="module")
def unrounded(make_library: Callable[..., ctypes.CDLL]) -> ctypes.CDLL:
    return make_library([f"lowbit_gemm_{name}_{tokens}" for name in E4M3_KERNELS.values() for tokens in (8, 16)])


def matrix_of(modules: Any, kind: str, rows: int, columns: int) -> Matrix:
    if kind == "fp8":
        return fp8_matrix(modules, rows, columns)
    if kind == "fp4":
        return fp4_matrix(modules, rows, columns)
    if kind == "nvfp4":
        return nvfp4_matrix(modules, rows, columns)
    return int4_matrix(
        modules, rows, columns, group=128 if kind == "int4" else 32, minimums=kind == "int4 with minimums"
    )


def sums_of_e4m3(modules: Any, library: ctypes.CDLL, kind: str, matrix: Matrix, x: np.ndarray) -> np.ndarray:
    gemm, out = modules.gemm.LowbitGemm(Device(library)), np.full((len(x), len(matrix.values)), np.nan, np.float32)
    code, epilogue, scaling = E4M3_KERNELS[kind].rsplit("_", 2)
    gemm.load(code, (modules.epilogue(epilogue),))
    gemm.multiply(x, matrix.tiled, out, epilogue=modules.epilogue(epilogue), scaling=modules.scaling(scaling))
    return out


def split_mistake(modules: Any, library: ctypes.CDLL, on_device: Any, kind: str, num_tokens: int) -> float:
    """The largest error of a token's results, of the length of these, for activations of very different sizes."""
    matrix, rng = matrix_of(modules, kind, 192, 352), np.random.default_rng(num_tokens)
    sizes = 10.0 ** rng.uniform(-20, 20, (num_tokens, 1))
    x = on_device(rng.standard_normal((num_tokens, 352)) * sizes * 10.0 ** rng.uniform(-3, 0, (1, 352)))
    wanted = expected(x, matrix.values, gates=False)
    found = sums_of_e4m3(modules, library, kind, matrix, x)
    return float((np.linalg.norm(found - wanted, axis=1) / np.linalg.norm(wanted, axis=1)).max())


@pytest.mark.parametrize("num_tokens", [1, 2, 8, 13])
@pytest.mark.parametrize("kind", E4M3_KERNELS)
def test_activations_lose_nothing_as_two_numbers_of_e4m3(modules, unrounded, on_device, kind, num_tokens):
    # One number of E4M3 errs by 2.6 %, BF16 by 0.17 %.
    assert split_mistake(modules, unrounded, on_device, kind, num_tokens) < 1e-5


@pytest.mark.parametrize("kind", E4M3_KERNELS)
def test_an_outlier_costs_its_neighbours_no_more_than_bf16_does(modules, unrounded, on_device, kind):
    matrix = matrix_of(modules, kind, 64, 256)
    x = on_device(np.random.default_rng(2).standard_normal((3, 256)))
    x[1, 100] = 2000
    found = sums_of_e4m3(modules, unrounded, kind, matrix, x)
    wanted = expected(x, matrix.values, gates=False)
    without = np.linalg.norm(wanted[1] - 2000 * matrix.values[:, 100])
    assert np.linalg.norm(found[1] - wanted[1]) < 2.0**-9 * without
    np.testing.assert_allclose(found[[0, 2]], wanted[[0, 2]], atol=1e-5 * np.abs(wanted[[0, 2]]).max())


@pytest.mark.parametrize("kind", E4M3_KERNELS)
def test_zeros_infinities_and_the_smallest_numbers_stay_their_token_s(modules, unrounded, on_device, kind):
    matrix = matrix_of(modules, kind, 64, 128)
    x = on_device(np.random.default_rng(3).standard_normal((6, 128)))
    x[1], x[2, 5], x[3, 6], x[4] = 0, np.inf, np.nan, x[4] * np.array(2.0**-130, x.dtype)
    found = sums_of_e4m3(modules, unrounded, kind, matrix, x)
    wanted = expected(x[[0, 5]], matrix.values, gates=False)
    assert not found[1].any()
    assert np.isnan(found[2:4]).all()
    assert np.abs(found[4]).max() < 1e-36
    np.testing.assert_allclose(found[[0, 5]], wanted, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize(("columns", "whole"), [(384, True), (352, False)])
def test_codes_after_the_last_column_which_may_be_nan_are_not_multiplied_as_e4m3(modules, unrounded, columns, whole):
    gemm, matrix = modules.gemm.LowbitGemm(Device(unrounded)), fp8_matrix(modules, 64, columns).tiled
    gemm.load("fp8", (modules.epilogue.FLOAT32,))
    scalings = gemm.scalings_of(matrix, gemm.partition_of(1, matrix).size)
    assert (modules.scaling.E4M3 in scalings) == whole
    assert modules.scaling.SUMS in scalings


@pytest.mark.parametrize(
    ("kind", "mistake"),
    [
        ("fp8", ("sums[i + S::kSums] * 0.0625f", "sums[i + S::kSums] * 0.125f")),
        ("fp8", ("Factor<1>& factor = factors[i / 4 * 8 + i % 2]", "Factor<1>& factor = factors[i / 4 * 8]")),
        ("int4", ("zeros[i / 2 % 2] * factor.sums[0]", "zeros[0] * factor.sums[0]")),
        ("int4", ("d[i] += scales[i / 2 % 2] * sum", "d[i] += scales[0] * sum")),
        ("int4 in groups", (".sums[first + at];", ".sums[0];")),
        ("int4 with minimums", ("middle(stored[at][half])", "middle(stored[at][0])")),
        ("int4 in groups", ("group = (first + at) * p.scales.groups / kParts", "group = 0")),
        ("fp4", ("group = (first + at) * p.scales.groups / kParts", "group = 0")),
        ("nvfp4", ("(first + at) * p.scales.groups / kParts", "(first + at) / 2 * 2 * p.scales.groups / kParts")),
        ("nvfp4", ("half == 0 ? 0x00FF00FFu : 0xFF00FF00u", "half == 0 ? 0x0000FFFFu : 0xFFFF0000u")),
        ("nvfp4", ("d[i] *= of[i / 2 % 2]", "d[i] *= of[0]")),
    ],
    ids=[
        "half of the lower number",
        "factors of the token before",
        "zero points of the lower row",
        "its scales",
        "sums of the first group",
        "minimums of the lower row",
        "its scale",
        "scales of the first 32 columns",
        "scales of the 16 columns before",
        "codes of another half",
        "the lower row's factor",
    ],
)
def test_mistakes_in_what_scales_sums_of_e4m3_are_noticed(modules, make_library, on_device, kind, mistake):
    library = make_library([f"lowbit_gemm_{E4M3_KERNELS[kind]}_8"], mistake)
    assert split_mistake(modules, library, on_device, kind, 7) > 1e-3


EXPERT_SCALINGS = {
    "fp8": {8: ("e4m3", "sums"), 32: ("sums",), 128: ("weights",), 256: ("weights",)},
    "int4": {8: ("e4m3", "sums"), 32: ("sums",), 128: ("weights",), 256: ("weights",)},
    "int4 in groups": {8: ("e4m3groups", "weights"), 32: ("weights",), 128: ("weights",)},
    "int4 with BF16 scales": dict.fromkeys((8, 32, 128), ("bf16groups",)),
    "fp4": {8: ("e4m3groups", "weights"), 32: ("weights",), 256: ("weights",)},
}
"""Of several matrices: by what they hold and the tokens of a tile."""


def names_of_experts(epilogue: str) -> list[str]:
    found = {
        f"lowbit_experts_{held.split(maxsplit=1)[0]}_{epilogue}_{scaling}_{tokens}"
        for held, sizes in EXPERT_SCALINGS.items()
        for tokens, scalings in sizes.items()
        for scaling in scalings
    }
    return sorted(found)


@pytest.fixture(scope="module")
def expert_libraries(make_library: Callable[..., ctypes.CDLL]) -> dict[str, ctypes.CDLL]:
    return {epilogue: make_library(names_of_experts(epilogue)) for epilogue in ("store", "swiglu")}


def plan_of(modules: Any, counts: list[int], tile_tokens: int) -> Any:
    """As `plan_experts` makes it, with tiles left that have no tokens."""
    tiles, first = [], 0
    for expert, count in enumerate(counts):
        tiles += [(expert, first + done, min(tile_tokens, count - done), 0) for done in range(0, count, tile_tokens)]
        first += count
    made = np.array([*tiles, (0, 0, 0, 0), (0, 0, 0, 0)], np.int32)
    made[:, 3] = len(tiles)
    nothing = np.empty(0, np.int32)
    return modules.grouped.Plan(
        tiles=made,
        sorted_tokens=nothing,
        positions=nothing,
        tile_tokens=tile_tokens,
        expected_tiles=1,
        expected_tokens=1,
    )


def experts_matrix(modules: Any, held: str, experts: int, rows: int, columns: int) -> Matrix:
    """`[experts, rows, columns]`."""
    match held:
        case "fp8":
            one = fp8_matrix(modules, experts * rows, columns)
        case "fp4":
            one = fp4_matrix(modules, experts * rows, columns)
        case "int4 with BF16 scales":
            one = symmetric_matrix(modules, experts * rows, columns, group=32)
        case _:
            one = int4_matrix(modules, experts * rows, columns, group=128 if held == "int4" else 32)
    shape = experts, rows, columns
    return Matrix(dataclasses.replace(one.tiled, shape=shape), one.values.reshape(shape))


def check_experts(
    modules: Any, library: Any, on_device: Any, held: str, tile_tokens: int, scaling: str, *, gates: bool
) -> None:
    """Tokens of each expert near float64, tokens of no plan untouched, twice the same bits."""
    counts = [1, 0, tile_tokens + 3, 2, 5]
    rows, columns, limit = 256, 384, 0.7
    matrix = experts_matrix(modules, held, len(counts), rows, columns)
    x = on_device(np.random.default_rng(tile_tokens).standard_normal((sum(counts) + 6, columns)))
    experts = modules.experts.LowbitExperts(Device(library))
    experts.load(matrix.tiled.kernels)
    wanted, first = np.full((len(x), rows // 2 if gates else rows), np.nan), 0
    for expert, count in enumerate(counts):
        y = x[first : first + count].astype(np.float64) @ matrix.values[expert].T
        if gates:
            gate, up = np.split(y, 2, axis=1)
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
            y = gate / (1 + np.exp(-gate)) * up
        wanted[first : first + count] = y
        first += count
    found = []
    for _ in range(2):
        out = np.full(wanted.shape, np.nan, x.dtype)
        experts.multiply(
            x,
            matrix.tiled,
            out,
            epilogue=modules.grouped.Epilogue.SWIGLU if gates else modules.grouped.Epilogue.STORE,
            plan=plan_of(modules, counts, tile_tokens),
            weights_first=not gates,
            limit=limit,
            scaling=modules.scaling(scaling),
        )
        found.append(out)
    assert (found[0].view(np.uint16) == found[1].view(np.uint16)).all()
    got = found[0].astype(np.float64)
    assert np.isnan(got[first:]).all()
    error = np.linalg.norm(got[:first] - wanted[:first]) / np.linalg.norm(wanted[:first])
    assert error < (1.5e-2 if gates else 4e-3), error


@pytest.mark.parametrize("gates", [False, True])
@pytest.mark.parametrize(
    ("held", "tile_tokens", "scaling"),
    [(held, tokens, each) for held, sizes in EXPERT_SCALINGS.items() for tokens in sizes for each in sizes[tokens]],
)
def test_experts_multiply_the_tokens_of_a_plan(modules, expert_libraries, on_device, held, tile_tokens, scaling, gates):
    library = expert_libraries["swiglu" if gates else "store"]
    check_experts(modules, library, on_device, held, tile_tokens, scaling, gates=gates)


@pytest.mark.parametrize(
    ("held", "mistake"),
    [
        ("fp8", ("from += piece.tile.matrix * p.matrix_bytes", "from += 0")),
        ("fp4", ("planned.y + planned.z, planned.x}", "m, planned.x}")),
        ("fp4", ("group = (first + at) * p.scales.groups / kParts", "group = 0")),
        ("int4", ("return {planned.y, wide % wide_tiles", "return {planned.y + 1, wide % wide_tiles")),
    ],
    ids=["another matrix", "tokens after a tile's last", "scales of the first group", "the token after"],
)
def test_mistakes_with_several_matrices_are_noticed(modules, make_library, on_device, held, mistake):
    scaling = EXPERT_SCALINGS[held][8][0]
    library = make_library([f"lowbit_experts_{held}_store_{scaling}_8"], mistake)
    with pytest.raises(AssertionError):
        check_experts(modules, library, on_device, held, 8, scaling, gates=False)


def test_plans_have_larger_tiles_where_experts_have_more_tokens(modules):
    found = [modules.experts.tile_tokens(positions, 128) for positions in (1, 8, 512, 4096, 16384, 65536)]
    assert found == sorted(found)
    assert set(found) == set(modules.experts.TILE_TOKENS)

"""Products of low-bit matrices as the CUDA kernels compute them, clusters and all, emulated, against float64.

Codes are put into tiles here, by the words of `csrc/lowbit/lowbit_tiles.cuh`, not by the code that does so on a GPU.
"""

import ctypes
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import numpy as np
import pytest

from openinfer_kernels.weights.code_values import E4M3_VALUES
from openinfer_kernels.weights.quantised import Code, ScaleType, WeightFormat

CLUSTERS = {1: 6, 2: 3, 3: 2, 4: 1}
"""A small GPU of six multiprocessors: clusters that run at a time, by their blocks."""
SIZES = {16: ("sums", "weights"), 64: ("sums",), 128: ("weights",), 192: ("weights",), 256: ("weights",)}
"""Tokens of a tile, and what is scaled; others are as these."""
KERNELS = [
    f"lowbit_gemm_{code}_{epilogue}_{scaling}_{tokens}"
    for code in ("fp8", "int4")
    for epilogue in ("store", "swiglu")
    for tokens, scalings in SIZES.items()
    for scaling in scalings
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


def kernel_of(code: str, epilogue: str, scaling: str, tokens: str) -> str:
    """Its line, as the sources of all kernels of a code have it."""
    names = f"k{scaling.capitalize()}, {scaling}, k{epilogue.capitalize()}, {epilogue}"
    return f"LOWBIT_GEMM({code.capitalize()}, {code}, {tokens}, {names})"


def source_of(names: list[str]) -> str:
    """A library that runs these kernels."""
    calls = "".join(f"  OPENINFER_RUN({name})\n" for name in names)
    kernels = "".join(f"{kernel_of(*name.split('_')[2:])}\n" for name in names)
    return f"""#include "bfloat16.hpp"
#include "clusters.hpp"
#include "lowbit/lowbit_gemm.cuh"
{kernels}using namespace emulated;
#define OPENINFER_RUN(NAME) \\
  if (!strcmp(kind, #NAME)) return run_clusters(blocks, cluster, threads, [=] {{ NAME(*map, *problem); }});
extern "C" __attribute__((visibility("default"))) int run(
    const char* kind, const CUtensorMap* map, const lowbit::Problem* problem, size_t bytes, int blocks, int cluster,
    int threads) {{
  if (bytes != sizeof(lowbit::Problem)) return kOtherArguments;
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
        for old, new in [(SHARED, "uint8_t* raw = emulated::shared_memory();"), *([mistake] if mistake else [])]:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        path.write_text(text, "utf-8")
        return ctypes.CDLL(str(emulation.build(folder, "lowbit", source_of(names))))

    return make


@pytest.fixture(scope="module")
def library(make_library: Callable[..., ctypes.CDLL]) -> ctypes.CDLL:
    return make_library(KERNELS)


@pytest.fixture(scope="module")
def modules(emulation: Any) -> Iterator[SimpleNamespace]:
    """Those of the product, over arrays of NumPy."""

    class TensorMaps:
        """`CUtensorMap` of `cuda.hpp`: address, columns, rows, rows of a box."""

        def of(self, tensor: Any) -> Any:
            assert tensor.box[0] == 64
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
            tiles=importlib.import_module("openinfer_kernels.cuda.lowbit.lowbit_tiles"),
            epilogue=importlib.import_module("openinfer_kernels.cuda.gemm.tiles").Epilogue,
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
    bits = 8 if code == "fp8" else 4
    tiles = np.zeros((-(-rows // 64) * 2, -(-columns // 128), 32 * 128 * bits // 8), np.uint8)
    r, c = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    tile, row, step = r // 64 * 2 + r // 8 % 2, r // 16 % 4 * 8 + r % 8, c % 128 // 16
    thread, half = row * 4 + c % 8 // 2, c // 8 % 2
    if bits == 8:
        at = step // 4 * 2048 + thread * 16 + step % 4 * 4 + np.array([1, 3, 0, 2])[c % 2 + 2 * half]
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


def fp8_matrix(modules: Any, rows: int, columns: int) -> Matrix:
    """E4M3 in blocks of 64 x 128."""
    rng = np.random.default_rng(rows)
    codes = rng.integers(0, 256, (rows, columns), dtype=np.uint8)
    codes = np.where(codes & 0x7F == 0x7F, codes & 0x3F, codes)
    scales = rng.uniform(1e-4, 1e-3, (-(-rows // 64), -(-columns // 128))).astype(np.float32)
    tiles = in_tiles(codes, "fp8")
    end = np.zeros((*tiles.shape[:2], 16), np.uint8)
    end[..., :4] = np.repeat(scales, 2, axis=0)[..., None].view(np.uint8)
    made = WeightFormat(code=Code.E4M3, group_rows=64, group_columns=128, scales=ScaleType.F32)
    spread = np.repeat(np.repeat(scales, 64, axis=0)[:rows], 128, axis=1)[:, :columns]
    values = E4M3_VALUES[codes].astype(np.float64) * spread
    return Matrix(tiled(modules, made, (rows, columns), np.concatenate([tiles, end], axis=2), (64, 128)), values)


def int4_matrix(modules: Any, rows: int, columns: int, *, group: int) -> Matrix:
    """Float16 scales and zero points, as AWQ and GPTQ have them."""
    rng = np.random.default_rng(rows + group)
    chunks, groups = -(-columns // 128), 128 // group
    codes = rng.integers(0, 16, (rows, columns), dtype=np.uint8)
    scales = rng.uniform(5e-3, 2e-2, (rows, chunks, groups)).astype(np.float16)
    zeros = rng.integers(0, 16, (rows, chunks, groups))
    tiles = in_tiles(codes, "int4")
    middles = ((zeros + 128).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    parts = [of_tiles(part, len(tiles)).reshape(*tiles.shape[:2], -1).view(np.uint8) for part in (scales, middles)]
    made = WeightFormat(code=Code.INT4, group_rows=1, group_columns=group, scales=ScaleType.F16, zero_points=True)
    of_columns = [np.repeat(each.reshape(rows, -1), group, axis=1)[:, :columns] for each in (zeros, scales)]
    values = (codes.astype(np.float64) - of_columns[0]) * of_columns[1].astype(np.float64)
    whole = np.concatenate([tiles, *parts], axis=2)
    return Matrix(tiled(modules, made, (rows, columns), whole, (1, group)), values)


def tiled(modules: Any, made: WeightFormat, shape: tuple[int, int], tiles: np.ndarray, block: tuple[int, int]) -> Any:
    is_fp8 = made.code is Code.E4M3
    return modules.tiles.TiledWeight(
        format=made,
        shape=shape,
        codes=np.ascontiguousarray(tiles),
        scales=tiles,
        block_rows=block[0],
        block_columns=block[1],
        kernels="fp8" if is_fp8 else "int4",
        groups=128 // block[1],
        scale_rows=1 if is_fp8 else 32,
        zeros=0 if is_fp8 else 2048 + 64 * 128 // block[1],
        float16_scales=not is_fp8,
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
        for scales_sums in (True, False) if num_tokens <= 16 else (num_tokens <= 64,):
            check(gemm, modules, matrix, x, gates=gates, partition=partition, scales_sums=scales_sums)
    ways = {(each.splits > 1, each.multicast_ctas > 1, each.whole_tiles > 0) for each in found}
    if num_tokens > 256:
        assert {(False, True, False), (True, True, True)} <= ways
    elif num_tokens > 128:
        assert {(True, False, True), (False, False, False)} <= ways


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("num_tokens", [5, 140])
def test_groups_within_a_tile_have_scales_of_their_own(modules, library, on_device, num_tokens, group):
    matrix = int4_matrix(modules, 192, 288, group=group)
    x = on_device(np.random.default_rng(group).standard_normal((num_tokens, 288)))
    gemm = gemm_of(modules, library, "int4")
    for partition in gemm.partitions_of(num_tokens, matrix.tiled):
        if partition.size.tokens in SIZES:
            check(gemm, modules, matrix, x, gates=False, partition=partition)


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

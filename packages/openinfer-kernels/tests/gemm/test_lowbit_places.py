"""Where codes stand in the tiles of low-bit matrices, against the layout of tensor core fragments; on the host.

PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16": thread t of a warpgroup has columns 2 (t % 4) (+ 1, + 8,
+ 9) of rows 16 (t / 32) + (t % 32) / 4 (+ 8).
"""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import openinfer_kernels
from openinfer_kernels.weights.gpu_kernels import tile_layout
from openinfer_kernels.weights.quantised import Code, ScaleType, WeightFormat

CSRC = Path(openinfer_kernels.__file__).parent / "csrc"
PROGRAM = """
#include <cstdio>
#include "lowbit/lowbit_places.cuh"
int main() {
  using namespace lowbit;
  for (int row = 0; row < kTileRows; row++)
    for (int column = 0; column < kTileColumns; column++) {
      const NibblePlace nibble = nibble_place(row, column);
      std::printf("%d %d %d\\n", byte_place(row, column), nibble.word, nibble.shift);
    }
  for (int row = 0; row < 256; row++) std::printf("%d %d 0\\n", tile_of_row(row), row_in_tile(row));
}
"""


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> np.ndarray:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("places")
    (folder / "places.cpp").write_text(PROGRAM)
    subprocess.run([compiler, "-std=c++17", f"-I{CSRC}", "places.cpp", "-o", "places"], cwd=folder, check=True)
    printed = subprocess.run([folder / "places"], capture_output=True, text=True, check=True).stdout
    return np.array([[int(each) for each in line.split()] for line in printed.splitlines()])


def test_sixteen_bytes_of_a_thread_are_its_fragments(places):
    of_bytes = places[: 32 * 128, 0].reshape(32, 128)
    for group, quarter in np.ndindex(32, 4):  # eight rows of each warp, four threads of a row
        thread = 32 * (group // 8) + 4 * (group % 8) + quarter
        for step in range(8):
            columns = [16 * step + 2 * quarter + more for more in (0, 1, 8, 9)]
            first = step // 4 * 2048 + thread * 16 + step % 4 * 4
            assert of_bytes[group, columns].tolist() == [first, first + 1, first + 2, first + 3]


def test_nibbles_of_a_word_are_two_steps_of_a_thread(places):
    words, shifts = places[: 32 * 128, 1:].reshape(32, 128, 2).transpose(2, 0, 1)
    for group, quarter in np.ndindex(32, 4):
        thread = 32 * (group // 8) + 4 * (group % 8) + quarter
        for step in range(8):
            even = [16 * step + 2 * quarter, 16 * step + 2 * quarter + 8]
            for columns in (even, [column + 1 for column in even]):  # of the lower half, of the upper half
                assert words[group, columns].tolist() == [thread * 4 + step // 2] * 2
                assert shifts[group, columns].tolist() == [step % 2 * 8, step % 2 * 8 + 4]


def test_two_tiles_have_the_64_rows_of_a_product(places):
    tiles, rows = places[32 * 128 :, :2].T
    assert sorted(zip(tiles, rows, strict=True)) == [(tile, row) for tile in range(8) for row in range(32)]
    for row in range(256):  # a thread's rows are r and r + 8, in different tiles
        warp, high, group = row % 64 // 16, row % 16 // 8, row % 8
        assert (tiles[row], rows[row]) == (row // 64 * 2 + high, warp * 8 + group)


def described(code: Code, columns: int | None, scales: ScaleType, *, zeros: bool = False) -> WeightFormat:
    return WeightFormat(code=code, group_rows=1, group_columns=columns, scales=scales, zero_points=zeros)


@pytest.mark.parametrize(
    ("made", "block", "tile_bytes"),
    [
        (described(Code.E4M3, 128, ScaleType.BF16), (128, 128), 4096 + 16),
        (described(Code.E4M3, None, ScaleType.F32), (1, 320), 4096 + 128),
        (described(Code.INT4, 128, ScaleType.F16, zeros=True), (1, 128), 2048 + 64 + 64),
        (described(Code.INT4, 64, ScaleType.BF16), (1, 64), 2048 + 128),
        (described(Code.E2M1, 32, ScaleType.E8M0), (1, 32), 2048 + 256),
        (described(Code.INT8, 32, ScaleType.F16, zeros=True), (1, 32), 4096 + 512 + 256),
    ],
    ids=str,
)
def test_tiles_hold_codes_scales_and_zero_points_of_whole_pairs_of_tiles(made, block, tile_bytes):
    layout = tile_layout(made, block, (200, 320))
    assert (layout.tile_rows, layout.chunks) == (8, 3)
    assert layout.tile_bytes == tile_bytes
    assert layout.num_bytes == 24 * tile_bytes


def test_tiles_of_nvfp4_have_a_factor_for_each_row():
    made = WeightFormat(code=Code.E2M1, group_rows=1, group_columns=16, scales=ScaleType.E4M3, global_scale=True)
    layout = tile_layout(made, (1, 16), (200, 320))
    assert layout.tile_bytes == 2048 + 8 * 64
    assert layout.num_bytes == 24 * layout.tile_bytes + 4 * 200

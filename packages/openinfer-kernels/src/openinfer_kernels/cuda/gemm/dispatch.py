"""How a matrix is multiplied by few tokens' kernels, and up to how many tokens: by measurement.

    few tokens    csrc/gemm/grouped_gemm.cuh, tiles of 8, 32 or 128 tokens: each tile dequantises codes in registers
    more          the matrix is dequantised to BF16 in memory, once, and multiplied as any other

A table per format, a function of the number of tokens alone. `tools/device/quantised_products.py` measures all ways at
the sizes of published models.
"""

from collections.abc import Mapping

from openinfer_kernels.weights.quantised import WeightFormat

MOST_TOKENS: Mapping[WeightFormat | None, Mapping[int, int]] = {
    WeightFormat.FP8_BLOCKS: {8: 32},
    WeightFormat.INT4_GROUPS: {8: 32},
    WeightFormat.FP4_GROUPS: {8: 32},
    None: {8: 8, 32: 32},
}
"""By format, None being BF16, of which groups alone come here: tokens of a tile -> the most tokens it multiplies."""


def tile_of(weight_format: WeightFormat | None, num_tokens: int) -> int | None:
    """Tokens of the tile that multiplies so many; None: by another kernel, a quantised matrix in BF16."""
    return next((tile for tile, most in MOST_TOKENS[weight_format].items() if num_tokens <= most), None)

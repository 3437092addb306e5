"""How a matrix is multiplied by few tokens' kernels, and up to how many tokens: by measurement.

    matrices on Hopper    csrc/lowbit/lowbit_gemm.cuh, which dequantises codes in registers
    few tokens else       csrc/gemm/grouped_gemm.cuh, tiles of 8, 32 or 128 tokens, which does so too
    more                  the matrix is dequantised to BF16 in memory, once, and multiplied as any other

A table per format, a function of the number of tokens alone. `tools/device/quantised_products.py` measures all ways at
the sizes of published models.
"""

from collections.abc import Mapping

MOST_TOKENS: Mapping[str, Mapping[int, int]] = {
    "fp8": {8: 32},
    "int4": {8: 32},
    "fp4": {8: 32},
    "bf16": {8: 8, 32: 32},
}
"""By the name of kernels, BF16's being for groups alone: tokens of a tile -> the most tokens it multiplies."""

MOST_LOWBIT_TOKENS: Mapping[str, int] = {
    "fp8": 2048,
    "int8": 1024,
    "int4": 4096,
    "int4_min": 1024,
    "fp4": 1024,
    "nvfp4": 1024,
}
"""Of a matrix in tiles, by the name of kernels: with more tokens it is dequantised to BF16 first. `fp8` and `int4` have
been measured, up to 4,096; the others keep the limit of these before pairs of blocks divided what is left over."""

MOST_LOWBIT_TOKENS_OF_BF16_SCALES: Mapping[str, int] = {"fp8": 4096}
"""The same where each scale is a BF16 number and more tokens pay."""

MOST_EXPERT_TOKENS: Mapping[int, int] = {8: 6, 32: 40, 128: 160}
"""Of quantised experts in tiles: tokens of a tile of the plan -> the most tokens of an expert, in the mean, that it is
for."""

MOST_E4M3_EXPERT_TOKENS: Mapping[str, int] = {"fp8": 2, "int4": 2}
"""Of the same, by the name of kernels: up to so many tokens of an expert, in the mean, its codes are multiplied as
numbers of E4M3, where the sums of 128 columns may be scaled. Where those of 32 are, all tiles of 8 tokens do so, but
for INT4's with BF16 scales and no zero points."""

MOST_E4M3_TOKENS: Mapping[str, int] = {"fp8": 4, "int4": 1}
"""Of a matrix in tiles, by the name of kernels: up to so many its codes are multiplied as numbers of E4M3, and never
dequantised, where the sums of 128 columns may be scaled."""

MOST_E4M3_GROUPS_TOKENS: Mapping[str, int] = {"int4": 8, "int4_min": 8, "fp4": 1, "nvfp4": 0}
"""The same for groups of 64 and of 32 columns, but for INT4's with BF16 scales and no zero points: those are always
dequantised."""


def tile_of(kernels: str, num_tokens: int) -> int | None:
    """Tokens of the tile that multiplies so many; None: by another kernel, a quantised matrix in BF16."""
    return next((tile for tile, most in MOST_TOKENS[kernels].items() if num_tokens <= most), None)


def most_lowbit_tokens(kernels: str, *, scales_are_bf16: bool) -> int:
    """Up to how many tokens a matrix in tiles is dequantised in registers."""
    usual = MOST_LOWBIT_TOKENS[kernels]
    return MOST_LOWBIT_TOKENS_OF_BF16_SCALES.get(kernels, usual) if scales_are_bf16 else usual

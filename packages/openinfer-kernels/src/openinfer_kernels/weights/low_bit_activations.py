"""W8A8: which weights are multiplied with activations that are quantised as well, and what of these shares a scale.

Activations take the code of the weight. With `s` the scale of a token's group of columns and `m` the code's largest
number, 448 for E4M3 and 127 for INT8,

    s = max(max |x|, 1e-12) / m        q = the code nearest to x / s, of two equally near ones the even one

    weight                                 a token's scales
    E4M3 in blocks of 128 x 128            one for each 128 columns (DeepSeek-V3, 2024, section 3.3.2)
    E4M3 per row or matrix                 one
    INT8 per row or matrix, symmetric      one (SmoothQuant, Xiao et al. 2023, section 2, "per-token")
"""

from dataclasses import dataclass
from typing import Protocol

from openinfer_kernels.weights.quantised import Code, ScaleType, WeightFormat

LARGEST = {Code.E4M3: 448.0, Code.INT8: 127.0}
"""Number of a code."""
SMALLEST_MAXIMUM = 1e-12
"""Of a group: no scale is zero."""
BLOCK = 128
"""Rows, and columns, of a block of E4M3."""
FP8_ROWS = WeightFormat(code=Code.E4M3, group_rows=1, group_columns=None, scales=ScaleType.F32)
"""Of an output head that is quantised when it is loaded."""
_ALIGNMENT = 16


class _Batch(Protocol):
    @property
    def max_query_tokens(self) -> int:
        """Largest number of tokens in one row."""
        ...


@dataclass(frozen=True, slots=True)
class PromptSteps:
    """In which steps activations are quantised: those with much of a prompt, never those that decode alone.

    A row that decodes next to so much of a prompt is multiplied as the prompt is.
    """

    least_tokens: int = 513
    """Of the step: one more than steps that are replayed from graphs have."""
    least_query_tokens: int = 64
    """Of its longest row: more than drafts of a row and the token before them."""

    def include(self, num_tokens: int, batch: _Batch) -> bool:
        """Whether the step of `batch` is one, where `num_tokens` of its tokens are multiplied."""
        return num_tokens >= self.least_tokens and batch.max_query_tokens >= self.least_query_tokens


def is_served(weight_format: WeightFormat) -> bool:
    """Whether matrices of a format may have quantised activations; those of odd sizes may not."""
    is_plain = not (weight_format.zero_points or weight_format.minimums)
    if weight_format.code is Code.E4M3 and weight_format.groups == (BLOCK, BLOCK):
        return is_plain
    return weight_format.code in LARGEST and weight_format.group_columns is None and is_plain


def group_columns(weight_format: WeightFormat, shape: tuple[int, ...], block: tuple[int, int]) -> int | None:
    """Columns of a token that share a scale, for one matrix; None: its activations stay as they are.

    Args:
        weight_format: of the matrix.
        shape: `[out, in]`; several matrices in one are those of experts, which have no such product.
        block: rows and columns within which no scale of the weight changes: cuts may have divided a block.
    """
    if len(shape) != 2 or not is_served(weight_format):
        return None
    if weight_format.group_columns is None:
        return shape[1] if shape[0] % _ALIGNMENT == 0 and shape[1] % _ALIGNMENT == 0 else None
    return BLOCK if block == (BLOCK, BLOCK) and shape[1] % BLOCK == 0 else None

"""Gemma's rotary embeddings: plain, or with positions that are divided by a factor."""

import numpy as np
from numpy.typing import NDArray

from openinfer_gemma.config import Rope


def rope_table(rope: Rope, *, head_dim: int, positions: int) -> NDArray[np.float32]:
    """`[2, positions, head_dim / 2]`: cosines, then sines, of position times frequency.

    Su et al. 2021, "RoFormer", eq. 15; divided by a factor: Chen et al. 2023, "Extending Context Window of Large
    Language Models via Position Interpolation", eq. 4, transformers' `_compute_linear_scaling_rope_parameters`.
    """
    frequencies = rope.rope_theta ** (-2.0 * np.arange(head_dim // 2, dtype=np.float64) / head_dim) / rope.factor
    angles = np.arange(positions, dtype=np.float64)[:, None] * frequencies
    return np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32)

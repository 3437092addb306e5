"""Llama's rotary embedding: plain, or with the slowed low frequencies of Llama 3.1."""

import math

import msgspec
import numpy as np
from numpy.typing import NDArray


class Llama3Scaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`rope_scaling` of type `llama3`, under its own names."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


def rope_table(theta: float, scaling: Llama3Scaling | None, *, head_dim: int, positions: int) -> NDArray[np.float32]:
    """`[2, positions, head_dim / 2]`: cosines, then sines, of position times frequency.

    Su et al. 2021, "RoFormer", eq. 15; the slowed frequencies as transformers' `_compute_llama3_parameters`: waves
    longer than `original / low_freq_factor` are slowed by `factor`, waves shorter than `original / high_freq_factor`
    are not, and between the two the share of the slowed one is linear in `original / wavelength`.
    """
    frequencies = theta ** (-2.0 * np.arange(head_dim // 2, dtype=np.float64) / head_dim)
    if scaling is not None:
        turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        kept = np.clip(kept, 0.0, 1.0)
        frequencies = frequencies * kept + frequencies / scaling.factor * (1 - kept)
    angles = np.arange(positions, dtype=np.float64)[:, None] * frequencies
    return np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32)

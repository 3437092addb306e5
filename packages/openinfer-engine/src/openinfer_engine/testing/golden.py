"""Logits that a reference recorded for a model of a few layers, and how far others are from them."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from openinfer_engine.testing.family import Logits

FILE = "logits.npz"
_NUM_SEQUENCES = 3


class Golden:
    """What `logits.npz` in the folder of a model holds: of sequences 0, 1 and 2, `token_ids_0` `[tokens]`,
    `positions_0` of the logits that were recorded, and these, `logits_0` `[positions, V]`, in float32.

    Attributes:
        sequences: token ids, positions and logits by name, `"0"` to `"2"`.
    """

    def __init__(self, model_dir: Path) -> None:
        self.sequences: dict[str, tuple[list[int], NDArray[np.int64], Logits]] = {}
        with np.load(model_dir / FILE) as arrays:
            for name in map(str, range(_NUM_SEQUENCES)):
                token_ids = arrays[f"token_ids_{name}"].tolist()
                self.sequences[name] = token_ids, arrays[f"positions_{name}"], arrays[f"logits_{name}"]

    def tokens(self, sequence: str) -> list[int]:
        return self.sequences[sequence][0]

    def error(self, sequence: str, logits: Logits, *, first: int = 0) -> float:
        """The largest difference at the recorded positions from `first` on.

        Args:
            sequence: its name.
            logits: `[tokens - first, V]`.
            first: where `logits` begin.

        Raises:
            AssertionError: they are not all that the sequence has from there, or none was recorded there.
        """
        token_ids, positions, expected = self.sequences[sequence]
        shape = (len(token_ids) - first, expected.shape[1])
        assert logits.shape == shape, f"logits of shape {logits.shape}, recorded ones end at {shape}"
        recorded = positions >= first
        assert recorded.any(), f"no logits were recorded from token {first} on"
        return float(np.abs(logits[positions[recorded] - first] - expected[recorded]).max())

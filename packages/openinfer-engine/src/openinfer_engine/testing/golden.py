"""Logits that a reference recorded for a model of a few layers, and how far others are from them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openinfer_engine.model import ModelDefinition
from openinfer_engine.testing.family import FamilyHarness, Logits

FILE = "logits.npz"
_NUM_SEQUENCES = 3


def record_golden(definition: ModelDefinition[Any], model_dir: Path, lengths: Sequence[int]) -> None:
    """Writes what a `Golden` reads, of tokens at random, by the family's own model in float32 on a CPU.

    For models that no reference has recorded, such as those of other devices' tests: the family's gates hold that model
    against one that was.
    """
    harness, rng = FamilyHarness(definition, model_dir, num_blocks=400), np.random.default_rng(5)
    num_token_ids = definition.limits(harness.config).vocab_size
    arrays: dict[str, NDArray[Any]] = {}
    for name, length in zip(map(str, range(_NUM_SEQUENCES)), lengths, strict=True):
        token_ids = rng.integers(0, num_token_ids, length)
        arrays[f"token_ids_{name}"], arrays[f"positions_{name}"] = token_ids, np.arange(length)
        arrays[f"logits_{name}"] = harness.step({name: token_ids.tolist()})[name]
    np.savez(model_dir / FILE, **arrays)  # pyright: ignore[reportArgumentType] - no array is named allow_pickle


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

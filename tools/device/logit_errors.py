"""How far a GPU's logits are from the CPU's, and how far they may be: a multiple of what rounding to BF16 alone costs.

An expert or an entry that is chosen on one side and not on the other, for two scores that are almost equal, moves a
token as a whole: so the median decides, beside that of the CPU whose operators' results are rounded to BF16, as every
GPU's are (`openinfer_engine.testing.RoundedOps`).
"""

from typing import NamedTuple, Self

import numpy as np

MAX_RATIO = 2.5
"""Of the GPU's median error to that of the CPU with rounded results; a GPU rounds inside of operators too."""


class LogitErrors(NamedTuple):
    """Of a token: the length of the difference over the length of the logits."""

    median_error: float
    worst_error: float
    same_likeliest: float
    """Share of the tokens whose likeliest next token is the same."""

    @classmethod
    def between(cls, got: np.ndarray, expected: np.ndarray) -> Self:
        """Of logits `[tokens, V]`."""
        errors = np.linalg.norm(got - expected, axis=1) / np.linalg.norm(expected, axis=1)
        same = got.argmax(axis=1) == expected.argmax(axis=1)
        return cls(float(np.median(errors)), float(errors.max()), float(same.mean()))

    def pass_beside(self, rounding: "LogitErrors") -> bool:
        """Whether no more is wrong than what rounding explains."""
        return self.median_error <= MAX_RATIO * rounding.median_error

    def show(self, name: str) -> None:
        """Prints a line."""
        error, worst, same = self
        print(f"  {name:28} error {error:.4f}, at worst {worst:.4f}; same likeliest {same:.3f}", flush=True)

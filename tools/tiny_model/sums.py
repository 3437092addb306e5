"""Additions and subtractions below one hundred; one pair of numbers in twenty is never shown."""

import zlib
from collections.abc import Iterator
from random import Random

_ADD = (
    "{a} + {b} =",
    "{a} plus {b} is",
    "{a} plus {b} equals",
    "The sum of {a} and {b} is",
    "Question: What is {a} + {b}?\nAnswer:",
    "Adding {a} and {b} gives",
)
_SUBTRACT = ("{a} - {b} =", "{a} minus {b} is", "Question: What is {a} - {b}?\nAnswer:", "Taking {b} from {a} leaves")
ADD_QUESTIONS = ("What is {a} + {b}?", "What is {a} plus {b}?", "How much is {a} plus {b}?", "Add {a} and {b}.")
SUBTRACT_QUESTIONS = ("What is {a} - {b}?", "What is {a} minus {b}?", "How much is {a} minus {b}?")


def is_held_out(a: int, b: int) -> bool:
    """Say whether no training text may contain this pair, whatever the operation."""
    return zlib.crc32(f"{a},{b}".encode()) % 20 == 0


def numbers(rng: Random) -> tuple[int, int]:
    """Draw a pair for training, small numbers more often than large ones."""
    while True:
        limit = rng.choice((10, 20, 100))
        a, b = rng.randrange(limit), rng.randrange(limit)
        if not is_held_out(a, b):
            return a, b


def text(rng: Random) -> str:
    """Return one sum, or a short column of sums."""
    return "\n".join(_line(rng) for _ in range(rng.choice((1, 1, 1, 2, 4, 8))))


def held_out_prompts() -> Iterator[tuple[str, str]]:
    """Yield `(prompt, answer)` for every held-out pair of numbers below one hundred, in one wording."""
    for a in range(100):
        for b in range(100):
            if is_held_out(a, b):
                yield _ADD[0].format(a=a, b=b), str(a + b)


def _line(rng: Random) -> str:
    a, b = numbers(rng)
    if rng.random() < 0.65:
        return f"{rng.choice(_ADD).format(a=a, b=b)} {a + b}."
    a, b = max(a, b), min(a, b)
    if is_held_out(a, b):
        return _line(rng)
    return f"{rng.choice(_SUBTRACT).format(a=a, b=b)} {a - b}."

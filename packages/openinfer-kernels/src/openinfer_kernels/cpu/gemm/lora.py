"""Low-rank adapters in NumPy: the tokens of each adapter at once."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openinfer_kernels.cpu.gemm.linear import Multiply, linear, swiglu


@np.errstate(over="ignore", invalid="ignore")
def lora_shrink(
    x: NDArray[Any], a: NDArray[Any], adapter_slots: NDArray[Any], *, multiply: Multiply = linear
) -> NDArray[np.float32]:
    _, num_pieces, rank, _ = a.shape
    shrunk = np.zeros((1, len(x), num_pieces, rank), np.float32)
    for slot, tokens in _by_adapter(adapter_slots):
        product = multiply(x[tokens], a[slot].reshape(num_pieces * rank, -1))
        shrunk[0, tokens] = product.reshape(-1, num_pieces, rank)
    return shrunk


@np.errstate(over="ignore", invalid="ignore")
def lora_expand(
    y: NDArray[Any],
    shrunk: NDArray[Any],
    b: NDArray[Any],
    adapter_slots: NDArray[Any],
    *,
    starts: Sequence[int],
    multiply: Multiply = linear,
) -> None:
    summed = shrunk.sum(0)
    for slot, tokens in _by_adapter(adapter_slots):
        for piece, (begin, end) in enumerate(pairwise(starts)):
            y[tokens, begin:end] += multiply(summed[tokens, piece], b[slot, begin:end])


def lora_expand_swiglu(
    gate_up: NDArray[Any],
    shrunk: NDArray[Any],
    b: NDArray[Any],
    adapter_slots: NDArray[Any],
    *,
    starts: Sequence[int],
    multiply: Multiply = linear,
) -> NDArray[Any]:
    both = gate_up.copy()
    lora_expand(both, shrunk, b, adapter_slots, starts=starts, multiply=multiply)
    return swiglu(both)


def _by_adapter(adapter_slots: NDArray[Any]) -> Iterator[tuple[int, NDArray[np.intp]]]:
    for slot in np.unique(adapter_slots[adapter_slots >= 0]).tolist():
        yield slot, np.flatnonzero(adapter_slots == slot)

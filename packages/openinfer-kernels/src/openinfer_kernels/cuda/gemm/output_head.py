"""Output heads: plain ones, and those that are quantised when they are loaded, E4M3 with a scale per row, in tiles."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from openinfer_kernels.cuda.common.arrays import fits_vectors, require
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy
from openinfer_kernels.cuda.common.mapped_memory import temporaries
from openinfer_kernels.cuda.common.memory import Memory
from openinfer_kernels.cuda.gemm.linear import Linear
from openinfer_kernels.cuda.gemm.tiles import Epilogue
from openinfer_kernels.cuda.lowbit.low_bit_activations import LowBitActivations
from openinfer_kernels.cuda.lowbit.lowbit_gemm import LowbitGemm
from openinfer_kernels.cuda.lowbit.lowbit_tiles import LowbitTiles, TiledWeight
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array, LinearWeight, QuantisedWeight
from openinfer_kernels.weights.gpu_kernels import tiles_hold
from openinfer_kernels.weights.low_bit_activations import FP8_ROWS
from openinfer_kernels.weights.plain import WeightPart, stacked_shape
from openinfer_kernels.weights.quantised import QuantisedPart

_PIECE_VALUES = 1 << 26
"""That are in BF16 on the device at a time, next to the head."""


class OutputHeads:
    """Heads and their logits on one device."""

    def __init__(self, linear: Linear, fp8: "Fp8Heads | None") -> None:
        """`fp8`: None where heads stay as they are."""
        self._linear = linear
        self._fp8 = fp8

    def quantise_head(self, *parts: WeightPart) -> QuantisedWeight | None:
        return None if self._fp8 is None else self._fp8.quantise(*parts)

    def logits(self, hidden: Array, head: LinearWeight) -> Array:
        if not isinstance(head, QuantisedWeight):
            return self._linear.logits(hidden, head)
        if self._fp8 is None or not isinstance(head, TiledWeight):
            raise ArrayMismatchError(f"these operators have no logits of a head in {head.format}")
        return self._fp8.logits(hidden, head)


class Fp8Heads:
    """Makes and multiplies those that are quantised; on Hopper."""

    def __init__(self, device: Device, memory: Memory, low_bit: LowBitActivations) -> None:
        self._tiles = LowbitTiles(device, memory)
        self._lowbit = LowbitGemm(device)
        self._memory = memory
        self._low_bit = low_bit

    def quantise(self, *parts: WeightPart) -> TiledWeight:
        return self._quantise(stacked_shape(parts), map(self._memory.upload_weight_now, _pieces(parts)))

    def quantise_array(self, head: Array) -> TiledWeight:
        """The same of one that is on the device, in BF16."""
        require(head, bfloat16, ndim=2, what="the head")
        at_once = max(1, _PIECE_VALUES // head.shape[1])
        return self._quantise(head.shape, (head[begin : begin + at_once] for begin in range(0, len(head), at_once)))

    def _quantise(self, shape: tuple[int, ...], pieces: Iterable[Array]) -> TiledWeight:
        """Of rows in BF16, one piece after the other."""
        block = 1, shape[1]
        if not tiles_hold(FP8_ROWS, block, shape):
            raise ArrayMismatchError(f"a head {list(shape)} has no kernel in E4M3: its columns must be multiples of 32")
        weight = self._tiles.empty(FP8_ROWS, block, shape)
        self._lowbit.load(weight.kernels, (Epilogue.FLOAT32,))
        with temporaries():  # they are no weights, whose memory an engine keeps asleep
            scales = cupy.empty(shape[0], np.float32)
            begin = 0
            for rows in pieces:
                codes, scales[begin : begin + len(rows)] = self._low_bit.quantise_rows(rows)
                place = self._tiles.place(weight, first_row=begin)
                place(codes.view(np.uint32), place.view(len(rows)))
                begin += len(rows)
        self._memory.tell(shape[0] * shape[1])
        # Codes are there already; scales take the way of a checkpoint's. Their copy waits for all of the above, whose
        # memory may then be a weight's that another stream fills.
        there = np.broadcast_to(np.uint8(0), shape)
        grid = cupy.asnumpy(scales)[:, None]
        self._tiles.fill_scales(weight, (QuantisedPart(format=FP8_ROWS, codes=there, scales=grid),))
        return weight

    def logits(self, hidden: Array, head: TiledWeight) -> Array:
        """`[T, V]` float32 for `hidden [T, h]`."""
        require(hidden, bfloat16, ndim=2, what="hidden")
        if hidden.shape[1] != head.shape[1]:
            raise ArrayMismatchError(f"hidden {hidden.shape} and the head {head.shape} do not agree on the inner size")
        out = cupy.empty((len(hidden), head.shape[0]), np.float32)
        if len(hidden):
            x = hidden if fits_vectors(hidden) else hidden.copy()
            self._lowbit.multiply(x, head, out, epilogue=Epilogue.FLOAT32)
        return out


class DraftHeads:
    """Heads of drafts in E4M3, whatever the model's is; on Hopper."""

    def __init__(self, device: Device, memory: Memory, linear: Linear) -> None:
        self._device = device
        self._low_bit = LowBitActivations(device, linear)
        self._fp8 = Fp8Heads(device, memory, self._low_bit)

    def draft_head(self, head: Array) -> TiledWeight:
        """Raises `ArrayMismatchError` on another GPU."""
        if not LowbitGemm.there_is_one(self._device):
            raise ArrayMismatchError("a head of drafts in E4M3 has kernels for Hopper alone")
        return self._fp8.quantise_array(head)

    def draft_logits(self, hidden: Array, head: QuantisedWeight) -> Array:
        if not isinstance(head, TiledWeight):
            raise ArrayMismatchError("the head is not one that draft_head made")
        return self._fp8.logits(hidden, head)

    def close(self) -> None:
        self._low_bit.close()


def _pieces(parts: Sequence[WeightPart]) -> Iterator[Any]:
    """Rows of host memory, few enough for the device to have in BF16 next to the head."""
    for part in parts:
        at_once = max(1, _PIECE_VALUES // part.shape[1])
        for first in range(0, len(part), at_once):
            end = min(first + at_once, len(part))
            yield part[first:end] if isinstance(part, np.ndarray) else part.rows(first, end)

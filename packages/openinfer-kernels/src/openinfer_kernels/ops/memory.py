"""Arrays of a device: made, filled, and read back."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from openinfer_kernels.ops.arrays import Array, HostArray
from openinfer_kernels.ops.quantised import LinearWeight, QuantisedWeight
from openinfer_kernels.weights.plain import WeightPart
from openinfer_kernels.weights.quantised import QuantisedPart


class MemoryOps(Protocol):
    """Arrays of a device: made, filled, and read back."""

    def upload(self, host: HostArray) -> Array:
        """Copies a host array to the device, dtype unchanged."""
        ...

    def upload_weight(self, *parts: WeightPart) -> Array:
        """Brings a weight to the device in the compute dtype.

        Args:
            parts: one or more, which lie below each other in the result: rows of the same shape. Arrays are float32,
                float16, or uint16 holding BF16 bit patterns, of any strides; a `RandomWeight` is computed there,
                a `ForeignWeight` copied from GPU to GPU.

        Raises:
            WeightDtypeError: an array of any other dtype.
            ValueError: the parts' rows differ in shape.
        """
        ...

    def upload_float32(self, *parts: WeightPart) -> Array:
        """As `upload_weight`, in float32 whatever the compute dtype; filled when it returns.

        For the few vectors whose rounding the equations forbid: decays, biases of routers.
        """
        ...

    def upload_quantised(
        self, *parts: QuantisedPart, num_matrices: int | None = None, grouped: bool = False
    ) -> LinearWeight:
        """Brings parts of one format, which lie below each other, to the device.

        A device that has nothing to hold the format in dequantises it here, once: what it returns is then a plain
        weight of the compute dtype.

        Args:
            parts: one or more, with as many columns each.
            num_matrices: None gives one matrix `[out, in]`; a number, so many of equal height, `[matrices, out, in]`.
            grouped: whether these are for `grouped_linear`, rather than for `experts`, which may be held otherwise.

        Raises:
            WeightDtypeError: codes or scales in a dtype that the format does not have.
            WeightValueError: a code of E4M3 is NaN, 0x7F or 0xFF; within `loading` it may be raised when that is left.
            ValueError: parts that do not fit each other, or scales that do not cover their codes.
        """
        ...

    def upload_dequantised(self, *parts: QuantisedPart) -> Array:
        """What parts of one format, below each other, stand for: `[out, in]` in the compute dtype, there at once.

        For matrices that a model takes apart; otherwise `upload_quantised` keeps them small. It may be read within
        `loading`.

        Raises:
            WeightDtypeError: codes or scales in a dtype that the format does not have.
            ValueError: parts that do not fit each other, or scales that do not cover their codes.
        """
        ...

    def quantise_head(self, *parts: WeightPart) -> QuantisedWeight | None:
        """An output head whose parts lie below each other, in E4M3 with a scale per row; None: it stays as it is.

        Which of both is a property of the operators. What `upload_weight` takes; it may be read within `loading`.

        Raises:
            ArrayMismatchError: the device has no product with a head of this size.
            WeightDtypeError: an array of another dtype.
        """
        ...

    def loading(self, progress: Callable[[int], None] = ...) -> AbstractContextManager[None]:
        """Within it `upload_weight` may return before its array is filled; leaving it waits for all of them.

        Until then the arrays handed over must not change, and those returned must not be read.

        Args:
            progress: called with the bytes that have come since the last call, from any thread; not by an
                implementation that copies at once.
        """
        ...

    def download(self, array: Array) -> HostArray:
        """Copies to the host and waits for it."""
        ...

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any] | type[Any] | None = None) -> Array:
        """A zeroed device array; `dtype` None is the compute dtype."""
        ...

    def host_weights(self, num_values: int) -> HostArray:
        """`[num_values]` of the compute dtype in host memory that `copy_weights` is quick with; on any thread.

        What is in it before it is written is anything.
        """
        ...

    def copy_weights(
        self, copies: Sequence[tuple[HostArray | None, Array]], *, scales: Sequence[float] | None = None
    ) -> None:
        """Begins to copy what `host_weights` gave, or parts of it, over device arrays; None: zeros.

        With `scales` each is multiplied by its own, in float32, and rounded once.

        An array is contiguous, or a matrix whose rows lie apart; it has, or they have, a multiple of 16 bytes.
        After everything that was queued before, and ahead of what is queued next; what is copied stays as it is until
        that has run.
        """
        ...

    def copy_rows(self, array: Array, *, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies `array[source]` over `array[target]` for each pair; no row is in both.

        After everything that was queued before, and ahead of what is queued next.
        """
        ...

"""Weights in another process's memory of a GPU: what the device copies without the host."""

import math
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class ForeignMemory(Protocol):
    """An allocation of another process on a GPU."""

    @property
    def size_bytes(self) -> int: ...

    @property
    def device_bytes(self) -> int:
        """That `copy_rows` was asked for."""
        ...

    @property
    def host_bytes(self) -> int:
        """That `read` has copied."""
        ...

    def read(self, offset_bytes: int, num_bytes: int) -> NDArray[np.uint8]:
        """`[num_bytes]` uint8, copied to the host; waits for it.

        Raises:
            ValueError: they do not lie in the allocation, or it is closed.
        """
        ...

    def copy_rows(self, offset_bytes: int, pitch_bytes: int, out: Any) -> None:
        """Begins to copy rows over those of an array on the GPU, on the current stream.

        Args:
            offset_bytes: of the first row.
            pitch_bytes: from one row to the next; at least a row of `out`.
            out: `[rows, values]`, contiguous; it has the dtype that the rows have.

        Raises:
            ValueError: they do not lie in the allocation, or it is closed.
        """
        ...

    def close(self) -> None:
        """Once what `copy_rows` has begun is done; idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignWeight:
    """A weight that another process has on a GPU, or a piece of one."""

    memory: ForeignMemory
    dtype: np.dtype[Any]
    """float32, float16, or uint16 for BF16's bits."""
    shape: tuple[int, ...]
    """Of this piece."""
    pitch: int
    """Values from one row of it to the next."""
    offset_bytes: int
    """Of its first value in the memory."""

    @classmethod
    def whole(
        cls, memory: ForeignMemory, offset_bytes: int, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> "ForeignWeight":
        """Of a tensor whose values lie next to each other."""
        return cls(memory=memory, dtype=dtype, shape=shape, pitch=math.prod(shape[1:]), offset_bytes=offset_bytes)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def row_values(self) -> int:
        return math.prod(self.shape[1:])

    def rows(self, begin: int, end: int) -> "ForeignWeight":
        return replace(self, shape=(end - begin, *self.shape[1:]), offset_bytes=self._moved(begin * self.pitch))

    def columns(self, begin: int, end: int) -> "ForeignWeight":
        """A piece along the second axis."""
        rows, _, *inner = self.shape
        return replace(self, shape=(rows, end - begin, *inner), offset_bytes=self._moved(begin * math.prod(inner)))

    def flattened(self) -> "ForeignWeight":
        """The same numbers as rows of the last axis, of a piece of whole rows: two axes."""
        columns = self.shape[-1]
        return replace(self, shape=(math.prod(self.shape[:-1]), columns), pitch=columns)

    def copy(self, begin: int, out: Any) -> None:
        """Begins to copy rows from `begin` on over an array on the GPU, `[rows, values]`, as `copy_rows`."""
        self.memory.copy_rows(self._moved(begin * self.pitch), self.pitch * self.dtype.itemsize, out)

    def on_host(self) -> NDArray[Any]:
        """A copy in host memory; waits for it."""
        rows, values = len(self), self.row_values
        if not rows * values:
            return np.empty(self.shape, self.dtype)
        spanned = (rows - 1) * self.pitch + values
        copied = self.memory.read(self.offset_bytes, spanned * self.dtype.itemsize).view(self.dtype)
        steps = (self.pitch * self.dtype.itemsize, self.dtype.itemsize)
        return np.lib.stride_tricks.as_strided(copied, (rows, values), steps).reshape(self.shape)

    def _moved(self, values: int) -> int:
        return self.offset_bytes + values * self.dtype.itemsize

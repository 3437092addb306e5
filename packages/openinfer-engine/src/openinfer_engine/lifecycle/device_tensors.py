"""`DeviceTensors`: weights that another process has on a GPU, read tensor by tensor like those of a file.

Each goes through host memory, where weights are cut for a rank and laid out for its products, wherever they come from.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from openinfer_core import InvalidCheckpoint
from openinfer_core.control import DeviceTensor
from openinfer_engine.weights.safetensors_file import NUMPY_DTYPES, TensorInfo, checked_tensor
from openinfer_kernels import HostArray


class ForeignMemory(Protocol):
    """An allocation of another process on a GPU."""

    @property
    def size_bytes(self) -> int: ...

    def read(self, offset_bytes: int, num_bytes: int) -> HostArray:
        """`[num_bytes]` uint8, copied to the host."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


class DeviceTensors:
    """Tensors of one update; implements `TensorFile`. Closed by `close`.

    Args:
        tensors: with names that differ.
        open_memory: opens an allocation by its handle; `Refused` or `InvalidCheckpoint` if it cannot.

    Raises:
        InvalidCheckpoint: a dtype or a shape is none of the format's, or a tensor does not lie in its allocation.
        Refused: there is no such memory.
    """

    def __init__(self, tensors: Sequence[DeviceTensor], open_memory: Callable[[bytes], ForeignMemory]) -> None:
        self.path = Path("memory of a GPU")  # for messages
        self.tensors: Mapping[str, TensorInfo] = {}
        self._asked = {tensor.name: tensor for tensor in tensors}
        self._memory: dict[bytes, ForeignMemory] = {}
        try:
            self.tensors = {tensor.name: _info(tensor) for tensor in tensors}
            for tensor in tensors:
                if tensor.handle not in self._memory:
                    self._memory[tensor.handle] = open_memory(tensor.handle)
                self._check_place(tensor)
        except BaseException:
            self.close()
            raise

    def read(self, name: str) -> HostArray:
        """A whole tensor.

        Raises:
            KeyError: there is no such tensor, or all are closed.
        """
        tensor, info = self._asked[name], self.tensors[name]
        copied = self._memory[tensor.handle].read(tensor.offset_bytes, info.num_bytes)
        return copied.view(NUMPY_DTYPES[info.dtype]).reshape(info.array_shape)

    def check_unwritten(self) -> None:
        """Nothing tells: the caller has promised it."""

    def close(self) -> None:
        """Idempotent."""
        while self._memory:
            self._memory.popitem()[1].close()

    def _check_place(self, tensor: DeviceTensor) -> None:
        size_bytes, num_bytes = self._memory[tensor.handle].size_bytes, self.tensors[tensor.name].num_bytes
        if tensor.offset_bytes + num_bytes > size_bytes:
            raise InvalidCheckpoint(
                f"tensor {tensor.name!r} has {num_bytes} bytes from {tensor.offset_bytes} on, in an allocation of "
                f"{size_bytes} bytes"
            )


def _info(tensor: DeviceTensor) -> TensorInfo:
    item = NUMPY_DTYPES.get(tensor.dtype)
    shape = tensor.shape
    halves = 2 if tensor.dtype == "F4" else 1
    num_bytes = 0 if item is None else math.prod(shape) * item.itemsize // halves
    try:
        return checked_tensor(tensor.name, TensorInfo(dtype=tensor.dtype, shape=shape, data_offsets=(0, num_bytes)))
    except ValueError as error:
        raise InvalidCheckpoint(str(error)) from error

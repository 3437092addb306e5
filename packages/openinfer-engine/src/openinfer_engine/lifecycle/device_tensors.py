"""`DeviceTensors`: weights that another process has on a GPU, read tensor by tensor like those of a file.

Plain weights are copied from GPU to GPU, cut for a rank on the way. Codes and scales of quantised weights, and the few
vectors that stay in float32, go by way of the host, which lays them out wherever they come from.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from openinfer_core import InvalidCheckpoint
from openinfer_core.control import DeviceTensor
from openinfer_engine.weights.safetensors_file import NUMPY_DTYPES, TensorInfo, checked_tensor
from openinfer_kernels import ForeignMemory, ForeignWeight, HostArray

logger = logging.getLogger("openinfer.engine")


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

    def part(self, name: str) -> ForeignWeight:
        """A whole tensor where it is, for `Ops.upload_weight`; raises as `read`."""
        tensor, info = self._asked[name], self.tensors[name]
        return ForeignWeight.whole(
            self._memory[tensor.handle], tensor.offset_bytes, NUMPY_DTYPES[info.dtype], info.array_shape
        )

    def check_unwritten(self) -> None:
        """Nothing tells: the caller has promised it."""

    def close(self) -> None:
        """Idempotent."""
        on_device = by_host = 0
        while self._memory:
            _, memory = self._memory.popitem()
            memory.close()
            on_device, by_host = on_device + memory.device_bytes, by_host + memory.host_bytes
        if on_device or by_host:
            logger.info(
                "weights of another process: %.3f GB copied from GPU to GPU, %.3f GB by way of the host",
                on_device / 1e9,
                by_host / 1e9,
            )

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

"""NCCL, as much of it as ranks need: a thin layer over the C library, an extra of its own (`nccl13`, `nccl12`).

CuPy's binding keeps the interpreter to itself while NCCL waits for other ranks, so no thread could abort it. Names,
numbers and structures are those of NVIDIA's `nccl.h`. All calls but the first two queue work on CuPy's current stream.

Two settings are made before the library reads them, unless the environment has them already: `NCCL_NVLS_ENABLE=0`, as
NVLink multicast is not used; and `NCCL_SOCKET_IFNAME=lo`, as all ranks are on this machine, so that nothing listens
where others could reach it. Ranks of several machines choose another one: `use_interface`. Engines that sleep make two
more: `register_no_buffers`.
"""

import ctypes
import functools
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import numpy as np

from openinfer_kernels.cuda.common.arrays import address
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy
from openinfer_kernels.errors import (
    CUDA_IS_BROUGHT_BY,
    NCCL_IS_BROUGHT_BY,
    ArrayMismatchError,
    CudaCallError,
    DeviceUnavailableError,
)
from openinfer_kernels.ops import Array

try:
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib
except ModuleNotFoundError as missing:
    raise DeviceUnavailableError(
        f"the CUDA operators need the module cuda.pathfinder, which is not installed: {CUDA_IS_BROUGHT_BY}"
    ) from missing

UNIQUE_ID_BYTES = 128
_SUCCESS = 0  # ncclSuccess
_SUM = 0  # ncclSum
_SETTINGS = {"NCCL_NVLS_ENABLE": "0", "NCCL_SOCKET_IFNAME": "lo"}
_NO_REGISTRATION = {"NCCL_GRAPH_REGISTER": "0", "NCCL_LOCAL_REGISTER": "0"}


class NcclError(CudaCallError):
    """NCCL refused a call; its text."""


class _DataType(IntEnum):
    """`ncclDataType_t`."""

    UINT8 = 1
    INT32 = 2
    INT64 = 4
    FLOAT16 = 6
    FLOAT32 = 7
    BFLOAT16 = 9


_DATA_TYPES: dict[np.dtype[Any], _DataType] = {
    np.dtype(np.uint8): _DataType.UINT8,
    np.dtype(np.int32): _DataType.INT32,
    np.dtype(np.int64): _DataType.INT64,
    np.dtype(np.float16): _DataType.FLOAT16,
    np.dtype(np.float32): _DataType.FLOAT32,
    bfloat16: _DataType.BFLOAT16,
}


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * UNIQUE_ID_BYTES)]


def use_interface(name: str) -> None:
    """Has NCCL talk to the ranks of other machines through a network interface; before `library` is first called.

    An interface that the environment names (`NCCL_SOCKET_IFNAME`) is left.
    """
    os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def register_no_buffers() -> None:
    """Has NCCL keep nothing of the arrays that it is given.

    Otherwise it registers those of captured collectives with the other ranks, and an engine that sleeps takes the
    memory away beneath them. So what the environment says of it does not count. All ranks do or none does: where rings
    are connected, one that registers waits for the others to say so, too (`ncclTransportRingConnect`), for ever.

    Raises:
        DeviceUnavailableError: `library` was called before this: NCCL has read its settings, once for the process.
    """
    is_loaded = library.cache_info().currsize > 0
    if is_loaded and any(os.environ.get(name) != value for name, value in _NO_REGISTRATION.items()):
        raise DeviceUnavailableError(
            "NCCL registers arrays in this process, which has had several ranks on GPUs without --enable-sleep: start "
            "the engine that sleeps in a process of its own, or first"
        )
    os.environ.update(_NO_REGISTRATION)


@functools.cache
def library() -> ctypes.CDLL:
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        found = ctypes.CDLL(load_nvidia_dynamic_lib("nccl").abs_path)
    except (DynamicLibNotFoundError, OSError) as missing:
        raise DeviceUnavailableError(
            f"several ranks on GPUs need NCCL, which is not installed: {NCCL_IS_BROUGHT_BY}"
        ) from missing
    _declare(found)
    return found


def version() -> str:
    """The version of the library, as `2.28.9`."""
    number = ctypes.c_int()
    _check(library().ncclGetVersion(ctypes.byref(number)))
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


def unique_id() -> bytes:
    """What the ranks of a new group find each other by; a process that has it can take part."""
    made = _UniqueId()
    _check(library().ncclGetUniqueId(ctypes.byref(made)))
    return bytes(made)


class NcclGroup:
    """One rank's end of a group, on the device of the thread that makes it. Arrays are contiguous.

    Args:
        group_id: of `unique_id`; blocks until all ranks have come with it.
        rank: this rank.
        size: ranks of the group.

    Raises:
        NcclError: the group cannot be formed.
    """

    def __init__(self, group_id: bytes, *, rank: int, size: int) -> None:
        self._library = library()
        self._handle = ctypes.c_void_p()
        given = _UniqueId.from_buffer_copy(group_id)
        _check(self._library.ncclCommInitRank(ctypes.byref(self._handle), size, given, rank))

    def all_reduce(self, source: Array, target: Array) -> None:
        """The sum over all ranks; NCCL rounds between two ranks' addition and the next rank's."""
        kind = _data_type(source)
        _check(
            self._library.ncclAllReduce(
                address(source), address(target), source.size, kind, _SUM, self._handle, _stream()
            )
        )

    def all_gather(self, source: Array, target: Array) -> None:
        """`target [size, ...]` of all ranks' `source [...]`."""
        kind = _data_type(source)
        _check(
            self._library.ncclAllGather(address(source), address(target), source.size, kind, self._handle, _stream())
        )

    def broadcast(self, array: Array, *, root: int) -> None:
        where, kind = address(array), _data_type(array)
        _check(self._library.ncclBroadcast(where, where, array.size, kind, root, self._handle, _stream()))

    def exchange(self, source: Array, target: Array) -> None:
        """Element `j` of `source [size, ...]` goes to rank `j`; element `i` of `target` comes from rank `i`."""
        size, kind, stream = len(source), _data_type(source), _stream()
        count = source.size // size
        step = count * source.itemsize
        # In one group, as a rank whose send waits for a receive that its peer has not queued would wait for good.
        with self.together():
            for rank in range(size):
                offset = rank * step
                _check(self._library.ncclSend(address(source) + offset, count, kind, rank, self._handle, stream))
                _check(self._library.ncclRecv(address(target) + offset, count, kind, rank, self._handle, stream))

    def take_abort(self) -> Callable[[], None]:
        """Takes the group out of use and returns what ends its running collectives and frees it, on any thread.

        That returns when all graphs with its collectives are gone.
        """
        handle, self._handle = self._handle, ctypes.c_void_p()
        # The handle is gone from the group already, so that `close` does not free it a second time.
        return lambda: self._library.ncclCommAbort(handle) if handle else None

    def close(self) -> None:
        """Frees the group, once all ranks' work is done and no graph with its collectives is left. Idempotent."""
        handle, self._handle = self._handle, ctypes.c_void_p()
        if handle:
            _check(self._library.ncclCommDestroy(handle))

    @contextmanager
    def together(self) -> Generator[None]:
        """What is called within it is queued at its end, as one kernel where NCCL can."""
        _check(self._library.ncclGroupStart())
        try:
            yield
        except BaseException:
            # Else all later calls of this thread would belong to it, an abort's and those of other groups too.
            self._library.ncclGroupEnd()
            raise
        _check(self._library.ncclGroupEnd())


def _data_type(array: Array) -> _DataType:
    kind = _DATA_TYPES.get(array.dtype)
    if kind is None or not array.flags.c_contiguous:
        layout = "contiguous" if array.flags.c_contiguous else "not contiguous"
        raise ArrayMismatchError(
            f"NCCL exchanges contiguous arrays of {', '.join(str(each) for each in _DATA_TYPES)}, not one of "
            f"{array.dtype} that is {layout}"
        )
    return kind


def _stream() -> int:
    return cupy.cuda.get_current_stream().ptr


def _check(status: int) -> None:
    if status != _SUCCESS:
        text = library().ncclGetErrorString(status).decode()
        last = library().ncclGetLastError(None)
        raise NcclError(f"NCCL answered: {text}" + (f" ({last.decode().strip()})" if last else ""))


def _declare(found: ctypes.CDLL) -> None:
    pointer, count, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    signatures: dict[str, list[Any]] = {
        "ncclGetVersion": [pointer],
        "ncclGetUniqueId": [pointer],
        "ncclCommInitRank": [pointer, number, _UniqueId, number],
        "ncclCommDestroy": [pointer],
        "ncclCommAbort": [pointer],
        "ncclAllReduce": [pointer, pointer, count, number, number, pointer, pointer],
        "ncclAllGather": [pointer, pointer, count, number, pointer, pointer],
        "ncclBroadcast": [pointer, pointer, count, number, number, pointer, pointer],
        "ncclSend": [pointer, count, number, number, pointer, pointer],
        "ncclRecv": [pointer, count, number, number, pointer, pointer],
        "ncclGroupStart": [],
        "ncclGroupEnd": [],
        "ncclGetErrorString": [number],
        "ncclGetLastError": [pointer],
    }
    for name, arguments in signatures.items():
        function = getattr(found, name)
        function.argtypes = arguments
        function.restype = ctypes.c_char_p if name in ("ncclGetErrorString", "ncclGetLastError") else number

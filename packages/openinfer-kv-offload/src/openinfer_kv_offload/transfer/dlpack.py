"""Memory of another library's array, by DLPack, also of dtypes that NumPy has no name for (bfloat16, FP8).

The structure is `DLManagedTensor` of dlpack.h: github.com/dmlc/dlpack, version 0.8, which every exporter still offers.
"""

import ctypes
import itertools
import math
from typing import Any

import numpy as np

from openinfer_kv_cache import KvTierError

_HOST_DEVICES = (1, 3)  # kDLCPU, and kDLCUDAHost: memory of this machine that is locked for a GPU
_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
_EXACT_CODES = {10: "float8_e4m3fn", 12: "float8_e5m2"}


class DlTensor(ctypes.Structure):
    """`DLTensor` of dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype_code", ctypes.c_uint8),
        ("dtype_bits", ctypes.c_uint8),
        ("dtype_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def dlpack_bytes(array: Any) -> "tuple[np.ndarray[Any, Any], tuple[int, ...], str]":
    """The bytes of an array with `__dlpack__`, its shape and the name of its dtype; nothing is copied.

    Returns:
        Writable uint8 `[bytes]`, which keep the array's memory alive.

    Raises:
        KvTierError: it is not in this machine's memory, not C-contiguous, or its library does not hand it out.
    """
    kind = type(array).__name__
    try:
        device_type, _ = array.__dlpack_device__()
        if int(device_type) not in _HOST_DEVICES:
            raise KvTierError(f"a pool of type {kind} is on a device; it must be in this machine's memory")
        capsule = array.__dlpack__()
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise KvTierError(
            f"a pool of type {kind} cannot be viewed: {error}; it must be in this machine's memory, and writable"
        ) from error
    tensor = DlTensor.from_address(pointer_of(capsule))
    shape = tuple(tensor.shape[: tensor.ndim])
    if tensor.strides and not _is_c_contiguous(shape, tensor.strides[: tensor.ndim]):
        raise KvTierError(f"the pool of shape {shape} is not C-contiguous; blocks are moved as a whole")
    num_bytes = math.prod(shape) * tensor.dtype_bits * tensor.dtype_lanes // 8
    if not num_bytes:
        return np.zeros(0, np.uint8), shape, _dtype_name(tensor)
    memory: Any = (ctypes.c_ubyte * num_bytes).from_address(tensor.data + tensor.byte_offset)
    # Never renamed to "used_dltensor", so its end calls the exporter's deleter: with the last view of the memory.
    memory.capsule = capsule
    return np.frombuffer(memory, np.uint8), shape, _dtype_name(tensor)


def pointer_of(capsule: Any) -> int:
    """The address of a capsule's `DLManagedTensor`, which begins with its tensor."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype = ctypes.c_void_p
    get.argtypes = (ctypes.py_object, ctypes.c_char_p)
    return int(get(capsule, b"dltensor"))


def _dtype_name(tensor: DlTensor) -> str:
    code, bits = tensor.dtype_code, tensor.dtype_bits
    if code in _EXACT_CODES:
        return _EXACT_CODES[code]
    name = _CODES.get(code, f"dlpack{code}_")
    return name if name == "bool" else f"{name}{bits}"


def _is_c_contiguous(shape: tuple[int, ...], strides: list[int]) -> bool:
    wanted = itertools.accumulate(reversed(shape), lambda a, b: a * b, initial=1)
    return 0 in shape or all(
        size == 1 or stride == want
        for size, stride, want in zip(reversed(shape), reversed(strides), wanted, strict=False)
    )

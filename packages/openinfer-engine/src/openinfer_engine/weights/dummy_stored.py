"""Dummy values of tensors that are no plain weights: random codes, ids, and scales in their own dtypes."""

import math

import numpy as np

from openinfer_engine.weights.safetensors_file import NUMPY_DTYPES
from openinfer_engine.weights.stored_tensor import RandomIds, Repeated, StoredTensor
from openinfer_kernels import HostArray

_E8M0_BIAS = 127


def dummy_array(spec: StoredTensor, *, seed: int) -> HostArray:
    """All of a tensor, in its first dtype; not to be written to."""
    dtype = NUMPY_DTYPES[spec.dtypes[0]]
    if isinstance(spec.dummy, Repeated):
        values = _encoded(spec.dummy.values, spec.dtypes[0])
        return np.broadcast_to(values, spec.shape) if values.size == 1 else np.resize(values, spec.shape)
    rng = np.random.default_rng(seed)
    if isinstance(spec.dummy, RandomIds):
        first = rng.integers(0, spec.dummy.bound, (*spec.shape[:-1], 1))
        return ((first + np.arange(spec.shape[-1])) % spec.dummy.bound).astype(dtype)
    found = np.frombuffer(rng.bytes(math.prod(spec.shape) * dtype.itemsize), np.uint8)
    return (found & np.uint8(spec.dummy.mask)).view(dtype).reshape(spec.shape)


def _encoded(values: tuple[float, ...], dtype: str) -> HostArray:
    """Numbers as the format stores them; E8M0 has the nearest powers of two."""
    numbers = np.array(values, np.float64)
    match dtype:
        case "F8_E8M0":
            return (np.rint(np.log2(numbers)) + _E8M0_BIAS).astype(np.uint8)
        case "BF16":
            return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        case _:
            return numbers.astype(NUMPY_DTYPES[dtype])

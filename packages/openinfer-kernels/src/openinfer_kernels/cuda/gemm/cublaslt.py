"""cuBLASLt, as much of it as products need: a thin layer over the C library that CuPy has loaded already.

nvmath-python's binding offers the same and more, but importing it takes 0.4 s and 80 MB of an engine's start for the
libraries of all its other modules. Names, numbers and structures are those of NVIDIA's `cublasLt.h`.
"""

import ctypes
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np

from openinfer_kernels.errors import CUDA_IS_BROUGHT_BY, CudaCallError, DeviceUnavailableError

try:
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib
except ModuleNotFoundError as missing:
    raise DeviceUnavailableError(
        f"the CUDA operators need the module cuda.pathfinder, which is not installed: {CUDA_IS_BROUGHT_BY}"
    ) from missing

_SUCCESS = 0  # CUBLAS_STATUS_SUCCESS


class CublasLtError(CudaCallError):
    """cuBLASLt refused a call; its name of the status."""


class MatmulDescAttribute(IntEnum):
    """`cublasLtMatmulDescAttributes_t`."""

    TRANSA = 3
    EPILOGUE = 7
    BIAS_POINTER = 8
    A_SCALE_POINTER = 17
    B_SCALE_POINTER = 18
    FAST_ACCUM = 25
    A_SCALE_MODE = 31
    B_SCALE_MODE = 32


class MatrixLayoutAttribute(IntEnum):
    """`cublasLtMatrixLayoutAttribute_t`."""

    COLS = 3
    BATCH_COUNT = 5
    STRIDED_BATCH_OFFSET = 6


class MatmulPreferenceAttribute(IntEnum):
    """`cublasLtMatmulPreferenceAttributes_t`."""

    MAX_WORKSPACE_BYTES = 1
    REDUCTION_SCHEME_MASK = 3
    MIN_ALIGNMENT_A_BYTES = 5
    MIN_ALIGNMENT_B_BYTES = 6
    MIN_ALIGNMENT_C_BYTES = 7
    MIN_ALIGNMENT_D_BYTES = 8


class Epilogue(IntEnum):
    """`cublasLtEpilogue_t`."""

    DEFAULT = 1
    BIAS = 4


class MatrixScale(IntEnum):
    """`cublasLtMatmulMatrixScale_t`: what of a matrix of FP8 shares a float32 scale."""

    OUTER_VEC_32F = 3
    """A row of the weight, or a token."""
    VEC128_32F = 4
    """128 values along K of a token; the scales of all tokens lie side by side."""
    BLK128X128_32F = 5
    """128 x 128 values, K first; their rows begin at multiples of four."""


class ReductionScheme(IntEnum):
    """`cublasLtReductionScheme_t`: how partial sums of a divided K are added up."""

    NONE = 0
    INPLACE = 1
    COMPUTE_TYPE = 2
    OUTPUT_TYPE = 4


HEURISTIC_RESULT: np.dtype[Any] = np.dtype(
    [
        ("algo", np.uint64, 8),
        ("workspace_size", np.uint64),
        ("state", np.int32),
        ("waves_count", np.float32),
        ("reserved", np.int32, 4),
    ]
)
"""`cublasLtMatmulHeuristicResult_t`."""


def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(load_nvidia_dynamic_lib("cublasLt").abs_path)
    except (DynamicLibNotFoundError, OSError) as missing:
        raise DeviceUnavailableError(
            f"the CUDA operators need cuBLASLt, which is not installed: {CUDA_IS_BROUGHT_BY}"
        ) from missing


_lt = _library()
_lt.cublasLtGetVersion.restype = ctypes.c_size_t
_lt.cublasLtGetStatusName.restype = ctypes.c_char_p


def _bound(name: str, *types: Any) -> Callable[..., None]:
    """A function that raises what it answers, unless that is success."""
    function = getattr(_lt, name)
    function.argtypes = types

    def call(*arguments: Any) -> None:
        status = function(*arguments)
        if status != _SUCCESS:
            raise CublasLtError(f"{name} answered {_lt.cublasLtGetStatusName(status).decode()}")

    return call


_pointer, _int, _size, _i64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_int64
_create = _bound("cublasLtCreate", _pointer)
_desc_create = _bound("cublasLtMatmulDescCreate", _pointer, _int, _int)
_layout_create = _bound("cublasLtMatrixLayoutCreate", _pointer, _int, ctypes.c_uint64, ctypes.c_uint64, _i64)
_preference_create = _bound("cublasLtMatmulPreferenceCreate", _pointer)

destroy = _bound("cublasLtDestroy", _pointer)
"""`(handle)`."""
matmul_desc_destroy = _bound("cublasLtMatmulDescDestroy", _pointer)
"""`(description)`."""
matrix_layout_destroy = _bound("cublasLtMatrixLayoutDestroy", _pointer)
"""`(layout)`."""
matmul_preference_destroy = _bound("cublasLtMatmulPreferenceDestroy", _pointer)
"""`(preference)`."""
matmul_desc_set_attribute = _bound("cublasLtMatmulDescSetAttribute", _pointer, _int, _pointer, _size)
"""`(description, attribute, address of the value, its bytes)`."""
matrix_layout_set_attribute = _bound("cublasLtMatrixLayoutSetAttribute", _pointer, _int, _pointer, _size)
"""`(layout, attribute, address of the value, its bytes)`."""
matmul_preference_set_attribute = _bound("cublasLtMatmulPreferenceSetAttribute", _pointer, _int, _pointer, _size)
"""`(preference, attribute, address of the value, its bytes)`."""
matmul_algo_get_heuristic = _bound("cublasLtMatmulAlgoGetHeuristic", *[_pointer] * 7, _int, _pointer, _pointer)
"""`(handle, description, layouts of A, B, C, D, preference, most, address of results, address of their number)`."""
matmul = _bound("cublasLtMatmul", *[_pointer] * 13, _pointer, _size, _pointer)
"""`(handle, description, alpha, A, its layout, B, its layout, beta, C, its layout, D, its layout, algorithm, workspace,
its bytes, stream)`; everything by address."""


def create() -> int:
    return _made(_create)


def get_version() -> int:
    """`131000` for 13.10.0."""
    return _lt.cublasLtGetVersion()


def matmul_desc_create(compute_type: int, scale_type: int) -> int:
    """A description of products: `cublasComputeType_t`, and the `cudaDataType` of the factors."""
    return _made(_desc_create, compute_type, scale_type)


def matrix_layout_create(dtype: int, rows: int, columns: int, leading: int) -> int:
    """A matrix by columns: its `cudaDataType`, sizes, and values from one column to the next."""
    return _made(_layout_create, dtype, rows, columns, leading)


def matmul_preference_create() -> int:
    return _made(_preference_create)


def _made(make: Callable[..., None], *arguments: int) -> int:
    made = ctypes.c_void_p()
    make(ctypes.byref(made), *arguments)
    if made.value is None:
        raise CublasLtError("cuBLASLt made nothing")
    return made.value

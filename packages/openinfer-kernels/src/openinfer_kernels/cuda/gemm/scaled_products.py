"""Products of codes of eight bits through cuBLASLt: E4M3 with scales of both operands, INT8 with sums in int32.

As in `products.py` arrays by rows are matrices by columns, of which the weight is marked as transposed; FP8 asks for
that order. With scales per 128 of K the library adds up partial sums in float32, scaled, after each 128; with those of
rows and tokens it sums all of K in the tensor cores (`FAST_ACCUM`), whose sums keep fewer bits than float32.
"""

from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from openinfer_kernels.cuda.common.arrays import address
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy
from openinfer_kernels.cuda.gemm import cublaslt
from openinfer_kernels.cuda.gemm.algorithms import class_of
from openinfer_kernels.cuda.gemm.products import WORKSPACE_BYTES, Algorithm
from openinfer_kernels.errors import ArrayMismatchError, CudaCallError
from openinfer_kernels.ops import Array

TOKENS_ALIGNMENT = 16
"""Tokens of a product are a multiple of this."""
_COMPUTE_FLOAT32, _COMPUTE_INT32 = 68, 72  # CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32I
_FLOAT32, _BFLOAT16, _INT8, _INT32, _E4M3 = 0, 14, 3, 10, 28  # cudaDataType
_Mode = cublaslt.MatrixScale


class Scaling(StrEnum):
    """What the operands are, and what of them shares a scale."""

    BLOCKS = "blocks"
    """E4M3: 128 x 128 of the weight, 128 of a token."""
    ROWS = "rows"
    """E4M3: a row of the weight, a token."""
    INTEGERS = "integers"
    """INT8 without scales."""


_MODES = {Scaling.BLOCKS: (_Mode.BLK128X128_32F, _Mode.VEC128_32F), Scaling.ROWS: (_Mode.OUTER_VEC_32F,) * 2}


class _Key(NamedTuple):
    scaling: Scaling
    n: int
    k: int


class _Problem:
    """Products with weights of one shape. Closed by its maker."""

    def __init__(self, key: _Key) -> None:
        is_integer = key.scaling is Scaling.INTEGERS
        operands, result = (_INT8, _INT32) if is_integer else (_E4M3, _BFLOAT16)
        compute, factors = (_COMPUTE_INT32, _INT32) if is_integer else (_COMPUTE_FLOAT32, _FLOAT32)
        self.algorithms: dict[int, Algorithm] = {}
        self.description: int = cublaslt.matmul_desc_create(compute, factors)
        self.weight: int = cublaslt.matrix_layout_create(operands, key.k, key.n, key.k)
        self.x: int = cublaslt.matrix_layout_create(operands, key.k, 1, key.k)
        self.y: int = cublaslt.matrix_layout_create(result, key.n, 1, key.n)
        attributes = cublaslt.MatmulDescAttribute
        self.describe(attributes.TRANSA, np.int32(1))
        if key.scaling in _MODES:
            weight_mode, x_mode = _MODES[key.scaling]
            self.describe(attributes.A_SCALE_MODE, np.int32(weight_mode))
            self.describe(attributes.B_SCALE_MODE, np.int32(x_mode))
            self.describe(attributes.FAST_ACCUM, np.int8(key.scaling is Scaling.ROWS))

    def describe(self, attribute: int, value: "np.generic[Any]") -> None:
        stored = np.array(value)
        cublaslt.matmul_desc_set_attribute(self.description, attribute, stored.ctypes.data, stored.nbytes)

    def set_num_tokens(self, num_tokens: int) -> None:
        for layout in (self.x, self.y):
            stored = np.array(np.uint64(num_tokens))
            attribute = cublaslt.MatrixLayoutAttribute.COLS
            cublaslt.matrix_layout_set_attribute(layout, attribute, stored.ctypes.data, stored.nbytes)

    def set_scales(self, weight: Array, x: Array) -> None:
        self.describe(cublaslt.MatmulDescAttribute.A_SCALE_POINTER, np.uint64(address(weight)))
        self.describe(cublaslt.MatmulDescAttribute.B_SCALE_POINTER, np.uint64(address(x)))

    def close(self) -> None:
        for layout in (self.weight, self.x, self.y):
            cublaslt.matrix_layout_destroy(layout)
        cublaslt.matmul_desc_destroy(self.description)


class ScaledProducts:
    """The products on the current device, which share a workspace: one stream at a time."""

    def __init__(self) -> None:
        self._handle: int = cublaslt.create()
        self._workspace = cupy.empty(WORKSPACE_BYTES, np.uint8)
        self._float_factors = np.array([1, 0], np.float32)  # of the product, and of what y held before
        self._int_factors = np.array([1, 0], np.int32)
        self._problems: dict[_Key, _Problem] = {}

    def multiply(
        self,
        scaling: Scaling,
        x: Array,
        weight: Array,
        out: Array,
        scales: tuple[Array, Array] | None = None,
    ) -> None:
        """Writes `x [T, k] @ weight [n, k].T` into `out [T, n]`, BF16, or int32 for `INTEGERS`.

        Args:
            scaling: of all of these.
            x: codes, a byte each; T a multiple of `TOKENS_ALIGNMENT`.
            weight: codes; n and k multiples of 16.
            out: written.
            scales: float32, of the weight and of `x`. `BLOCKS`: `[n / 128, k / 128 or more]`, a multiple of four, and
                `[k / 128, T]`; `ROWS`: `[n]` and `[T]`; `INTEGERS`: none.

        Raises:
            ArrayMismatchError: cuBLASLt has no algorithm.
        """
        key = _Key(scaling, *weight.shape)
        problem = self._problems.get(key)
        if problem is None:
            problem = self._problems[key] = _Problem(key)
        if scales is not None:
            problem.set_scales(*scales)
        algorithm = self._algorithm(problem, key, len(x))
        problem.set_num_tokens(len(x))
        factors = self._int_factors if scaling is Scaling.INTEGERS else self._float_factors
        one = factors.ctypes.data
        try:
            cublaslt.matmul(
                self._handle,
                problem.description,
                one,
                address(weight),
                problem.weight,
                address(x),
                problem.x,
                one + factors.itemsize,
                address(out),
                problem.y,
                address(out),
                problem.y,
                algorithm.address,
                address(self._workspace),
                WORKSPACE_BYTES,
                cupy.cuda.get_current_stream().ptr,
            )
        except cublaslt.CublasLtError as refused:
            raise CudaCallError(f"cuBLASLt: {refused}, for {len(x)} tokens and {key}") from refused

    def close(self) -> None:
        for problem in self._problems.values():
            problem.close()
        self._problems.clear()
        cublaslt.destroy(self._handle)

    def _algorithm(self, problem: _Problem, key: _Key, num_tokens: int) -> Algorithm:
        """The one that the library recommends: of scaled products it has one or few."""
        tokens = class_of(num_tokens)
        if tokens not in problem.algorithms:
            problem.set_num_tokens(tokens)
            problem.algorithms[tokens] = self._recommended(problem, key)
        return problem.algorithms[tokens]

    def _recommended(self, problem: _Problem, key: _Key) -> Algorithm:
        found: Any = np.zeros(1, cublaslt.HEURISTIC_RESULT)
        count, workspace = np.zeros(1, np.int32), np.array(np.uint64(WORKSPACE_BYTES))
        preference = cublaslt.matmul_preference_create()
        try:
            cublaslt.matmul_preference_set_attribute(
                preference,
                cublaslt.MatmulPreferenceAttribute.MAX_WORKSPACE_BYTES,
                workspace.ctypes.data,
                workspace.nbytes,
            )
            cublaslt.matmul_algo_get_heuristic(
                self._handle,
                problem.description,
                problem.weight,
                problem.x,
                problem.y,
                problem.y,
                preference,
                1,
                found.ctypes.data,
                count.ctypes.data,
            )
        except cublaslt.CublasLtError as refused:
            raise ArrayMismatchError(f"cuBLASLt has no algorithm for {key}: {refused}") from refused
        finally:
            cublaslt.matmul_preference_destroy(preference)
        if not count[0] or found["state"][0]:
            raise ArrayMismatchError(f"cuBLASLt has no algorithm for {key}")
        return Algorithm(found["algo"][0])


def result_dtype(scaling: Scaling) -> "np.dtype[Any]":
    """Of `out`."""
    return np.dtype(np.int32) if scaling is Scaling.INTEGERS else bfloat16

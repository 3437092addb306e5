"""Matrix products through cuBLASLt: one problem per weight shape, its candidate algorithms, and running one of them.

cuBLASLt thinks in columns. `y [m, n] = x [m, k] @ weight [n, k].T` by rows is `y' [n, m] = weight'.T @ x'` by columns
with `weight' [k, n]` and `x' [k, m]`, the arrays as they lie in memory: only the weight is marked as transposed.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from openinfer_kernels.cuda.common.arrays import address
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy
from openinfer_kernels.cuda.gemm import cublaslt
from openinfer_kernels.errors import ArrayMismatchError, CudaCallError
from openinfer_kernels.ops import Array

WORKSPACE_BYTES = 32 << 20
"""What NVIDIA recommends for Hopper."""
_COMPUTE_FLOAT32 = 68  # CUBLAS_COMPUTE_32F
_FLOAT32, _BFLOAT16 = 0, 14  # CUDA_R_32F, CUDA_R_16BF


class Algorithm:
    """An opaque `cublasLtMatmulAlgo_t`, good for one version of cuBLASLt."""

    __slots__ = ("address", "words")

    def __init__(self, words: NDArray[np.uint64]) -> None:
        self.words = np.array(words, np.uint64)
        self.address: int = self.words.ctypes.data


class WeightShape(NamedTuple):
    """What a problem is made for, whatever the number of tokens."""

    n: int
    k: int
    biased: bool
    aligned: bool
    """Whether all rows begin at multiples of 16 bytes."""
    is_float32: bool
    """Whether the result is float32, the sums as they are; else BF16."""
    groups: int = 1
    """So many matrices, each for its piece of every row of x and y."""


class Problem:
    """Products with weights of one shape, as cuBLASLt is told about them. Closed by its maker."""

    def __init__(self, shape: WeightShape) -> None:
        self.shape = shape
        self._num_tokens = 1
        self.description: int = cublaslt.matmul_desc_create(_COMPUTE_FLOAT32, _FLOAT32)
        self._describe(cublaslt.MatmulDescAttribute.TRANSA, np.int32(1))
        if shape.biased:
            self._describe(cublaslt.MatmulDescAttribute.EPILOGUE, np.uint32(cublaslt.Epilogue.BIAS))
        dtype, groups = _FLOAT32 if shape.is_float32 else _BFLOAT16, shape.groups
        self.weight: int = cublaslt.matrix_layout_create(_BFLOAT16, shape.k, shape.n, shape.k)
        self.x: int = cublaslt.matrix_layout_create(_BFLOAT16, shape.k, 1, groups * shape.k)
        self.y: int = cublaslt.matrix_layout_create(dtype, shape.n, 1, groups * shape.n)
        if groups > 1:
            for layout, stride in ((self.weight, shape.n * shape.k), (self.x, shape.k), (self.y, shape.n)):
                _lay_out(layout, cublaslt.MatrixLayoutAttribute.BATCH_COUNT, np.int32(groups))
                _lay_out(layout, cublaslt.MatrixLayoutAttribute.STRIDED_BATCH_OFFSET, np.int64(stride))

    def set_num_tokens(self, num_tokens: int) -> None:
        if num_tokens == self._num_tokens:
            return
        self._num_tokens = num_tokens
        for layout in (self.x, self.y):
            _lay_out(layout, cublaslt.MatrixLayoutAttribute.COLS, np.uint64(num_tokens))

    def set_bias(self, bias: Array) -> None:
        self._describe(cublaslt.MatmulDescAttribute.BIAS_POINTER, np.uint64(address(bias)))

    def close(self) -> None:
        for layout in (self.weight, self.x, self.y):
            cublaslt.matrix_layout_destroy(layout)
        cublaslt.matmul_desc_destroy(self.description)

    def _describe(self, attribute: int, value: "np.generic[Any]") -> None:
        stored = np.array(value)
        cublaslt.matmul_desc_set_attribute(self.description, attribute, stored.ctypes.data, stored.nbytes)


def _lay_out(layout: int, attribute: cublaslt.MatrixLayoutAttribute, value: "np.generic[Any]") -> None:
    stored = np.array(value)
    cublaslt.matrix_layout_set_attribute(layout, attribute, stored.ctypes.data, stored.nbytes)


class Products:
    """cuBLASLt on the current device, with the workspace that its products share: one stream at a time."""

    def __init__(self) -> None:
        self._handle: int = cublaslt.create()
        self._workspace = cupy.empty(WORKSPACE_BYTES, np.uint8)
        self._factors = np.array([1, 0], np.float32)  # of the product, and of what y held before
        self._one: int = self._factors.ctypes.data
        self._zero = self._one + self._factors.itemsize

    @property
    def version(self) -> int:
        """The version of cuBLASLt; algorithms of another version mean nothing."""
        return cublaslt.get_version()

    def candidates(self, problem: Problem, *, most: int, may_divide_k: bool = True) -> list[Algorithm]:
        """Algorithms that cuBLASLt holds for best, best first; partial sums, where K may be divided, stay in float32.

        Raises:
            ArrayMismatchError: it has none for this shape.
        """
        alignment = np.uint32(16 if problem.shape.aligned else bfloat16.itemsize)
        attributes, schemes = cublaslt.MatmulPreferenceAttribute, cublaslt.ReductionScheme
        wanted = {
            attributes.MAX_WORKSPACE_BYTES: np.uint64(WORKSPACE_BYTES),
            attributes.REDUCTION_SCHEME_MASK: np.uint32(schemes.COMPUTE_TYPE if may_divide_k else schemes.NONE),
            attributes.MIN_ALIGNMENT_A_BYTES: alignment,
            attributes.MIN_ALIGNMENT_B_BYTES: alignment,
            attributes.MIN_ALIGNMENT_C_BYTES: alignment,
            attributes.MIN_ALIGNMENT_D_BYTES: alignment,
        }
        preference = cublaslt.matmul_preference_create()
        try:
            for attribute, value in wanted.items():
                stored = np.array(value)
                cublaslt.matmul_preference_set_attribute(preference, attribute, stored.ctypes.data, stored.nbytes)
            return self._ask(problem, preference, most)
        except cublaslt.CublasLtError as refused:
            raise ArrayMismatchError(f"cuBLASLt has no algorithm for {problem.shape}: {refused}") from refused
        finally:
            cublaslt.matmul_preference_destroy(preference)

    def run(self, problem: Problem, algorithm: Algorithm, x: Array, weight: Array, y: Array) -> None:
        try:
            cublaslt.matmul(
                self._handle,
                problem.description,
                self._one,
                address(weight),
                problem.weight,
                address(x),
                problem.x,
                self._zero,
                address(y),
                problem.y,
                address(y),
                problem.y,
                algorithm.address,
                address(self._workspace),
                WORKSPACE_BYTES,
                cupy.cuda.get_current_stream().ptr,
            )
        except cublaslt.CublasLtError as refused:
            raise CudaCallError(f"cuBLASLt: {refused}, for {len(x)} tokens and {problem.shape}") from refused

    def close(self) -> None:
        cublaslt.destroy(self._handle)

    def _ask(self, problem: Problem, preference: int, most: int) -> list[Algorithm]:
        found: Any = np.zeros(most, cublaslt.HEURISTIC_RESULT)
        count = np.zeros(1, np.int32)
        layouts = (problem.weight, problem.x, problem.y, problem.y)
        cublaslt.matmul_algo_get_heuristic(
            self._handle, problem.description, *layouts, preference, most, found.ctypes.data, count.ctypes.data
        )
        usable = found[: count[0]][found["state"][: count[0]] == 0]
        return [Algorithm(words) for words in usable["algo"]]

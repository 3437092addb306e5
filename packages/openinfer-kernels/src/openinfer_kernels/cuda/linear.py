"""Products with weights stored `[out, in]`, and the gate of SwiGLU.

Few tokens go to our own kernel where it serves (docs/kernels.md says when and why), everything else to cuBLASLt.
"""

import ctypes
from collections.abc import Generator
from contextlib import contextmanager

from openinfer_kernels.cuda.algorithms import Algorithms, Key, class_of
from openinfer_kernels.cuda.arrays import fits_vectors, require
from openinfer_kernels.cuda.decode_gemm import DecodeGemm
from openinfer_kernels.cuda.device import Device
from openinfer_kernels.cuda.libraries import bfloat16, cupy
from openinfer_kernels.cuda.products import Algorithm, Problem, Products, WeightShape
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array

_THREADS = 256
_CANDIDATES = 12


class Linear:
    """The products on one device.

    A weight is what was uploaded, never an operator's result: what multiplies few tokens reads it while the operators
    ahead on the stream still run.
    """

    def __init__(self, device: Device, decode_gemm: DecodeGemm) -> None:
        self._decode_gemm = decode_gemm
        self._gate_vectors = device.kernel("linear", "swiglu_vectors")
        self._gate_singles = device.kernel("linear", "swiglu_singles")
        self._products = Products()
        self._algorithms = Algorithms(device, version=self._products.version)
        self._problems: dict[WeightShape, Problem] = {}
        self._measures = False

    def linear(self, x: Array, weight: Array, bias: Array | None = None) -> Array:
        """`x [T, in] @ weight [out, in].T (+ bias [out])`: `[T, out]`, rounded once.

        Raises:
            ArrayMismatchError: another dtype, layout or shape.
        """
        _check(x, weight, bias)
        out = cupy.empty((x.shape[0], weight.shape[0]), bfloat16)
        if bias is None and self._decode_gemm.serves(x, weight):
            self._decode_gemm.linear(x, weight, out)
        else:
            self._multiply(x, weight, bias, out)
        return out

    def linear_swiglu(self, x: Array, gate_up: Array) -> Array:
        """`silu(x @ gate.T) * (x @ up.T)` for `gate_up [2 F, h]`: `[T, F]`.

        Raises:
            ArrayMismatchError: another dtype, layout or shape.
        """
        _check(x, gate_up, None)
        num_tokens, width = x.shape[0], gate_up.shape[0] // 2
        out = cupy.empty((num_tokens, width), bfloat16)
        if self._decode_gemm.serves(x, gate_up):
            self._decode_gemm.linear_swiglu(x, gate_up, out)
        else:
            self._gate(self.linear(x, gate_up), out)
        return out

    @contextmanager
    def tuning(self) -> Generator[None]:
        """Within it, the first product of each shape measures algorithms instead of taking the recommended one.

        For the warm-up, never while a stream captures. What was measured is kept for later runs.
        """
        self._measures = True
        try:
            yield
        finally:
            self._measures = False
            self._algorithms.save()

    def close(self) -> None:
        """Gives back what cuBLASLt holds."""
        for problem in self._problems.values():
            problem.close()
        self._problems.clear()
        self._products.close()

    def _gate(self, both: Array, out: Array) -> None:
        num_tokens, width = out.shape
        vectors = width % 8 == 0
        kernel, accesses = (self._gate_vectors, width // 8) if vectors else (self._gate_singles, width)
        grid = (num_tokens, -(-accesses // _THREADS), 1)
        kernel(grid, (_THREADS, 1, 1), [both, out, ctypes.c_int(width)], overlap=True)

    def _multiply(self, x: Array, weight: Array, bias: Array | None, out: Array) -> None:
        shape = _weight_shape(x, weight, bias)
        problem = self._problems.get(shape)
        if problem is None:
            problem = self._problems[shape] = Problem(shape)
        if bias is not None:
            problem.set_bias(bias)
        key = class_of(len(x)), shape
        algorithm = self._algorithms.find(key)
        if algorithm is None or (self._measures and not self._algorithms.is_measured(key)):
            algorithm = self._choose(key, problem, x, weight, out)
        problem.set_num_tokens(len(x))
        self._products.run(problem, algorithm, x, weight, out)

    def _choose(self, key: Key, problem: Problem, x: Array, weight: Array, out: Array) -> Algorithm:
        problem.set_num_tokens(key[0])
        candidates = self._products.candidates(problem, most=_CANDIDATES if self._measures else 1)
        problem.set_num_tokens(len(x))
        if self._measures:
            self._algorithms.measure(key, candidates, lambda each: self._products.run(problem, each, x, weight, out))
        else:
            self._algorithms.recommend(key, candidates[0])
        found = self._algorithms.find(key)
        assert found is not None  # noqa: S101 - set just above
        return found


def _check(x: Array, weight: Array, bias: Array | None) -> None:
    require(x, bfloat16, ndim=2, what="x")
    require(weight, bfloat16, ndim=2, what="the weight")
    if x.shape[1] != weight.shape[1]:
        raise ArrayMismatchError(f"x {x.shape} and the weight {weight.shape} do not agree on the inner size")
    if bias is not None:
        require(bias, bfloat16, ndim=1, what="the bias")
        if bias.shape[0] != weight.shape[0]:
            raise ArrayMismatchError(f"the bias {bias.shape} is not as long as the weight {weight.shape} has rows")


def _weight_shape(x: Array, weight: Array, bias: Array | None) -> WeightShape:
    n, k = weight.shape
    return WeightShape(n, k, bias is not None, n % 8 == 0 and k % 8 == 0 and fits_vectors(x, weight))

"""Products through cuBLASLt with weights stored `[out, in]`: any shape, and the algorithm chosen by class of tokens."""

from collections.abc import Generator
from contextlib import contextmanager

import numpy as np

from openinfer_kernels.cuda.common.arrays import fits_vectors
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.gemm.algorithms import Algorithms, Key, class_of
from openinfer_kernels.cuda.gemm.products import Algorithm, Problem, Products, WeightShape
from openinfer_kernels.ops import Array

_CANDIDATES = 12


class LibraryProducts:
    """The products on one device, which share a workspace: one stream at a time."""

    def __init__(self, device: Device) -> None:
        self._products = Products()
        self._algorithms = Algorithms(device, version=self._products.version)
        self._problems: dict[WeightShape, Problem] = {}
        self._measures = False

    def multiply(self, x: Array, weight: Array, bias: Array | None, out: Array) -> None:
        """Writes `x [T, in] @ weight [out, in].T (+ bias [out])` into `out [T, out]`, BF16 or float32.

        Or a product per group: `x [T, G in]`, `weight [G, out, in]`, `out [T, G out]`.
        """
        shape = weight_shape(x, weight, bias, out)
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
        for problem in self._problems.values():
            problem.close()
        self._problems.clear()
        self._products.close()

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


def weight_shape(x: Array, weight: Array, bias: Array | None, out: Array) -> WeightShape:
    """What cuBLASLt is told about a product, but for the number of tokens."""
    *groups, n, k = weight.shape
    aligned = n % 8 == 0 and k % 8 == 0 and fits_vectors(x, weight)
    return WeightShape(n, k, bias is not None, aligned, out.dtype == np.float32, *groups)

"""Products whose rows have the same bits whatever the number of tokens.

An element of a product is one sum over K. Kernels that add it up in one accumulator, K ascending, 16 at a time, as
the tensor core takes it, agree in every bit, whatever their tiles are. What differs are those that divide K among
blocks, or take another instruction. So no algorithm here may divide K, and none is used before its result for random
tokens, in all places of its tiles, has been compared with a reference, bit for bit: `csrc/gemm/decode_gemm.cu` without
clusters where it serves, else cuBLASLt's first choice for few tokens. Where nothing for more tokens agrees with that,
as with rows that begin at odd addresses, they are multiplied in pieces of few.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager

import numpy as np

from openinfer_kernels.cuda.common.libraries import bfloat16, cupy
from openinfer_kernels.cuda.gemm.decode_gemm import DecodeGemm
from openinfer_kernels.cuda.gemm.library_products import weight_shape
from openinfer_kernels.cuda.gemm.products import Algorithm, Problem, Products, WeightShape
from openinfer_kernels.errors import ArrayMismatchError, CudaCallError
from openinfer_kernels.ops import Array

_CLASSES = (64, 256, 1024, 8192)
"""Up to so many tokens an algorithm is used; the last for all that are more."""
_CANDIDATES = 8
_PROBE_TOKENS = 32
_MOST_PROBED = 512
_LEAST_COMPARED, _MOST_PROBES = 1 << 17, 64
"""Elements of a result; and times that so many tokens are multiplied for that, where a weight has very few rows."""
_SEED = 2


class InvariantProducts:
    """The products on one device, which share a workspace: one stream at a time."""

    def __init__(self, decode_gemm: DecodeGemm) -> None:
        """`decode_gemm` makes the reference; it divides no K."""
        self._decode_gemm = decode_gemm
        self._products = Products()
        self._problems: dict[WeightShape, Problem] = {}
        self._chosen: dict[tuple[int, WeightShape], Algorithm | None] = {}  # None: in pieces of the first class
        self._chooses_all = False

    def multiply(self, x: Array, weight: Array, bias: Array | None, out: Array) -> None:
        """As `LibraryProducts.multiply`; raises `ArrayMismatchError` where no algorithm for few tokens agrees with the
        reference.
        """
        shape = weight_shape(x, weight, bias, out)
        problem = self._problems.get(shape)
        if problem is None:
            problem = self._problems[shape] = Problem(shape)
        if bias is not None:
            problem.set_bias(bias)
        most_tokens = next((most for most in _CLASSES if len(x) <= most), _CLASSES[-1])

        def find(most: int) -> Algorithm | None:
            if (most, shape) not in self._chosen:
                self._chosen[most, shape] = self._choose(
                    most, problem, weight, biased=bias is not None, dtype=out.dtype
                )
            return self._chosen[most, shape]

        for most in _CLASSES if self._chooses_all else ():
            find(most)
        algorithm, piece_tokens = find(most_tokens), max(1, len(x))
        if algorithm is None:
            algorithm, piece_tokens = find(_CLASSES[0]), _CLASSES[0]
        if algorithm is None:
            raise ArrayMismatchError(
                f"none of cuBLASLt's algorithms for {shape} agrees bit for bit with the first; this model cannot be "
                "served with batch invariance on this GPU"
            )
        for begin in range(0, len(x), piece_tokens):
            piece = x[begin : begin + piece_tokens]
            problem.set_num_tokens(len(piece))
            self._products.run(problem, algorithm, piece, weight, out[begin : begin + piece_tokens])

    @contextmanager
    def tuning(self) -> Generator[None]:
        """Within it, a shape's algorithms are chosen for any number of tokens as soon as it is met.

        Nothing is measured: two runs multiply alike, and so do two machines with one cuBLASLt.
        """
        self._chooses_all = True
        try:
            yield
        finally:
            self._chooses_all = False

    def close(self) -> None:
        for problem in self._problems.values():
            problem.close()
        self._problems.clear()
        self._products.close()

    def _choose(
        self, most_tokens: int, problem: Problem, weight: Array, *, biased: bool, dtype: "np.dtype[np.generic]"
    ) -> Algorithm | None:
        """The first of cuBLASLt's that agrees with the reference, if any; never while a stream captures."""
        # Results in BF16 hide what is rounded away: of few rows, more tokens are compared.
        num_probes = min(_MOST_PROBES, -(-_LEAST_COMPARED // (_PROBE_TOKENS * problem.shape.n)))
        probes = [_random_tokens(problem.shape.k, seed=_SEED + i) for i in range(num_probes)]
        repeats = -(-min(most_tokens, _MOST_PROBED) // _PROBE_TOKENS)

        def result_of(algorithm: Algorithm, x: Array) -> Array:
            out = cupy.empty((len(x), problem.shape.n), dtype)
            problem.set_num_tokens(len(x))
            self._products.run(problem, algorithm, x, weight, out)
            return out

        expected = [self._reference(few, problem, weight, result_of, biased=biased, dtype=dtype) for few in probes]
        problem.set_num_tokens(most_tokens)
        # Dividing K changes the order of a sum.
        candidates = self._products.candidates(problem, most=_CANDIDATES, may_divide_k=False)
        for algorithm in candidates:
            try:
                # The same tokens again and again: a token's bits must not depend on its place in a tile.
                if all(
                    _equal_bits(result_of(algorithm, cupy.tile(few, (repeats, 1))).reshape(-1, *one.shape), one)
                    for few, one in zip(probes, expected, strict=True)
                ):
                    return algorithm
            except CudaCallError:  # it cannot multiply fewer tokens than it was recommended for
                continue
        return None

    def _reference(
        self,
        x: Array,
        problem: Problem,
        weight: Array,
        result_of: Callable[[Algorithm, Array], Array],
        *,
        biased: bool,
        dtype: "np.dtype[np.generic]",
    ) -> Array:
        if biased or not self._decode_gemm.serves(x, weight):
            problem.set_num_tokens(_CLASSES[0])
            return result_of(self._products.candidates(problem, most=1, may_divide_k=False)[0], x)
        out = cupy.empty((len(x), problem.shape.n), dtype)
        multiply = self._decode_gemm.linear if dtype == bfloat16 else self._decode_gemm.linear_float32
        multiply(x, weight, out)
        return out


def _random_tokens(width: int, *, seed: int) -> Array:
    values = np.random.default_rng(seed).standard_normal((_PROBE_TOKENS, width), np.float32)
    return cupy.asarray(values.astype(bfloat16))


def _equal_bits(found: Array, expected: Array) -> bool:
    bits = np.uint32 if expected.dtype == np.float32 else np.uint16
    return bool((found.view(bits) == expected.view(bits)).all())

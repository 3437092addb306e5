"""Hyper-connections of four streams. `csrc/norm/hyper_connections.cu` has the formulas."""

import ctypes

from openinfer_kernels.cuda.attention.sparse_arrays import FLOAT32, empty
from openinfer_kernels.cuda.common.arrays import address, require
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.launch import Kernel
from openinfer_kernels.cuda.common.libraries import bfloat16
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array, HyperMix, HyperWeights

_STREAMS = 4
_MIXES = _STREAMS * (2 + _STREAMS)
_THREADS = 256
_FEW_TOKENS = 8
"""Of a block of the kernel that has a token in each warp."""
_MANY_TOKENS = {_MIXES: 16, _STREAMS: 32}
"""Of a block of the other one, by outputs."""
_TILE_COLUMNS = 256
_BLOCKS_PER_MULTIPROCESSOR = 2
"""That the columns of a projection are cut for, where there are fewer tiles of tokens."""


class _Read(ctypes.Structure):
    """`struct Read` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("residual", "partials", "base", "scale", "x", "post", "mixing")),
        *((name, ctypes.c_int) for name in ("num_splits", "size", "iterations")),
        ("eps", ctypes.c_float),
        ("mix_eps", ctypes.c_float),
    )


class HyperConnections:
    """The operators on one device; `chooses`: whether kernels may depend on how many tokens there are."""

    def __init__(self, device: Device, *, chooses: bool = True) -> None:
        self._chooses = chooses
        self._most_blocks = _BLOCKS_PER_MULTIPROCESSOR * device.num_multiprocessors
        self._few, self._many = (
            {
                outputs: device.kernel("hyper_connections", f"hyper_project_{name}{suffix}")
                for outputs, name in ((_MIXES, "mix"), (_STREAMS, "head"))
            }
            for suffix in ("", "_many")
        )
        self._read = {
            outputs: device.kernel("hyper_connections", f"hyper_read_{name}")
            for outputs, name in ((_MIXES, "mix"), (_STREAMS, "head"))
        }
        self._write = {
            dtype: device.kernel("hyper_connections", f"hyper_write_{name}")
            for dtype, name in ((bfloat16, "bf16"), (FLOAT32, "float"))
        }
        self._streams = device.kernel("hyper_connections", "hyper_streams")
        self._add = device.kernel("hyper_connections", "hyper_add")

    def streams(self, x: Array, num_streams: int) -> Array:
        require(x, bfloat16, ndim=2, what="x")
        _require_vectors(x.shape[1], num_streams)
        out = empty((x.shape[0], num_streams, x.shape[1]), bfloat16)
        grid = (x.shape[0], num_streams, 1)
        self._streams(grid, (_THREADS, 1, 1), [x, out, ctypes.c_int(x.shape[1])], overlap=True)
        return out

    def read(
        self, residual: Array, weights: HyperWeights, *, eps: float, mix_eps: float, num_iterations: int
    ) -> tuple[Array, HyperMix]:
        tokens = len(residual)
        mix = HyperMix(post=empty((tokens, _STREAMS), FLOAT32), mixing=empty((tokens, _STREAMS, _STREAMS), FLOAT32))
        x = self._run(
            residual, weights.fn, weights.base, weights.scale, mix, eps=eps, mix_eps=mix_eps, iterations=num_iterations
        )
        return x, mix

    def write(self, y: Array, residual: Array, mix: HyperMix) -> None:
        require(y, FLOAT32 if y.dtype == FLOAT32 else bfloat16, ndim=2, what="y")
        require(residual, bfloat16, ndim=3, what="the residual streams")
        tokens, size = y.shape
        _require_vectors(size, residual.shape[1])
        if residual.shape != (tokens, _STREAMS, size):
            raise ArrayMismatchError(f"y {y.shape} and streams {residual.shape} do not agree")
        grid = (tokens, -(-size // (8 * _THREADS)), 1)
        arguments = [y, residual, mix.post, mix.mixing, ctypes.c_int(size)]
        self._write[y.dtype](grid, (_THREADS, 1, 1), arguments, overlap=True)

    def add(self, x: Array, residual: Array) -> None:
        require(x, bfloat16, ndim=2, what="x")
        require(residual, bfloat16, ndim=3, what="the residual streams")
        tokens, size = x.shape
        _require_vectors(size, residual.shape[1])
        if residual.shape != (tokens, _STREAMS, size):
            raise ArrayMismatchError(f"x {x.shape} and streams {residual.shape} do not agree")
        self._add((tokens, _STREAMS, 1), (_THREADS, 1, 1), [x, residual, ctypes.c_int(size)], overlap=True)

    def head(self, residual: Array, fn: Array, base: Array, scale: Array, *, eps: float, mix_eps: float) -> Array:
        return self._run(residual, fn, base, scale, None, eps=eps, mix_eps=mix_eps, iterations=0)

    def _run(
        self,
        residual: Array,
        fn: Array,
        base: Array,
        scale: Array,
        mix: HyperMix | None,
        *,
        eps: float,
        mix_eps: float,
        iterations: int,
    ) -> Array:
        require(residual, bfloat16, ndim=3, what="the residual streams")
        require(fn, FLOAT32, ndim=2, what="fn")
        require(base, FLOAT32, ndim=1, what="base")
        require(scale, FLOAT32, ndim=1, what="scale")
        tokens, streams, size = residual.shape
        _require_size(size, streams)
        outputs, columns = (_STREAMS if mix is None else _MIXES), streams * size
        if fn.shape != (outputs, columns) or base.shape != (outputs,) or scale.shape != (1 if mix is None else 3,):
            raise ArrayMismatchError(f"fn {fn.shape}, base {base.shape} and streams {residual.shape} do not agree")
        project, tiles, num_splits = self._partition(tokens, outputs, columns // _TILE_COLUMNS)
        partials = empty((num_splits, tokens, outputs + 1), FLOAT32)
        sizes = [ctypes.c_int(tokens), ctypes.c_int(columns), ctypes.c_int(columns // num_splits)]
        project((tiles, num_splits, 1), (_THREADS, 1, 1), [residual, fn, partials, *sizes], overlap=True)
        x = empty((tokens, size), bfloat16)
        arguments = _Read(
            address(residual),
            address(partials),
            address(base),
            address(scale),
            address(x),
            None if mix is None else address(mix.post),
            None if mix is None else address(mix.mixing),
            num_splits,
            size,
            iterations,
            eps,
            mix_eps,
        )
        self._read[outputs]((tokens, 1, 1), (_THREADS, 1, 1), [arguments], overlap=True)
        return x

    def _partition(self, tokens: int, outputs: int, column_tiles: int) -> tuple[Kernel, int, int]:
        """The kernel of a projection, its tiles of tokens, and the splits of its `column_tiles`."""
        if not self._chooses or tokens <= _FEW_TOKENS:
            return self._few[outputs], -(-tokens // _FEW_TOKENS), column_tiles
        tiles = -(-tokens // _MANY_TOKENS[outputs])
        wanted = max(1, self._most_blocks // tiles)
        # No more splits than fill the GPU, each of as many tiles of columns as any other.
        splits = next(n for n in range(min(wanted, column_tiles), 0, -1) if column_tiles % n == 0)
        return self._many[outputs], tiles, splits


def _require_vectors(size: int, streams: int) -> None:
    if streams != _STREAMS or size % 8:
        raise ArrayMismatchError(f"{streams} streams of {size} values are not supported: 4 of a multiple of 8")


def _require_size(size: int, streams: int) -> None:
    if streams != _STREAMS or size % (_TILE_COLUMNS // _STREAMS):
        raise ArrayMismatchError(f"{streams} streams of {size} values are not supported: 4 of a multiple of 64")

"""The gated delta rule: rows of few tokens step by step, prefill chunks 64 tokens at a time.

`gated_delta_steps.cu`, `gated_delta_prepare.cu` and `gated_delta_walk.cu` in `csrc/linear_attention/` have the
equations. Heads of 128 x 128 are what published models have; others take the steps' slower kernel, whatever a row's
number of tokens.
"""

import ctypes

import numpy as np

from openinfer_kernels.cuda.common.arrays import address, require, require_rows, row_stride, rows_fit_vectors
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.launch import Kernel
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy
from openinfer_kernels.cuda.linear_attention.state_rows import (
    StateRows,
    kept_rows,
    layer_of_states,
    most_pieces,
    require_states,
    state_rows,
    states_fit_vectors,
    strides_of_states,
)
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array, AttentionBatch, KeptInputs

_DIM = 128
_WALK_SLICES = 4
"""Blocks that share a head in the walk over chunks, each with 32 columns of its state."""
_NARROW, _WIDE = 32, 64
"""Columns of the state that a block of a step has: narrow slices are more blocks, wide ones are read faster."""
_NARROW_ROWS = 4
"""That narrow slices are for, at most."""
_ANY_THREADS = 128
_CHUNK_THREADS = 256
_CHUNK_TOKENS = 64
_LEAST_CHUNK_TOKENS = 16
"""Of a row; one with fewer is over sooner step by step."""
_PREPARE_SHARED_BYTES = 90_624
_WALK_SHARED_BYTES = {3: 221_744, 2: 154_656, 1: 87_568}
"""By the chunks that are in shared memory at a time."""
_SHALLOWEST = 1
"""Of these: several rows keep a GPU busy by blocks that stand next to each other, one row by reading ahead."""
_EVERY = 2**31 - 1
_FLOAT32 = np.dtype(np.float32)


class _Kept(ctypes.Structure):
    """`gated_delta::Kept` of `csrc/linear_attention/gated_delta.cuh`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "keys_values", "gates")),
        *((name, ctypes.c_int64) for name in ("keys_values_stride", "gates_stride")),
    )


class _Replay(ctypes.Structure):
    """`Replay` of `csrc/linear_attention/gated_delta_steps.cu`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("state", "keys_values", "gates", "slots", "counts")),
        *((name, ctypes.c_int64 * 2) for name in ("state_strides", "keys_values_strides", "gates_strides")),
        *((name, ctypes.c_int) for name in ("key_heads", "heads")),
    )


class _Arguments(ctypes.Structure):
    """`gated_delta::Arguments` of `csrc/linear_attention/gated_delta.cuh`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "gates", "a_log", "dt_bias", "dt_bias32", "state", "out")),
        ("rows", StateRows),
        *((name, ctypes.c_int64) for name in ("qkv_stride", "gates_stride", "slot_stride")),
        *(
            (name, ctypes.c_int)
            for name in ("key_heads", "heads", "key_dim", "value_dim", "most_tokens", "least_tokens")
        ),
        ("kept", _Kept),
    )


class _Scratch(ctypes.Structure):
    """`gated_delta::Scratch` of `csrc/linear_attention/gated_delta_tiles.cuh`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("u", "w", "p", "of_query", "until_end", "of_chunk")),
        ("num_tokens", ctypes.c_int),
    )


class GatedDeltaRule:
    """The operator on one device.

    Args:
        device: the GPU.
        in_chunks: whether prompts are computed in chunks; their bits then depend on how a prompt is cut.
    """

    def __init__(self, device: Device, *, in_chunks: bool = True) -> None:
        self._in_chunks = in_chunks
        self._steps = {
            columns: device.kernel("gated_delta_steps", f"gated_delta_steps_{columns}") for columns in (_NARROW, _WIDE)
        }
        self._replays = {
            columns: device.kernel("gated_delta_steps", f"gated_delta_replay_{columns}") for columns in (_NARROW, _WIDE)
        }
        self._any = device.kernel("gated_delta_steps", "gated_delta_steps_any")
        self._prepare = device.kernel("gated_delta_prepare", "gated_delta_prepare", shared_bytes=_PREPARE_SHARED_BYTES)
        deepest = next(n for n, num_bytes in _WALK_SHARED_BYTES.items() if num_bytes <= device.max_shared_bytes)
        self._walk_of_one, self._walk_of_several = (
            device.kernel("gated_delta_walk", f"gated_delta_walk_{stages}", shared_bytes=_WALK_SHARED_BYTES[stages])
            for stages in (deepest, _SHALLOWEST)
        )

    def gated_delta_rule(
        self,
        qkv: Array,
        gates: Array,
        *,
        a_log: Array,
        dt_bias: Array,
        state: Array,
        layer: int,
        batch: AttentionBatch,
    ) -> Array:
        key_heads = _check(qkv, gates, a_log=a_log, dt_bias=dt_bias, state=state)
        heads, key_dim, value_dim = state.shape[2:]
        rows, most = state_rows(batch), batch.max_query_tokens
        out = cupy.empty((len(qkv), heads * value_dim), bfloat16)
        begin, slot_stride = layer_of_states(state, layer)
        is_float32 = dt_bias.dtype == _FLOAT32
        arguments = _Arguments(
            *map(address, (qkv, gates, a_log)),
            None if is_float32 else address(dt_bias),
            address(dt_bias) if is_float32 else None,
            begin,
            address(out),
            rows,
            *(row_stride(qkv), row_stride(gates), slot_stride),
            *(key_heads, heads, key_dim, value_dim, _EVERY, _LEAST_CHUNK_TOKENS),
            _kept(batch, layer),
        )
        if (key_dim, value_dim) != (_DIM, _DIM) or not (rows_fit_vectors(qkv) and states_fit_vectors(state)):
            if batch.kept is not None:
                raise ArrayMismatchError(f"inputs for heads of {key_dim} x {value_dim} are not kept")
            self._any((heads, rows.num_rows, 1), (_ANY_THREADS, 1, 1), [arguments], overlap=True)
            return out
        in_chunks = self._in_chunks and most >= _LEAST_CHUNK_TOKENS
        if in_chunks:
            walk = self._walk_of_several if len(qkv) >= 2 * most else self._walk_of_one
            self._run_chunks(walk, arguments, batch, len(qkv))
            # The steps' kernel takes the rows that are too short for chunks.
            arguments.most_tokens = _LEAST_CHUNK_TOKENS - 1
        if not in_chunks or len(qkv) < rows.num_rows * most:  # else every row is as long as the longest
            num_rows = len(batch.context_lens)
            # Few rows have too few blocks to fill the GPU with wide slices of the state.
            columns = _NARROW if num_rows <= _NARROW_ROWS else _WIDE
            grid = (heads * _DIM // columns, num_rows, 1)
            self._steps[columns](grid, (4 * columns, 1, 1), [arguments], overlap=True)
        return out

    def replay(self, kept: KeptInputs, state: Array, slots: Array, counts: Array) -> None:
        """Has `state` take in the first `counts [n]` tokens that were kept of `slots [n]`."""
        num_layers, heads, key_dim, value_dim = state.shape[1:]
        columns = _NARROW if len(slots) * num_layers <= _NARROW_ROWS else _WIDE
        arguments = _Replay(
            *map(address, (state, kept.keys_values, kept.gates, slots, counts)),
            *map(strides_of_states, (state, kept.keys_values, kept.gates)),
            *((kept.keys_values.shape[3] - heads * value_dim) // key_dim, heads),
        )
        grid = (heads * _DIM // columns, len(slots), num_layers)
        self._replays[columns](grid, (4 * columns, 1, 1), [arguments], overlap=True)

    def _run_chunks(self, walk: Kernel, arguments: _Arguments, batch: AttentionBatch, num_tokens: int) -> None:
        heads, least = arguments.heads, _LEAST_CHUNK_TOKENS
        wide = [cupy.empty((num_tokens, heads, _DIM), bfloat16) for _ in range(2)]
        weights = cupy.empty((num_tokens, heads, _CHUNK_TOKENS), bfloat16)
        factors = [cupy.empty((heads, num_tokens), np.float32) for _ in range(3)]
        scratch = _Scratch(*map(address, (*wide, weights, *factors)), num_tokens)
        num_chunks = most_pieces(batch, num_tokens, piece_tokens=_CHUNK_TOKENS, least_tokens=least)
        num_rows = min(len(batch.context_lens), num_tokens // least)
        given = [arguments, scratch]
        self._prepare((num_chunks * arguments.key_heads, 1, 1), (_CHUNK_THREADS, 1, 1), given, overlap=True)
        walk((heads * _WALK_SLICES, num_rows, 1), (_CHUNK_THREADS, 1, 1), given, overlap=True)


def kept_rule_inputs(state: Array, *, channels: int, most_tokens: int) -> tuple[Array, Array] | None:
    """`keys_values` and `gates` of `KeptInputs`: for heads of 128 x 128, and rows that are too short for chunks."""
    slots, num_layers, heads, key_dim, value_dim = state.shape
    is_served = (key_dim, value_dim) == (_DIM, _DIM) and most_tokens < _LEAST_CHUNK_TOKENS
    if not is_served or not states_fit_vectors(state):
        return None
    keys_values = (channels - heads * value_dim) // 2 + heads * value_dim
    tokens = slots, num_layers, most_tokens
    return cupy.zeros((*tokens, keys_values), bfloat16), cupy.zeros((*tokens, heads, 2), np.float32)


def _kept(batch: AttentionBatch, layer: int) -> _Kept:
    kept = kept_rows(batch)
    if kept is None:
        return _Kept()
    keys_values, keys_values_stride = layer_of_states(kept.keys_values, layer)
    gates, gates_stride = layer_of_states(kept.gates, layer)
    return _Kept(address(batch.kept_rows), keys_values, gates, keys_values_stride, gates_stride)


def _check(qkv: Array, gates: Array, *, a_log: Array, dt_bias: Array, state: Array) -> int:
    """Returns the number of key heads."""
    require_rows(qkv, bfloat16, what="qkv")
    require_rows(gates, bfloat16, what="the gates")
    require(a_log, _FLOAT32, ndim=1, what="a_log")
    require(dt_bias, dt_bias.dtype if dt_bias.dtype == _FLOAT32 else bfloat16, ndim=1, what="dt_bias")
    require_states(state, _FLOAT32, ndim=5, what="the state")
    heads, key_dim, value_dim = state.shape[2:]
    keys = qkv.shape[1] - heads * value_dim
    key_heads = keys // (2 * key_dim)
    if keys <= 0 or keys % (2 * key_dim) or heads % key_heads:
        raise ArrayMismatchError(f"qkv {qkv.shape} and state {state.shape} do not agree on heads")
    if gates.shape != (len(qkv), 2 * heads) or a_log.shape != (heads,) or dt_bias.shape != (heads,):
        raise ArrayMismatchError(
            f"gates {gates.shape}, a_log {a_log.shape} and dt_bias {dt_bias.shape} are not of {heads} value heads "
            f"and {len(qkv)} tokens"
        )
    return key_heads

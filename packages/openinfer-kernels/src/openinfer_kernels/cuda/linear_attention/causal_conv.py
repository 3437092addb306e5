"""The convolution in front of linear attention, with its state. `csrc/linear_attention/causal_conv.cu`."""

import ctypes

from openinfer_kernels.cuda.common.arrays import (
    address,
    fits_vectors,
    require,
    require_rows,
    row_stride,
    rows_fit_vectors,
)
from openinfer_kernels.cuda.common.device import Device
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
from openinfer_kernels.ops import Array, AttentionBatch

_STEM = "causal_conv"
_THREADS = 128
_TILE_TOKENS = 32
_VECTOR_TAPS = 4
_TAPS = (2, 3, 4)


class _Arguments(ctypes.Structure):
    """`struct Arguments` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "state", "out")),
        ("rows", StateRows),
        ("x_stride", ctypes.c_int64),
        ("slot_stride", ctypes.c_int64),
        ("channels", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("kept_rows", "kept")),
        ("kept_stride", ctypes.c_int64),
    )


class _Replay(ctypes.Structure):
    """`struct Replay` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("state", "kept", "slots", "counts")),
        *((name, ctypes.c_int64 * 2) for name in ("state_strides", "kept_strides")),
        *((name, ctypes.c_int) for name in ("channels", "held")),
    )


class CausalConv:
    """The operator on one device."""

    def __init__(self, device: Device) -> None:
        self._singles = {
            taps: tuple(device.kernel(_STEM, f"causal_conv_{kind}_singles_{taps}") for kind in ("steps", "tiles"))
            for taps in _TAPS
        }
        self._replay = device.kernel(_STEM, "causal_conv_replay")
        self._vectors = tuple(
            device.kernel(_STEM, f"causal_conv_{kind}_vectors_{_VECTOR_TAPS}") for kind in ("steps", "tiles")
        )

    def causal_conv_silu(self, x: Array, weight: Array, *, state: Array, layer: int, batch: AttentionBatch) -> Array:
        require_rows(x, bfloat16, what="x")
        require(weight, bfloat16, ndim=2, what="the weight of the convolution")
        require_states(state, bfloat16, ndim=4, what="the state of the convolution")
        num_tokens, channels = x.shape
        taps = weight.shape[1]
        if weight.shape[0] != channels or state.shape[2:] != (channels, taps - 1) or taps not in _TAPS:
            raise ArrayMismatchError(
                f"x {x.shape}, weight {weight.shape} and state {state.shape} do not agree, "
                f"or the taps are none of {_TAPS}"
            )
        out = cupy.empty((num_tokens, channels), bfloat16)
        begin, slot_stride = layer_of_states(state, layer)
        rows = state_rows(batch)
        kept = kept_rows(batch)
        kept_at = (None, 0) if kept is None else layer_of_states(kept.conv_inputs, layer)
        arguments = _Arguments(
            *(address(x), address(weight), begin, address(out), rows, row_stride(x), slot_stride, channels),
            *(None if kept is None else address(batch.kept_rows), *kept_at),
        )
        is_wide = (
            taps == _VECTOR_TAPS
            and channels % 8 == 0
            and rows_fit_vectors(x)
            and fits_vectors(weight)
            and states_fit_vectors(state)
        )
        (steps, tiles), width = (self._vectors, 8) if is_wide else (self._singles[taps], 1)
        blocks = -(-channels // (width * _THREADS))
        if batch.max_query_tokens <= _TILE_TOKENS:  # a row is one tile, which need not be looked for
            steps((blocks, rows.num_rows, 1), (_THREADS, 1, 1), [arguments], overlap=True)
        else:
            num_tiles = most_pieces(batch, num_tokens, piece_tokens=_TILE_TOKENS, least_tokens=1)
            tiles((blocks, num_tiles, 1), (_THREADS, 1, 1), [arguments], overlap=True)
        return out

    def replay(self, inputs: Array, state: Array, slots: Array, counts: Array) -> None:
        """Has `state [S, L, C, W - 1]` take in the first `counts [n]` of `inputs [S, L, M, C]` of `slots [n]`."""
        num_layers, channels, held = state.shape[1:]
        arguments = _Replay(
            *map(address, (state, inputs, slots, counts)),
            *(strides_of_states(each) for each in (state, inputs)),
            *(channels, held),
        )
        self._replay((-(-channels // _THREADS), len(slots), num_layers), (_THREADS, 1, 1), [arguments], overlap=True)

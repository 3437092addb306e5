"""Rows of a step as kernels over recurrent states take them."""

import ctypes
from typing import Any

import numpy as np

from openinfer_kernels.cuda.common.arrays import address, fits_vectors, require
from openinfer_kernels.cuda.common.libraries import cupy
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array, AttentionBatch, KeptInputs

_INT32 = np.dtype(np.int32)


class StateRows(ctypes.Structure):
    """`struct StateRows` of `csrc/common/state_rows.cuh`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query_starts", "context_lens", "slots")),
        ("num_rows", ctypes.c_int),
    )


def state_rows(batch: AttentionBatch) -> StateRows:
    """A row whose context is empty is padding of a captured step, and touches no state."""
    if batch.state_slots is None:
        raise ArrayMismatchError("the batch has no state_slots; an operator over recurrent states needs them")
    for name in ("query_starts", "context_lens", "state_slots"):
        require(getattr(batch, name), _INT32, ndim=1, what=f"batch.{name}")
    arrays = (batch.query_starts, batch.context_lens, batch.state_slots)
    return StateRows(*map(address, arrays), len(batch.context_lens))


def require_states(state: Array, dtype: np.dtype[Any], *, ndim: int, what: str) -> None:
    """Refuses what is not `[slots, layers, ...]` of `dtype` on the device, each layer of a slot contiguous."""
    if not isinstance(state, cupy.ndarray) or state.ndim != ndim:
        raise ArrayMismatchError(f"{what} must be an array with {ndim} axes on the GPU, not {type(state).__name__}")
    require(state[0, 0], dtype, ndim=ndim - 2, what=f"a layer of {what}")


def kept_rows(batch: AttentionBatch) -> KeptInputs | None:
    """Where the inputs of `batch.kept_rows` go; None where states take in all tokens."""
    if batch.kept is None or batch.kept_rows is None:
        return None
    require(batch.kept_rows, _INT32, ndim=1, what="batch.kept_rows")
    if len(batch.kept_rows) != len(batch.context_lens):
        raise ArrayMismatchError(f"{len(batch.kept_rows)} of batch.kept_rows for {len(batch.context_lens)} rows")
    return batch.kept


def strides_of_states(state: Array) -> "ctypes.Array[ctypes.c_int64]":
    """Of `state [slots, layers, ...]`: values from slot to slot, and from layer to layer."""
    return (ctypes.c_int64 * 2)(*(stride // state.dtype.itemsize for stride in state.strides[:2]))


def layer_of_states(state: Array, layer: int) -> tuple[int, int]:
    """Of `state [slots, layers, ...]`: where a layer of slot 0 begins, and values from one slot to the next."""
    return address(state) + layer * state.strides[1], state.strides[0] // state.dtype.itemsize


def states_fit_vectors(state: Array) -> bool:
    """Whether every layer of every slot begins at a multiple of 16 bytes."""
    return fits_vectors(state) and not any(stride % 16 for stride in state.strides[:2])


def most_pieces(batch: AttentionBatch, num_tokens: int, *, piece_tokens: int, least_tokens: int) -> int:
    """Pieces of so many tokens, at most, that rows of `least_tokens` or more are cut into."""
    return num_tokens // piece_tokens + min(len(batch.context_lens), num_tokens // least_tokens)

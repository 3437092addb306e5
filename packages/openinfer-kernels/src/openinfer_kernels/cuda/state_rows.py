"""Rows of a step as kernels over recurrent states take them."""

import ctypes

import numpy as np

from openinfer_kernels.cuda.arrays import address, require
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array, AttentionBatch

_INT32 = np.dtype(np.int32)


class StateRows(ctypes.Structure):
    """`struct StateRows` of `csrc/state_rows.cuh`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query_starts", "context_lens", "slots")),
        ("num_rows", ctypes.c_int),
    )


def state_rows(batch: AttentionBatch) -> StateRows:
    """Of a batch; a row whose context is empty is padding of a captured step, and touches no state.

    Raises:
        ArrayMismatchError: the batch was made for a model without states, or an array has another dtype or layout.
    """
    if batch.state_slots is None:
        raise ArrayMismatchError("the batch has no state_slots; an operator over recurrent states needs them")
    for name in ("query_starts", "context_lens", "state_slots"):
        require(getattr(batch, name), _INT32, ndim=1, what=f"batch.{name}")
    arrays = (batch.query_starts, batch.context_lens, batch.state_slots)
    return StateRows(*map(address, arrays), len(batch.context_lens))


def layer_of_states(state: Array, layer: int) -> tuple[int, int]:
    """Of `state [slots, layers, ...]`: where a layer of slot 0 begins, and values from one slot to the next."""
    num_layers, layer_values = state.shape[1], state[0, 0].size
    return address(state) + layer * layer_values * state.dtype.itemsize, num_layers * layer_values


def most_pieces(batch: AttentionBatch, num_tokens: int, *, piece_tokens: int, least_tokens: int) -> int:
    """Pieces of so many tokens, at most, that rows of `least_tokens` or more are cut into."""
    return num_tokens // piece_tokens + min(len(batch.context_lens), num_tokens // least_tokens)

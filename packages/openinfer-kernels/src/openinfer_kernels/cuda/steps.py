"""What a step does around the model: slots' state on the device, from which a captured decode step makes its inputs."""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from openinfer_kernels.cuda.device import Device
from openinfer_kernels.cuda.libraries import cupy
from openinfer_kernels.ops import Array, AttentionBatch, HostArray, SamplingBatch

_THREADS = 128
SLOT_PARAMS: np.dtype[Any] = np.dtype(
    [("temperature", "f4"), ("top_p", "f4"), ("min_p", "f4"), ("top_k", "i4"), ("seed", "u8")]
)
"""One slot's sampling parameters, as the kernels read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeInputs:
    """The arrays of a decode step of a fixed number of rows; a captured step reads and writes these places."""

    slots_and_positions: Array
    """`[2, R]` int32, the only thing the host writes: slots (-1 for padding), then positions."""
    token_ids: Array
    batch: AttentionBatch
    sampling: SamplingBatch


class SlotState:
    """What the device knows of each slot.

    Args:
        device: where.
        last_ids: `[max_num_seqs]` int32, the id that each slot sampled last; kept and shared with the caller.
        max_num_seqs: slots.
        max_blocks: KV blocks of the longest context.
    """

    def __init__(self, device: Device, *, last_ids: Array, max_num_seqs: int, max_blocks: int) -> None:
        self._append = device.kernel("steps", "steps_append_blocks")
        self._keep = device.kernel("steps", "steps_keep_last_ids")
        self._prepare = device.kernel("steps", "steps_prepare_decode")
        self._max_blocks = max_blocks
        self._tables = cupy.zeros((max_num_seqs, max_blocks), np.int32)
        self._last_ids = last_ids
        self._params = cupy.zeros(max_num_seqs * SLOT_PARAMS.itemsize, np.uint8)

    def write_params(self, slot: int, params: HostArray) -> None:
        """Sets one slot's sampling parameters, an array of one `SLOT_PARAMS`."""
        begin = slot * SLOT_PARAMS.itemsize
        self._params[begin : begin + SLOT_PARAMS.itemsize].set(
            params.view(np.uint8), stream=cupy.cuda.get_current_stream()
        )

    def append_blocks(self, entries: Array) -> None:
        """Writes entries `[n, 3]` (slot, column, block) into the block tables."""
        count = entries.shape[0]
        arguments = [self._tables, entries, ctypes.c_int(count), ctypes.c_int(self._max_blocks)]
        self._append(_grid(count), (_THREADS, 1, 1), arguments)

    def keep_last_ids(self, slots: Array, token_ids: Array) -> None:
        """Notes what rows sampled; slots and ids below 0 are passed over."""
        count = slots.shape[0]
        self._keep(_grid(count), (_THREADS, 1, 1), [self._last_ids, slots, token_ids, ctypes.c_int(count)])

    def make_decode_inputs(self, num_rows: int, *, num_token_ids: int, max_context_tokens: int) -> DecodeInputs:
        """Arrays for a decode step of that many rows."""
        int32 = [cupy.zeros(num_rows, np.int32) for _ in range(4)]
        float32 = [cupy.zeros(num_rows, np.float32) for _ in range(3)]
        token_ids, positions, context_lens, top_k = int32
        batch = AttentionBatch(
            positions=positions,
            query_starts=cupy.asarray(np.arange(num_rows + 1, dtype=np.int32)),
            context_lens=context_lens,
            block_tables=cupy.zeros((num_rows, self._max_blocks), np.int32),
            cache_slots=cupy.zeros(num_rows, np.int64),
            max_query_tokens=1,
            max_context_tokens=max_context_tokens,
        )
        sampling = SamplingBatch(
            num_token_ids=num_token_ids,
            temperature=float32[0],
            top_p=float32[1],
            min_p=float32[2],
            top_k=top_k,
            seeds=cupy.zeros(num_rows, np.uint64),
            positions=cupy.zeros(num_rows, np.int64),
        )
        slots_and_positions = cupy.full((2, num_rows), -1, np.int32)
        return DecodeInputs(
            slots_and_positions=slots_and_positions, token_ids=token_ids, batch=batch, sampling=sampling
        )

    def prepare_decode(self, inputs: DecodeInputs, *, block_tokens: int) -> None:
        """Fills a decode step's arrays from its slots and positions; part of what is captured."""
        batch, sampling = inputs.batch, inputs.sampling
        slots, positions = inputs.slots_and_positions
        arguments = [
            slots,
            positions,
            self._tables,
            self._last_ids,
            self._params,
            inputs.token_ids,
            batch.positions,
            batch.context_lens,
            batch.cache_slots,
            batch.block_tables,
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            sampling.top_k,
            sampling.seeds,
            sampling.positions,
            ctypes.c_int(self._max_blocks),
            ctypes.c_int(block_tokens),
        ]
        self._prepare((slots.shape[0], 1, 1), (_THREADS, 1, 1), arguments)


def _grid(count: int) -> tuple[int, int, int]:
    return (-(-count // _THREADS), 1, 1)

"""`SlotState`: what the device knows of each slot, from which steps make their inputs. `csrc/sampling/steps.cu`."""

import ctypes
from typing import Any

import numpy as np

from openinfer_kernels.cuda.common.arrays import address
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.launch import Kernel
from openinfer_kernels.cuda.common.libraries import cupy
from openinfer_kernels.cuda.sampling.slot_record import PARAMS_BYTES, SLOT_RECORD
from openinfer_kernels.cuda.sampling.slot_sizes import SlotSizes
from openinfer_kernels.cuda.sampling.step_inputs import MIXED_LINES, DecodeInputs, MixedInputs, SampledRows
from openinfer_kernels.ops import Array, Bias, HostArray, Penalties

_THREADS = 128
ONE_BLOCK_THREADS = 1024


class _SlotArrays(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("last_ids", "params", "presence", "frequency", "repetition", "num_biased")
    )


class _Tables(ctypes.Structure):
    _fields_ = (
        ("blocks", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("num_slots", "max_blocks", "block_tokens")),
    )


class SlotState:
    """What the device knows of each slot. Its methods queue kernels on CuPy's current stream."""

    def __init__(self, device: Device, sizes: SlotSizes, *, bias_lists: int = 1) -> None:
        """`bias_lists` of changes of single logits for each slot; a slot's record has the length of the first."""
        names = (
            "append_blocks",
            "start_slots",
            "count_tokens",
            "prepare_decode",
            "prepare_chunks",
            "prepare_sampling",
            "name_rows",
            "keep_sampled",
        )
        self._kernels = {name: device.kernel("steps", f"steps_{name}") for name in names}
        self.device = device
        self._sizes = sizes
        slots = sizes.max_num_seqs
        self._tables = cupy.zeros((sizes.num_tables, slots, sizes.max_blocks), np.int32)
        self._last_ids = cupy.zeros(slots, np.int32)
        self._params = cupy.zeros(slots * PARAMS_BYTES, np.uint8)
        self._presence, self._frequency = cupy.zeros(slots, np.float32), cupy.zeros(slots, np.float32)
        self._repetition = cupy.asarray(np.ones(slots, np.float32))
        lists = bias_lists * slots
        self._num_biased = cupy.zeros(lists, np.int32)
        self._bias_ids = cupy.zeros((lists, sizes.max_biased), np.int32)
        self._bias_values = cupy.zeros((lists, sizes.max_biased), np.float32)
        self._counts = cupy.zeros((slots, sizes.num_columns), np.int32)
        self._seen = cupy.zeros((slots, sizes.num_columns), np.bool_)
        self._penalised_rows = cupy.asarray(np.full(slots, -1, np.int32))
        self._biased_rows = cupy.asarray(np.full(lists, -1, np.int32))

    @property
    def block_tables(self) -> Array:
        """`[tables, slots, max_blocks]` int32, not to be written."""
        return self._tables

    # --- what begins ------------------------------------------------------------------------------------

    def append_blocks(self, entries: Array) -> None:
        """Writes entries `[n, 4]` int32 (table, slot, column, block) into the block tables."""
        count, sizes = entries.shape[0], self._sizes
        arguments = [
            self._tables,
            entries,
            ctypes.c_int(count),
            ctypes.c_int(sizes.max_num_seqs),
            ctypes.c_int(sizes.max_blocks),
        ]
        self._launch("append_blocks", count, arguments)

    def start(self, records: Array) -> None:
        """Takes over `[n]` slot records, each `SLOT_RECORD.itemsize` bytes: uint8."""
        count = records.size // SLOT_RECORD.itemsize
        self._launch("start_slots", count, [self._slot_arrays(), records, ctypes.c_int(count)])

    def set_bias(self, slot: int, token_ids: Array, values: Array) -> None:
        """Sets the changes of single logits, `[n]` each, of which a slot's record says the number."""
        copy_array(token_ids, self._bias_ids[slot])
        copy_array(values, self._bias_values[slot])

    def count_tokens(self, slot: int, prompt: Array, output: Array) -> None:
        """Sets what the penalties of a slot look at: int32 ids of the prompt, and of the output so far."""
        seen, counts = self._seen[slot], self._counts[slot]
        # The slot may have been another sequence's, whose tokens must not be penalised here.
        for array in (seen, counts):
            cupy.cuda.runtime.memsetAsync(address(array), 0, array.nbytes, _stream())
        longest = max(prompt.size, output.size)
        arguments = [seen, counts, prompt, ctypes.c_int(prompt.size), output, ctypes.c_int(output.size)]
        self._launch("count_tokens", longest, arguments)

    # --- a step -----------------------------------------------------------------------------------------

    def prepare_decode(self, inputs: DecodeInputs) -> None:
        """Fills the arrays of a decode step from its `rows`."""
        arguments = [
            inputs.rows,
            self._table_arrays(),
            self._slot_arrays(),
            inputs.model_inputs(),
            inputs.sampled.pointers(),
            inputs.sampled.slots,
        ]
        self._kernels["prepare_decode"]((inputs.rows.shape[1], self._sizes.num_tables, 1), (_THREADS, 1, 1), arguments)

    def prepare_mixed(self, inputs: MixedInputs) -> None:
        """Fills the arrays of a step of chunks of any length from its `record`."""
        num_rows, num_tokens = len(inputs.batch.context_lens), len(inputs.token_ids)
        arguments = [
            inputs.record,
            inputs.record[MIXED_LINES * num_rows :],
            self._table_arrays(),
            self._slot_arrays(),
            inputs.model_inputs(),
            inputs.batch.query_starts,
            ctypes.c_int(num_tokens),
        ]
        self._kernels["prepare_chunks"]((num_rows + 1, self._sizes.num_tables, 1), (_THREADS, 1, 1), arguments)

    def prepare_sampling(self, sampled: SampledRows, positions: Array) -> None:
        """Fills how rows are sampled from their slots and `positions [R]` int32 of their tokens."""
        count = sampled.slots.shape[0]
        arguments = [sampled.slots, positions, self._slot_arrays(), sampled.pointers(), ctypes.c_int(count)]
        self._launch("prepare_sampling", count, arguments)

    def changes(self, sampled: SampledRows) -> tuple[Bias, Penalties]:
        """The bias and penalties of rows by slot, -1 for none; views of this state."""
        self._name_rows(sampled)
        bias = Bias(rows=self._biased_rows, counts=self._num_biased, token_ids=self._bias_ids, values=self._bias_values)
        penalties = Penalties(
            rows=self._penalised_rows,
            presence=self._presence,
            frequency=self._frequency,
            repetition=self._repetition,
            output_counts=self._counts,
            prompt_seen=self._seen,
        )
        return bias, penalties

    def keep_sampled(self, sampled_slots: Array, token_ids: Array, *, counts: bool) -> None:
        """Notes what rows sampled; slots and ids below 0 are skipped. `counts`: whether a slot may have penalties."""
        count = sampled_slots.shape[0]
        arguments = [
            self._slot_arrays(),
            self._counts if counts else None,
            ctypes.c_int64(self._sizes.num_columns),
            sampled_slots,
            token_ids,
            ctypes.c_int(count),
        ]
        self._launch("keep_sampled", count, arguments)

    def _name_rows(self, sampled: SampledRows) -> None:
        arguments = [
            sampled.slots,
            ctypes.c_int(sampled.slots.shape[0]),
            self._slot_arrays(),
            ctypes.c_int(self._sizes.max_num_seqs),
            self._penalised_rows,
            self._biased_rows,
        ]
        self._kernels["name_rows"]((1, 1, 1), (ONE_BLOCK_THREADS, 1, 1), arguments)

    # --- arguments --------------------------------------------------------------------------------------

    def _launch(self, name: str, count: int, arguments: list[Any]) -> None:
        launch_per_item(self._kernels[name], count, arguments)

    def _slot_arrays(self) -> _SlotArrays:
        arrays = (
            self._last_ids,
            self._params,
            self._presence,
            self._frequency,
            self._repetition,
            self._num_biased,
        )
        return _SlotArrays(*map(address, arrays))

    def _table_arrays(self) -> _Tables:
        sizes = self._sizes
        return _Tables(address(self._tables), sizes.max_num_seqs, sizes.max_blocks, sizes.block_tokens)


def launch_per_item(kernel: Kernel, count: int, arguments: list[Any]) -> None:
    """A thread for each of `count` items."""
    if count:
        kernel((-(-count // _THREADS), 1, 1), (_THREADS, 1, 1), arguments)


def make_record(slot: int, **fields: Any) -> HostArray:
    """One `SLOT_RECORD`; fields left out are 0."""
    record = np.zeros(1, SLOT_RECORD)
    for name, value in {"slot": slot, **fields}.items():
        record[name] = value
    return record


def _stream() -> int:
    return cupy.cuda.get_current_stream().ptr


def copy_array(source: Array, target: Array) -> None:
    """Queues a copy between arrays of as many bytes on one device."""
    if source.nbytes:
        on_device = 3
        cupy.cuda.runtime.memcpyAsync(address(target), address(source), source.nbytes, on_device, _stream())

"""`DraftedSlotState`: what the device knows of each slot in an engine with a drafter. `csrc/sampling/drafts.cu`.

The host knows how many tokens a step yielded when it reads the step's result, and plans on bounds until then. So where
a sequence stands, and what depends on it, lives here: first positions, drafts, and whether stop tokens are allowed.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from openinfer_kernels.cuda.common.arrays import address
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.libraries import cupy
from openinfer_kernels.cuda.sampling.slot_sizes import SlotSizes
from openinfer_kernels.cuda.sampling.step_inputs import MIXED_LINES, DecodeInputs, MixedInputs, SampledRows
from openinfer_kernels.cuda.sampling.steps import ONE_BLOCK_THREADS, SlotState, launch_per_item
from openinfer_kernels.ops import Array

DRAFT_RECORD = 3
"""Numbers of a record of `start_drafts`."""
SPAN_LINES = 4
"""Of `Spans.columns`."""


class _DraftArrays(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("lengths", "stop_allowed_from", "num_drafts", "drafts")),
        ("max_drafts", ctypes.c_int),
    )


_SPAN_ARRAYS = ("slots", "firsts", "max_new", "num_planned", "alive", "new_counts", "token_ids")


class _SpanArrays(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_void_p) for name in _SPAN_ARRAYS), ("count", ctypes.c_int))


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """The rows of a step that sample, `[S]` each."""

    columns: Array
    """`[SPAN_LINES, S]` int32 from the host: slots, token of the step at the first sampled position, sampled
    positions, drafts that the plan takes from the slot."""
    alive: Array
    """Whether the next position is reached."""
    new_counts: Array
    """Tokens that each yielded."""
    token_ids: Array
    """`[J, S]`, its tokens from the front; the rest is of no meaning."""
    compared: Array
    """Drafts that there were."""
    consumed: Array
    """Tokens of a row with drafts that count, which its states are yet to take in; 0 for other rows."""
    last_tokens: Array
    """Token of the step that predicted the span's last one."""
    last_ids: Array
    lengths: Array
    """Known tokens of the sequence, the last one included."""

    @classmethod
    def make(cls, columns: Array, *, positions: int) -> "Spans":
        """Arrays for spans of up to so many sampled positions."""
        names = ("alive", "new_counts", "compared", "consumed", "last_tokens", "last_ids", "lengths")
        count = columns.shape[1]
        arrays = {name: cupy.empty(count, np.int32) for name in names}
        return cls(columns=columns, token_ids=cupy.empty((positions, count), np.int32), **arrays)

    @property
    def slots(self) -> Array:
        return self.columns[0]

    def first(self, count: int) -> "Spans":
        """Of the first rows."""
        names = ("alive", "new_counts", "compared", "consumed", "last_tokens", "last_ids", "lengths")
        arrays = {name: getattr(self, name)[:count] for name in names}
        return Spans(columns=self.columns[:, :count], token_ids=self.token_ids[:, :count], **arrays)

    def pointers(self) -> _SpanArrays:
        arrays = (*self.columns, self.alive, self.new_counts, self.token_ids)
        return _SpanArrays(*map(address, arrays), len(self.alive))


class DraftedSlotState(SlotState):
    """`SlotState`, lengths and drafts. Its methods queue kernels on CuPy's current stream."""

    def __init__(self, device: Device, sizes: SlotSizes, *, max_drafts: int) -> None:
        # The second list of changes has the stop tokens that are forbidden while a sequence is short.
        super().__init__(device, sizes, bias_lists=2)
        names = (
            "start_slots",
            "place_rows",
            "place_decode",
            "place_late",
            "advance",
            "open_position",
            "name_rows",
            "accept",
            "finish",
            "keep",
        )
        self._draft_kernels = {name: device.kernel("drafts", f"drafts_{name}") for name in names}
        self._max_drafts = max_drafts
        self._num_slots = slots = sizes.max_num_seqs
        self._lengths, self._stop_allowed_from = cupy.zeros(slots, np.int32), cupy.zeros(slots, np.int32)
        self._num_drafts = cupy.zeros(slots, np.int32)
        self._drafts = cupy.zeros((slots, max_drafts), np.int32)

    def start_drafts(self, records: Array) -> None:
        """Takes over slots.

        Args:
            records: `[n, DRAFT_RECORD]` int32: slot, position from which on it may sample a stop token, and the number
                of its changes of single logits until then.
        """
        count = records.shape[0]
        arguments = [self._draft_arrays(), self._num_biased[self._num_slots :], records, ctypes.c_int(count)]
        self._run("start_slots", count, arguments)

    def set_early_bias(self, slot: int, token_ids: Array, values: Array) -> None:
        """As `set_bias`, for positions at which the slot may not sample a stop token yet."""
        self.set_bias(self._num_slots + slot, token_ids, values)

    def place_rows(self, inputs: MixedInputs, num_planned: Array, max_new: Array) -> None:
        """Corrects `inputs.record` before it is used: `csrc/sampling/drafts.cu` says how.

        Args:
            inputs: of a mixed batch.
            num_planned: `[r]` int32 ids at the end of each row that are drafts of its slot; the host has sent 0.
            max_new: `[r]` int32 sampled positions of each row; of those with several, inputs are kept.
        """
        count, padded = num_planned.shape[0], len(inputs.batch.context_lens)
        self._run(
            "place_rows",
            count,
            [
                *(inputs.record, ctypes.c_int(padded), num_planned, self._draft_arrays(), ctypes.c_int(count)),
                *(max_new, inputs.batch.kept_rows),
            ],
        )

    def place_decode(self, inputs: DecodeInputs) -> None:
        """Corrects the positions in `inputs.rows`, rows of one token without drafts."""
        count = ctypes.c_int(inputs.rows.shape[1])
        self._run("place_decode", count.value, [inputs.rows, count, self._draft_arrays(), count])

    def place_late(self, slots: Array, count: int) -> Array:
        """`MixedInputs.record`, without ids, of the `count` tokens of each of `slots [R]` that were computed last."""
        num_rows = len(slots)
        record: Any = cupy.zeros(num_rows * (MIXED_LINES + count), np.int32)
        arguments = [slots, self._draft_arrays(), ctypes.c_int(count), record, ctypes.c_int(num_rows)]
        self._run("place_late", num_rows, arguments)
        return record

    def advance(self, inputs: DecodeInputs, sampled_ids: Array, spans: Spans) -> None:
        """Notes where the slots of such rows stand, once they sampled, and in `spans`; they have no drafts then."""
        count = inputs.rows.shape[1]
        arguments = [
            inputs.rows,
            ctypes.c_int(count),
            sampled_ids,
            self._slot_arrays(),
            self._draft_arrays(),
            spans.slots,
            spans.new_counts,
            spans.last_ids,
            spans.lengths,
            ctypes.c_int(count),
        ]
        self._run("advance", count, arguments)

    def open_position(self, spans: Spans, chosen: Array, position: int, inputs: MixedInputs) -> SampledRows:
        """How spans are sampled at their position of this number; -1 among `slots` where it is not reached.

        Args:
            spans: of the step.
            chosen: `[n]` int32 spans that have the position.
            position: from 0.
            inputs: of the step.
        """
        count = chosen.shape[0]
        sampled = SampledRows.make(count)
        arguments = [
            spans.pointers(),
            chosen,
            ctypes.c_int(position),
            self._slot_arrays(),
            inputs.batch.positions,
            sampled.pointers(),
            sampled.slots,
            ctypes.c_int(count),
        ]
        self._run("open_position", count, arguments)
        return sampled

    def accept(self, spans: Spans, chosen: Array, position: int, sampled_ids: Array, inputs: MixedInputs) -> None:
        """Takes `sampled_ids [n]` of a position that was opened, once it was sampled."""
        count = chosen.shape[0]
        arguments = [
            spans.pointers(),
            chosen,
            ctypes.c_int(position),
            sampled_ids,
            inputs.token_ids,
            self._draft_arrays(),
            ctypes.c_int(count),
        ]
        self._run("accept", count, arguments)

    def finish(self, spans: Spans, inputs: MixedInputs) -> None:
        """Notes where the slots stand and fills the rest of `spans`, after the last position."""
        arguments = [
            spans.pointers(),
            self._slot_arrays(),
            self._draft_arrays(),
            inputs.batch.positions,
            spans.last_tokens,
            spans.last_ids,
            spans.lengths,
            spans.compared,
            spans.consumed,
        ]
        self._run("finish", len(spans.alive), arguments)

    def keep_drafts(self, spans: Spans, drafts: Array | None, *, num_token_ids: int) -> Array:
        """Leaves `drafts [S, max_drafts]` int32 for the slots' next rows, each row up to its first that is no token id.

        Returns:
            `[S]` int32, how many each has now.
        """
        kept = cupy.empty(len(spans.alive), np.int32)
        arguments = [spans.pointers(), drafts, ctypes.c_int(num_token_ids), self._draft_arrays(), kept]
        self._run("keep", len(spans.alive), arguments)
        return kept

    def _name_rows(self, sampled: SampledRows) -> None:
        arguments = [
            sampled.slots,
            sampled.columns["positions"],
            ctypes.c_int(sampled.slots.shape[0]),
            self._slot_arrays(),
            self._stop_allowed_from,
            ctypes.c_int(self._num_slots),
            self._penalised_rows,
            self._biased_rows,
        ]
        self._draft_kernels["name_rows"]((1, 1, 1), (ONE_BLOCK_THREADS, 1, 1), arguments)

    def _run(self, name: str, count: int, arguments: list[Any]) -> None:
        launch_per_item(self._draft_kernels[name], count, arguments)

    def _draft_arrays(self) -> _DraftArrays:
        arrays = (self._lengths, self._stop_allowed_from, self._num_drafts, self._drafts)
        return _DraftArrays(*map(address, arrays), self._max_drafts)

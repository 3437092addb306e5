"""Hidden states that drafters go on from, on the device. `csrc/sampling/drafters.cu`."""

import ctypes
from functools import cached_property

import numpy as np

from openinfer_kernels.cuda.common.arrays import VECTOR_BYTES, address, require, require_rows, row_stride
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.launch import Kernel
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy
from openinfer_kernels.cuda.common.memory import Memory
from openinfer_kernels.cuda.sampling.sampling import Sampling
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array, AttentionBatch, SamplingBatch
from openinfer_kernels.ops.drafting import HiddenMemory
from openinfer_kernels.ops.sampling_columns import COLUMN_DTYPES, DEFAULTS

_THREADS = 128
_ROUNDING_THREADS, _ROUNDED = 256, 8
"""Numbers of a thread."""
_ADDED_COLUMNS = 4096  # of one block of threads
_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)


class _Hidden(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("last", "tail", "ends", "begun", "boundary")),
        *((name, ctypes.c_int64) for name in ("last_stride", "boundary_stride")),
        *((name, ctypes.c_int) for name in ("row_bytes", "depth", "block_tokens")),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("slots", "query_starts", "positions", "block_tables")),
        *((name, ctypes.c_int) for name in ("num_rows", "table_columns")),
    )


class Drafting:
    """The operators on one device."""

    def __init__(self, device: Device, memory: Memory, sampling: Sampling) -> None:
        names = ("restore", "before", "keep", "settle", "join", "clear", "ids", "add")
        self._kernels = {name: device.kernel("drafters", f"drafters_{name}") for name in names}
        self._device = device
        self._memory = memory
        self._sampling = sampling
        self._greedy: dict[tuple[int, int], SamplingBatch] = {}

    def hidden_before(self, hidden: Array, memory: HiddenMemory, slots: Array, batch: AttentionBatch) -> Array:
        """Hidden sizes are multiples of 8."""
        kept, step = _checked(hidden, memory, batch.block_tokens), _step(memory, slots, batch)
        before = cupy.empty(hidden.shape, hidden.dtype)
        self._run("restore", len(slots), [kept, step])
        self._run("before", len(hidden), [hidden, kept, step, before])
        return before

    def keep_hidden(self, hidden: Array, memory: HiddenMemory, slots: Array, batch: AttentionBatch) -> None:
        kept, step = _checked(hidden, memory, batch.block_tokens), _step(memory, slots, batch)
        self._run("keep", len(hidden), [hidden, kept, step])

    def settle_hidden(
        self, memory: HiddenMemory, slots: Array, lengths: Array, *, hidden: Array | None = None
    ) -> Array:
        """Slots are not checked: each is one of the memory's."""
        width = memory.tail.shape[2]
        for what, column in (("slots", slots), ("lengths", lengths)):
            require(column, _INT32, ndim=1, what=f"the {what}")
        settled = cupy.empty((len(slots), width), memory.tail.dtype)
        kept = _checked(settled if hidden is None else hidden, memory, block_tokens=1)
        if hidden is not None and len(hidden) != len(slots):
            raise ArrayMismatchError(f"{len(hidden)} hidden states for {len(slots)} slots")
        self._run("settle", len(slots), [kept, slots, lengths, hidden, settled])
        return settled

    def join_columns(self, *parts: Array) -> Array:
        """Widths are multiples of 8."""
        if len(parts) == 1 and parts[0].dtype == _FLOAT32 and parts[0].size < 1 << 31:
            return self._rounded(parts[0])
        whole = cupy.empty((len(parts[0]), sum(part.shape[1] for part in parts)), bfloat16)
        begin = 0
        for part in parts:
            width = part.shape[1]
            target, begin = whole[:, begin:], begin + width
            if len(part) != len(whole) or width % 8:
                raise ArrayMismatchError(f"columns of {part.shape} next to {parts[0].shape}: rows alike, of 8 numbers")
            rounded = self._memory.rounded(part) if part.dtype == _FLOAT32 else part
            require(rounded, bfloat16, ndim=2, what="the columns")
            row_bytes = width * bfloat16.itemsize
            self._run("join", len(part), [rounded, target, ctypes.c_int64(whole.strides[0]), ctypes.c_int(row_bytes)])
        return whole

    def clear_rows(self, matrix: Array, positions: Array, position: int) -> None:
        """Widths are multiples of 8."""
        require(matrix, bfloat16, ndim=2, what="the matrix")
        require(positions, _INT32, ndim=1, what="the positions")
        if len(matrix) != len(positions) or matrix.shape[1] % 8:
            raise ArrayMismatchError(f"rows of {matrix.shape} at {len(positions)} positions: rows alike, of 8 numbers")
        row_bytes = matrix.shape[1] * bfloat16.itemsize
        self._run("clear", len(matrix), [matrix, positions, ctypes.c_int(position), ctypes.c_int(row_bytes)])

    def _rounded(self, residual: Array) -> Array:
        """Between two layers of a model, whose kernels begin before the one ahead has ended: so does this one."""
        require(residual, _FLOAT32, ndim=2, what="the columns")
        if residual.shape[1] % _ROUNDED:
            raise ArrayMismatchError(f"columns of {residual.shape}: rows of {_ROUNDED} numbers")
        rounded, vectors = cupy.empty(residual.shape, bfloat16), residual.size // _ROUNDED
        if vectors:
            grid, arguments = -(-vectors // _ROUNDING_THREADS), [residual, rounded, ctypes.c_int(vectors)]
            self._round((grid, 1, 1), (_ROUNDING_THREADS, 1, 1), arguments, overlap=True)
        return rounded

    @cached_property
    def _round(self) -> Kernel:
        return self._device.kernel("norm", "residual_bfloat16")

    def draft_ids(self, logits: Array, drafts: Array, column: int, *, token_ids: Array | None = None) -> Array:
        require(drafts, _INT32, ndim=2, what="the drafts")
        if token_ids is not None:
            require(token_ids, _INT32, ndim=1, what="the token ids")
        if (
            len(logits) != len(drafts)
            or not 0 <= column < drafts.shape[1]
            or (token_ids is not None and len(token_ids) < logits.shape[1])
        ):
            raise ArrayMismatchError(f"logits {logits.shape} for drafts {drafts.shape}")
        ids = self._sampling.sample(logits, self._greedy_batch(*logits.shape))
        self._put(ids, drafts, column, token_ids)
        return ids

    def add_logits(self, target: Array, logits: Array, *, first: int, step: int) -> None:
        require(target, _FLOAT32, ndim=2, what="the target")
        require_rows(logits, _FLOAT32, what="the logits")
        count, width = target.shape
        if logits.shape[1] != width or not 0 <= first < step or len(logits) < count * step:
            raise ArrayMismatchError(f"row {first} of every {step} of logits {logits.shape} for {target.shape}")
        blocks = -(-width // _ADDED_COLUMNS)
        stride = ctypes.c_int64(step * row_stride(logits))
        self._run("add", count * blocks, [target, logits[first:], stride, ctypes.c_int(width), ctypes.c_int(blocks)])

    def put_ids(self, ids: Array, matrix: Array, column: int) -> None:
        for what, array, ndim in (("the ids", ids, 1), ("the matrix", matrix, 2)):
            require(array, _INT32, ndim=ndim, what=what)
        if len(ids) != len(matrix) or not 0 <= column < matrix.shape[1]:
            raise ArrayMismatchError(f"{len(ids)} ids for column {column} of {matrix.shape}")
        self._put(ids, matrix, column, None)

    def _put(self, ids: Array, matrix: Array, column: int, token_ids: Array | None) -> None:
        count, width = matrix.shape
        arguments = [ids, token_ids, matrix.reshape(-1)[column:], ctypes.c_int(width), ctypes.c_int(count)]
        if count:
            self._kernels["ids"]((-(-count // _THREADS), 1, 1), (_THREADS, 1, 1), arguments)

    def _greedy_batch(self, num_rows: int, num_columns: int) -> SamplingBatch:
        key = num_rows, num_columns
        if key not in self._greedy:
            given = {**DEFAULTS, "temperature": 0.0}
            columns = {
                name: self._memory.upload(np.full(num_rows, given.get(name, 0), dtype))
                for name, dtype in COLUMN_DTYPES.items()
            }
            self._greedy[key] = SamplingBatch(
                num_token_ids=num_columns, bias=None, penalties=None, token_mask=None, **columns
            )
        return self._greedy[key]

    def _run(self, name: str, count: int, arguments: list[object]) -> None:
        if count:
            self._kernels[name]((count, 1, 1), (_THREADS, 1, 1), arguments)


def _checked(hidden: Array, memory: HiddenMemory, block_tokens: int) -> _Hidden:
    require(hidden, hidden.dtype, ndim=2, what="the hidden states")
    require(memory.tail, hidden.dtype, ndim=3, what="the last hidden states")
    for what, column in (("ends", memory.ends), ("begun", memory.begun)):
        require(column, _INT32, ndim=1, what=what)
    last, row_bytes = memory.last, hidden.shape[1] * hidden.dtype.itemsize
    slots = {len(array) for array in (last, memory.tail, memory.ends, memory.begun)}
    are_alike = {last.shape[1], memory.tail.shape[2]} == {hidden.shape[1]} and last.dtype == hidden.dtype
    if len(slots) != 1 or not are_alike or last.strides[1] != last.dtype.itemsize:
        raise ArrayMismatchError(f"hidden states {hidden.shape}, kept as {last.shape} and {memory.tail.shape}")
    if row_bytes % VECTOR_BYTES or last.strides[0] % VECTOR_BYTES or address(last) % VECTOR_BYTES:
        raise ArrayMismatchError(f"hidden states of {hidden.shape[1]} numbers: 16 bytes are copied at once")
    boundary, stride = _boundary(memory, hidden)
    return _Hidden(
        *map(address, (last, memory.tail, memory.ends, memory.begun)),
        boundary,
        last.strides[0],
        stride,
        row_bytes,
        memory.tail.shape[1],
        max(block_tokens, 1),
    )


def _boundary(memory: HiddenMemory, hidden: Array) -> tuple[int | None, int]:
    """Where that of block 0 is, and bytes from block to block."""
    if memory.boundary is None:
        return None, 0
    data = memory.boundary.in_compute_dtype()
    require(data, hidden.dtype, ndim=6, what="the blocks")
    layer_bytes = data[0, 0].nbytes
    if memory.boundary_layers * layer_bytes < hidden.shape[1] * hidden.dtype.itemsize or layer_bytes % VECTOR_BYTES:
        raise ArrayMismatchError(
            f"{memory.boundary_layers} layers of {layer_bytes} bytes for {hidden.shape[1]} numbers"
        )
    return address(data) + memory.boundary.layer * layer_bytes, data.strides[0]


def _step(memory: HiddenMemory, slots: Array, batch: AttentionBatch) -> _Step:
    table = batch.block_tables[0 if memory.boundary is None else memory.boundary.table]
    for what, column in (("slots", slots), ("query_starts", batch.query_starts), ("positions", batch.positions)):
        require(column, _INT32, ndim=1, what=f"the {what}")
    require(table, _INT32, ndim=2, what="the block table")
    if not len(slots) == len(batch.query_starts) - 1 == len(table):
        raise ArrayMismatchError(f"{len(slots)} slots of {len(batch.query_starts) - 1} rows, {len(table)} with blocks")
    return _Step(*map(address, (slots, batch.query_starts, batch.positions, table)), len(slots), table.shape[1])

"""Weight matrices of a checkpoint, plain or quantised: their tensors by name, and a rank's share of one.

    matrix = StoredMatrix(name="X", shape=(out, in), format=FP8_BLOCKS)
    matrix.tensors() ─► part of `ModelDefinition.tensors`
    `WeightLoader.linear(matrix, shard=Shard.COLUMN_PARALLEL)` ─► what `Ops.linear` multiplies with

How a checkpoint stores a matrix is data, a `StoredFormat`. Codes are cut across ranks; scales are read whole, as groups
of them may be cut in the middle, and the part says where it begins. Whatever the packing, a part has one order of bits.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from openinfer_core import InvalidCheckpoint
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.model import Shard, WeightSource
from openinfer_engine.weights.checkpoint import share_of_rank
from openinfer_engine.weights.packing import awq_rows, awq_unpacked, offset_binary, unpacked
from openinfer_engine.weights.safetensors_file import NUMPY_DTYPES
from openinfer_engine.weights.stored_format import Packing, StoredFormat
from openinfer_engine.weights.stored_tensor import GroupIds, RandomBytes, Repeated, StoredTensor, TensorSpec
from openinfer_kernels import Code, HostArray, QuantisedPart, RandomCodes, ScaleType

_WORD_BITS = 32
_CUT_OTHERWISE = {Shard.COLUMN_PARALLEL: Shard.ROW_PARALLEL, Shard.ROW_PARALLEL: Shard.COLUMN_PARALLEL}
# dtype of an array of scales -> what it holds; uint8 is E8M0 or what the format says
_SCALE_TYPES = {"float32": ScaleType.F32, "float16": ScaleType.F16, "uint16": ScaleType.BF16}
# of dummy codes: E4M3 below 2, so that none is NaN
_MASKS = {Code.E4M3: 0xBF, Code.INT4: 0xFF, Code.INT8: 0xFF, Code.E2M1: 0xFF}
# root of the mean square of what these dummy codes stand for
_TYPICAL_CODES = {Code.E4M3: 0.598, Code.INT4: 4.637, Code.INT8: 73.9, Code.E2M1: 2.926}
_MATRIX_GAIN = 2.0  # as of other dummy matrices: what a product with a normed vector spreads by


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMatrix:
    """A weight matrix of a checkpoint."""

    name: str  # without `.weight`
    shape: tuple[int, int]  # `[out, in]`, of values
    format: StoredFormat | None = None  # None: plain, in BF16, float16 or float32

    def tensors(self) -> Mapping[str, TensorSpec]:
        stored = self.format
        if stored is None:
            return {f"{self.name}.weight": self.shape}
        found: dict[str, TensorSpec] = {
            stored.codes: StoredTensor(
                shape=_codes_shape(stored, self.shape),
                dtypes=stored.code_dtypes,
                dummy=RandomBytes(mask=_MASKS[stored.format.code]),
            ),
            stored.scales: self._scales(stored),
        }
        if stored.zero_points is not None:
            found[stored.zero_points] = _zero_points(stored, self.shape)
        if stored.minimums is not None:
            middle = -(1 << (stored.format.code.bits - 1)) * self._dummy_scale(stored)
            found[stored.minimums] = StoredTensor(
                shape=_grid(stored, self.shape), dtypes=("F16", "F32"), dummy=Repeated(values=(middle,))
            )
        if stored.global_scale is not None:
            scale = self._dummy_scale(stored)
            value = 1 / scale if stored.global_divides else scale
            found[stored.global_scale] = StoredTensor(
                shape=(1,), other_shapes=((),), dtypes=("F32",), dummy=Repeated(values=(value,))
            )
        if stored.declared_shape is not None:
            found[stored.declared_shape] = StoredTensor(
                shape=(2,), dtypes=("I64", "I32"), dummy=Repeated(values=self.shape)
            )
        if stored.group_index is not None:
            found[stored.group_index] = StoredTensor(
                shape=(self.shape[1],),
                dtypes=("I32", "I64"),
                dummy=GroupIds(size=stored.format.group_columns or self.shape[1]),
            )
        return {f"{self.name}.{tensor}": spec for tensor, spec in found.items()}

    def _scales(self, stored: StoredFormat) -> StoredTensor:
        grid = _grid(stored, self.shape)
        scale = 1.0 if stored.global_scale is not None else self._dummy_scale(stored)
        return StoredTensor(
            shape=grid[::-1] if stored.packing.is_transposed else grid,
            other_shapes=((), (1,)) if grid == (1, 1) else (grid[:1],) if grid[1] == 1 else (),
            dtypes=stored.scale_dtypes,
            dummy=Repeated(values=(scale,)),
        )

    def _dummy_scale(self, stored: StoredFormat) -> float:
        return _MATRIX_GAIN / math.sqrt(self.shape[1]) / _TYPICAL_CODES[stored.format.code]


def read_quantised(
    weights: WeightSource, matrix: StoredMatrix, stored: StoredFormat, shard: Shard, communicator: Communicator
) -> QuantisedPart:
    """A rank's share.

    Raises:
        InvalidCheckpoint: it cannot be cut so, or its tensors are none that the format has: another shape is declared,
            groups are scattered, or zero points differ where the config says that they are symmetric.
    """
    codes = f"{matrix.name}.{stored.codes}"
    if stored.declared_shape is not None:
        _check_declared(weights, matrix, stored.declared_shape)
    if stored.group_index is not None:
        _check_groups(weights, matrix, stored, stored.group_index)
    begin, _ = share_of_rank(matrix.shape, codes, shard, rank=communicator.rank, size=communicator.size)
    grid = _grid(stored, matrix.shape)
    scales = weights.read_stored(f"{matrix.name}.{stored.scales}")
    scales = scales.T if stored.packing.is_transposed else scales.reshape(grid)
    return QuantisedPart(
        format=replace(stored.format, scales=_SCALE_TYPES.get(str(scales.dtype)) or _byte_scales(stored)),
        codes=_read_codes(weights, matrix, stored, shard, communicator),
        scales=scales,
        zero_points=None if stored.zero_points is None else _read_zero_points(weights, matrix, stored),
        minimums=None if stored.minimums is None else weights.read_stored(f"{matrix.name}.{stored.minimums}"),
        global_scale=1.0 if stored.global_scale is None else _read_global_scale(weights, matrix, stored),
        first_row=begin if shard is Shard.COLUMN_PARALLEL else 0,
        first_column=begin if shard is Shard.ROW_PARALLEL else 0,
        name=matrix.name,
    )


def _codes_shape(stored: StoredFormat, shape: tuple[int, int]) -> tuple[int, int]:
    rows, columns = shape
    per_word = _WORD_BITS // stored.format.code.bits
    match stored.packing:
        case Packing.GPTQ:
            return columns // per_word, rows
        case Packing.AWQ:
            return columns, rows // per_word
        case Packing.SIGNED:
            return shape
        case Packing.ROWS | Packing.PAIRS:
            entry_bits = 8 * NUMPY_DTYPES[stored.code_dtypes[0]].itemsize
            return rows, columns * stored.format.code.bits // entry_bits


def _grid(stored: StoredFormat, shape: tuple[int, int]) -> tuple[int, int]:
    """Groups of rows and of columns."""
    rows, columns = (
        1 if group is None else -(-size // group) for size, group in zip(shape, stored.format.groups, strict=True)
    )
    return rows, columns


def _zero_points(stored: StoredFormat, shape: tuple[int, int]) -> StoredTensor:
    """Words, along the outputs; dummies are the two middles of all codes."""
    (rows, groups), bits = _grid(stored, shape), stored.format.code.bits
    words = -(-rows * bits // _WORD_BITS)
    word = _word_of_zeros(stored)
    return StoredTensor(
        shape=(groups, words) if stored.packing.is_transposed else (words, groups),
        dtypes=("I32",),
        dummy=Repeated(values=(word,)),
    )


def _word_of_zeros(stored: StoredFormat) -> int:
    """A word of zero points in the middle, as an int32.

    Where they may differ, every other one is a code lower. All codes are as far above 7 as below 8, and half a code of
    one sign would add up over the columns: all tokens would look alike, and be routed to the same experts.
    """
    bits = stored.format.code.bits
    middle = (1 << (bits - 1)) - stored.zero_offset
    lower = middle - stored.format.zero_points
    word = sum((lower if shift // bits % 2 else middle) << shift for shift in range(0, _WORD_BITS, bits))
    return word - (1 << _WORD_BITS) if word >> (_WORD_BITS - 1) else word


def _read_codes(
    weights: WeightSource, matrix: StoredMatrix, stored: StoredFormat, shard: Shard, communicator: Communicator
) -> HostArray | RandomCodes:
    """A rank's, in `QuantisedPart`'s order."""
    name, packing = f"{matrix.name}.{stored.codes}", stored.packing
    codes = weights.read_stored(name, _CUT_OTHERWISE.get(shard, shard) if packing.is_transposed else shard)
    if isinstance(codes, RandomCodes):
        return _random_rows(codes, matrix, stored, shard, communicator) if packing.is_transposed else codes
    match packing:
        case Packing.ROWS | Packing.PAIRS:
            return codes
        case Packing.SIGNED:
            return offset_binary(codes)
        case Packing.GPTQ:
            return codes.T
        case Packing.AWQ:
            return awq_rows(codes)


def _random_rows(
    codes: RandomCodes, matrix: StoredMatrix, stored: StoredFormat, shard: Shard, communicator: Communicator
) -> RandomCodes:
    """Codes that come from no file need not be transposed: a rank's share of others."""
    rows, columns = matrix.shape
    bytes_of_row = columns * stored.format.code.bits // 8
    whole = RandomCodes.whole((rows, bytes_of_row), seed=codes.seed, mask=codes.mask, itemsize=1)
    if shard is Shard.WHOLE:
        return whole
    shape = rows, bytes_of_row
    begin, end = share_of_rank(shape, matrix.name, shard, rank=communicator.rank, size=communicator.size)
    return whole.rows(begin, end) if shard is Shard.COLUMN_PARALLEL else whole.columns(begin, end)


def _read_zero_points(weights: WeightSource, matrix: StoredMatrix, stored: StoredFormat) -> HostArray | None:
    """`[groups of rows, groups of columns]` uint8; None where they are in the middle, which was compared."""
    name, bits = f"{matrix.name}.{stored.zero_points}", stored.format.code.bits
    words = weights.read_stored(name)
    if not stored.format.zero_points:
        if (words != _word_of_zeros(stored)).any():
            raise InvalidCheckpoint(f"{name} has zero points that are not all the middle, which its config says (sym)")
        return None
    match stored.packing:
        case Packing.AWQ:
            found = awq_unpacked(words).T
        case Packing.GPTQ:
            found = unpacked(words, bits, 1).T
        case _:
            found = unpacked(words, bits, 0)
    found = found[: matrix.shape[0]]  # the last word may be filled up
    if stored.zero_offset and (found == (1 << bits) - stored.zero_offset).any():
        raise InvalidCheckpoint(
            f"{name} has the zero point {(1 << bits) - stored.zero_offset}, to which one is added: readers of this "
            "layout do not agree what that is; export it as checkpoint_format gptq_v2"
        )
    return found + np.uint8(stored.zero_offset)


def _read_global_scale(weights: WeightSource, matrix: StoredMatrix, stored: StoredFormat) -> float:
    name = f"{matrix.name}.{stored.global_scale}"
    value = float(weights.read_stored(name).reshape(()))
    if not math.isfinite(value) or value <= 0:
        raise InvalidCheckpoint(f"{name} is {value}, which no scale is")
    return 1 / value if stored.global_divides else value


def _check_declared(weights: WeightSource, matrix: StoredMatrix, declared: str) -> None:
    shape = weights.read_stored(f"{matrix.name}.{declared}")
    if tuple(int(size) for size in shape) != matrix.shape:
        codes = matrix.format.codes if matrix.format else "weight"
        raise InvalidCheckpoint(
            f"{matrix.name}.{declared} says {shape.tolist()}, and {matrix.name}.{codes} is read as {list(matrix.shape)}"
        )


def _check_groups(weights: WeightSource, matrix: StoredMatrix, stored: StoredFormat, group_index: str) -> None:
    columns = matrix.shape[1]
    expected = np.arange(columns) // (stored.format.group_columns or columns)
    if not np.array_equal(weights.read_stored(f"{matrix.name}.{group_index}"), expected):
        raise InvalidCheckpoint(
            f"{matrix.name}.{group_index} scatters groups of inputs (desc_act): only groups of neighbours are served"
        )


def _byte_scales(stored: StoredFormat) -> ScaleType:
    return ScaleType.E4M3 if stored.format.scales is ScaleType.E4M3 else ScaleType.E8M0

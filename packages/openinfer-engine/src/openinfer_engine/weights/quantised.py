"""Weight matrices of a checkpoint, plain or quantised: their tensors by name, and a rank's share of one.

    matrix = StoredMatrix(name="X", shape=(out, in), format=FP8_BLOCKS)
    matrix.tensors() ─► part of `ModelDefinition.tensors`
    `WeightLoader.linear(matrix, shard=Shard.COLUMN_PARALLEL)` ─► what `Ops.linear` multiplies with

How a checkpoint stores a matrix is data, a `StoredFormat`; a family says which of its matrices have which. Codes are
cut across ranks; scales are read whole, as blocks of them may be cut in the middle, and the part says where it begins.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from openinfer_core import InvalidCheckpoint
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.model import Shard, WeightSource
from openinfer_engine.weights.checkpoint import share_of_rank
from openinfer_engine.weights.safetensors_file import NUMPY_DTYPES
from openinfer_engine.weights.stored_tensor import RandomBytes, Repeated, StoredTensor, TensorSpec
from openinfer_kernels import Code, QuantisedPart, ScaleType, WeightFormat
from openinfer_kernels.weights.quantised import FP8_BLOCK_128, INT4_GROUP_32

# what the codes' tensors may have for a dtype; the values of a row are in whole numbers of it, or in pairs
_CODE_DTYPES = {Code.E4M3: ("F8_E4M3",), Code.INT4: ("I32",), Code.E2M1: ("I8", "U8", "F4")}
_SCALE_DTYPES = {
    Code.E4M3: ("F32", "F8_E8M0", "BF16", "F16"),
    Code.INT4: ("BF16", "F16", "F32"),
    Code.E2M1: ("F8_E8M0",),
}
# dtype of an array of scales -> what it holds
_SCALE_TYPES = {
    "float32": ScaleType.F32,
    "float16": ScaleType.F16,
    "uint16": ScaleType.BF16,
    "uint8": ScaleType.E8M0,
}
# of dummy codes: E4M3 below 2, so that none is NaN
_MASKS = {Code.E4M3: 0xBF, Code.INT4: 0xFF, Code.INT8: 0xFF, Code.E2M1: 0xFF}
# root of the mean square of what these dummy codes stand for
_TYPICAL_CODES = {Code.E4M3: 0.598, Code.INT4: 4.637, Code.INT8: 73.9, Code.E2M1: 2.926}
_MATRIX_GAIN = 2.0  # as of other dummy matrices: what a product with a normed vector spreads by


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFormat:
    """How a checkpoint stores quantised matrices, and what the tensors of matrix `X` are called: `X.weight`, ..."""

    format: WeightFormat
    scales: str
    codes: str = "weight"
    declared_shape: str | None = None  # of a tensor `[2]` that repeats the shape, where there is one; it is compared


# DeepSeek-V3's: `quant_method` `fp8` with `weight_block_size` [128, 128]
FP8_BLOCKS = StoredFormat(format=FP8_BLOCK_128, scales="weight_scale_inv")
# `pack-quantized` of compressed-tensors, in groups of 32
PACKED_INT4 = StoredFormat(
    format=INT4_GROUP_32, codes="weight_packed", scales="weight_scale", declared_shape="weight_shape"
)

_FP8_FIELDS = {"fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
_INT4_FIELDS = {"num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": True, "type": "int"}


def stored_format(quantization_config: object) -> StoredFormat | None:
    """What the `quantization_config` of a `config.json` says of the matrices that are quantised; None: none is.

    Raises:
        ValueError: a format that is not served; says which.
    """
    if not quantization_config:
        return None
    if not isinstance(quantization_config, dict):
        raise ValueError(f"quantization_config must be a JSON object, not {quantization_config!r}")
    fields = cast("dict[str, Any]", quantization_config)
    method = fields.get("quant_method")
    if method == "fp8":
        _require(fields, _FP8_FIELDS)
        return FP8_BLOCKS
    if method == "compressed-tensors":
        _require(fields, {"format": "pack-quantized"})
        for group in _object(fields, "config_groups").values():
            each = _object({"a group of config_groups": group}, "a group of config_groups")
            _require(_object(each, "weights"), _INT4_FIELDS)
            _require(each, {"input_activations": None, "output_activations": None})
        return PACKED_INT4
    raise ValueError(f"quant_method is {method!r}: only fp8 and compressed-tensors are served")


def _object(fields: Mapping[str, Any], key: str) -> dict[str, Any]:
    value: object = fields.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{key} of quantised weights must be a JSON object, not {value!r}")
    return cast("dict[str, Any]", value)


def _require(fields: Mapping[str, Any], served: Mapping[str, Any]) -> None:
    for key, value in served.items():
        if fields.get(key, value) != value:
            raise ValueError(f"{key} of quantised weights is {fields[key]!r}: only {value!r} is served")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMatrix:
    """A weight matrix of a checkpoint."""

    name: str  # without `.weight`
    shape: tuple[int, int]  # `[out, in]`, of values
    format: StoredFormat | None = None  # None: plain, in BF16, float16 or float32

    def tensors(self) -> Mapping[str, TensorSpec]:
        stored, (rows, columns) = self.format, self.shape
        if stored is None:
            return {f"{self.name}.weight": self.shape}
        code, (group_rows, group_columns) = stored.format.code, stored.format.groups
        scale = _MATRIX_GAIN / math.sqrt(columns) / _TYPICAL_CODES[code]
        itemsize_bytes = NUMPY_DTYPES[_CODE_DTYPES[code][0]].itemsize
        found: dict[str, TensorSpec] = {
            f"{self.name}.{stored.codes}": StoredTensor(
                shape=(rows, columns * code.bits // 8 // itemsize_bytes),
                dtypes=_CODE_DTYPES[code],
                dummy=RandomBytes(mask=_MASKS[code]),
            ),
            f"{self.name}.{stored.scales}": StoredTensor(
                shape=(-(-rows // (group_rows or rows)), -(-columns // (group_columns or columns))),
                dtypes=_SCALE_DTYPES[code],
                dummy=Repeated(values=(scale,)),
            ),
        }
        if stored.declared_shape is not None:
            found[f"{self.name}.{stored.declared_shape}"] = StoredTensor(
                shape=(2,), dtypes=("I64", "I32"), dummy=Repeated(values=self.shape)
            )
        return found


def read_quantised(
    weights: WeightSource, matrix: StoredMatrix, stored: StoredFormat, shard: Shard, communicator: Communicator
) -> QuantisedPart:
    """A rank's share; `InvalidCheckpoint` if it cannot be cut so, or says that it has another shape."""
    codes = f"{matrix.name}.{stored.codes}"
    if stored.declared_shape is not None:
        declared = f"{matrix.name}.{stored.declared_shape}"
        shape = weights.read_stored(declared)
        if tuple(int(size) for size in shape) != matrix.shape:
            raise InvalidCheckpoint(f"{declared} says {shape.tolist()}, and {codes} is read as {list(matrix.shape)}")
    begin, _ = share_of_rank(matrix.shape, codes, shard, rank=communicator.rank, size=communicator.size)
    scales = weights.read_stored(f"{matrix.name}.{stored.scales}")
    return QuantisedPart(
        format=replace(stored.format, scales=_SCALE_TYPES[str(scales.dtype)]),
        codes=weights.read_stored(codes, shard),
        scales=scales,
        first_row=begin if shard is Shard.COLUMN_PARALLEL else 0,
        first_column=begin if shard is Shard.ROW_PARALLEL else 0,
    )

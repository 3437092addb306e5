"""How checkpoints store quantised matrices, as data: names, dtypes and packings of the tensors of one matrix.

    X.weight, X.weight_scale_inv ─► `StoredFormat` ─► `quantised.StoredMatrix` ─► `QuantisedPart`

What a config says of them is in `quantization_config.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from openinfer_engine.weights.safetensors_file import TensorInfo
from openinfer_kernels import Code, ScaleType, WeightFormat
from openinfer_kernels.weights.quantised import FP8_BLOCK_128, INT4_GROUP_32

PLAIN_DTYPES = frozenset({"BF16", "F16", "F32"})
# dtype of scales in a file -> what they are; MXFP4 of compressed-tensors has E8M0 as U8
SCALE_TYPES: Mapping[str, ScaleType] = {
    "F32": ScaleType.F32,
    "F16": ScaleType.F16,
    "BF16": ScaleType.BF16,
    "F8_E8M0": ScaleType.E8M0,
    "U8": ScaleType.E8M0,
    "F8_E4M3": ScaleType.E4M3,
}


class Packing(StrEnum):
    """How the codes of a matrix `[out, in]` lie in their tensor."""

    ROWS = "rows"
    """Along the inputs in order: `[out, in]` bytes, `[out, in / 2]` pairs, or `[out, in bits / 32]` words."""
    SIGNED = "signed"
    """`[out, in]` int8: two's complement."""
    GPTQ = "gptq"
    """`[in bits / 32, out]` words along the inputs, in order; zero points `[groups, out bits / 32]`."""
    PAIRS = "pairs"
    """`[out, in / 2]` bytes, the even column the low half."""
    AWQ = "awq"
    """`[in, out / 8]` words along the outputs, interleaved; zero points alike."""

    @property
    def is_transposed(self) -> bool:
        return self in (Packing.GPTQ, Packing.AWQ)


_CODE_DTYPES: Mapping[Packing, tuple[str, ...]] = {Packing.SIGNED: ("I8",), Packing.PAIRS: ("U8",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFormat:
    """How a checkpoint stores quantised matrices, and what the tensors of matrix `X` are called: `X.weight`, ..."""

    format: WeightFormat  # whose scales have the dtype that dummies get; a checkpoint's have their own
    scales: str
    codes: str = "weight"
    packing: Packing = Packing.ROWS
    zero_points: str | None = None  # where a format without zero points names them, each is compared with the middle
    minimums: str | None = None
    zero_offset: int = 0  # is added to stored zero points: AutoGPTQ's first version stores one less
    global_scale: str | None = None
    global_divides: bool = False  # compressed-tensors' does, modelopt's multiplies
    declared_shape: str | None = None  # of a tensor `[2]` that repeats the shape, where there is one; it is compared
    group_index: str | None = None  # of a tensor `[in]` with the group of each input, where a checkpoint has one

    @property
    def code_dtypes(self) -> tuple[str, ...]:
        """The dtypes that codes may have in a file, a dummy's first."""
        if self.packing in _CODE_DTYPES:
            return _CODE_DTYPES[self.packing]
        return {Code.E4M3: ("F8_E4M3",), Code.E2M1: ("I8", "U8", "F4")}.get(self.format.code, ("I32",))

    @property
    def scale_dtypes(self) -> tuple[str, ...]:
        """The dtypes that scales may have in a file, a dummy's first."""
        own = self.format.scales
        if own is ScaleType.E4M3:
            return ("F8_E4M3",)
        if self.format.code is Code.E2M1:
            return ("F8_E8M0", "U8")
        possible = ("F32", "BF16", "F16", *(("F8_E8M0",) if self.format.code is Code.E4M3 else ()))
        return tuple(sorted(possible, key=lambda dtype: SCALE_TYPES[dtype] is not own))

    def found(self, name: str, tensors: Mapping[str, TensorInfo]) -> "StoredFormat | None":
        """The same as a checkpoint's tensors have it; None: matrix `name` is there in BF16, float16 or float32."""
        plain = tensors.get(f"{name}.weight")
        if plain is not None and plain.dtype in PLAIN_DTYPES:
            return None
        scales = tensors.get(f"{name}.{self.scales}")
        kind = self.format.scales if scales is None else SCALE_TYPES.get(scales.dtype, self.format.scales)
        optional = {
            field: tensor if f"{name}.{tensor}" in tensors else None
            for field, tensor in (("declared_shape", self.declared_shape or "weight_shape"), ("group_index", "g_idx"))
        }
        return replace(self, format=replace(self.format, scales=kind), **optional)


# DeepSeek-V3's: `quant_method` `fp8` with `weight_block_size` [128, 128]
FP8_BLOCKS = StoredFormat(format=FP8_BLOCK_128, scales="weight_scale_inv")
# `pack-quantized` of compressed-tensors, in groups of 32
PACKED_INT4 = StoredFormat(
    format=INT4_GROUP_32, codes="weight_packed", scales="weight_scale", declared_shape="weight_shape"
)


def _ggml(code: Code, packing: Packing, codes: str, *, minimums: bool = False) -> StoredFormat:
    made = WeightFormat(code=code, group_rows=1, group_columns=32, scales=ScaleType.F16, minimums=minimums)
    named = "minimums" if minimums else None
    return StoredFormat(format=made, packing=packing, codes=codes, scales="scales", minimums=named)


# ggml's blocks of 32 that are kept as they are, by its name of them: a block's parts as `gguf.file` takes them apart
GGML_FORMATS: Mapping[str, StoredFormat] = {
    "Q8_0": _ggml(Code.INT8, Packing.SIGNED, "q8_0"),
    "Q4_0": _ggml(Code.INT4, Packing.PAIRS, "q4_0"),
    "Q4_1": _ggml(Code.INT4, Packing.PAIRS, "q4_1", minimums=True),
}

"""Quantised copies of a checkpoint, in every layout that people publish: written from the packers' side.

    write_quantised(plain, target, SCHEMES["awq"]) ─► the values that the target's matrices stand for, in float32

Nothing here reads a layout, and nothing of `openinfer_engine.weights.packing` is used: each packer follows the loops of
the package that publishes so (AutoAWQ's `order_map`, AutoGPTQ's `pack`, compressed-tensors' `pack_to_int32`).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from openinfer_engine.weights.checkpoint import Checkpoint
from openinfer_kernels.weights.code_values import E2M1_VALUES, E4M3_VALUES

Floats: TypeAlias = NDArray[np.float32]
Tensor: TypeAlias = tuple[str, NDArray[Any]]
"""dtype of the safetensors format, and its bits."""
Packed: TypeAlias = tuple[Mapping[str, Tensor], Floats]
"""Tensors by the end of their name, and what they stand for, `[out, in]`."""

_AWQ_ORDER_MAP = (0, 2, 4, 6, 1, 3, 5, 7)
_E4M3_POSITIVE = 0x7F
_LARGEST_E4M3 = 448.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A published layout."""

    config: Mapping[str, Any]
    """`quantization_config`."""
    pack: Callable[[Floats], Packed]
    plain: tuple[str, ...] = ()
    """Parts of the names of matrices that stay as they are."""


def write_quantised(source: Path, target: Path, scheme: Scheme, matrices: Sequence[str]) -> dict[str, Floats]:
    """Writes a copy of a checkpoint with some matrices quantised, and next to it `target/dequantised`.

    Args:
        source: `config.json` and safetensors, in BF16.
        target: a new folder; `target/dequantised` is the same checkpoint with float32 matrices of equal values.
        scheme: how.
        matrices: names, without `.weight`; those that the scheme leaves plain are left.

    Returns:
        What each quantised matrix stands for.
    """
    dequantised = target / "dequantised"
    dequantised.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text())
    (dequantised / "config.json").write_text(json.dumps(config))
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": dict(scheme.config)}))
    tensors: dict[str, Tensor] = {}
    values: dict[str, Floats] = {}
    with Checkpoint.open(source) as checkpoint:
        for name, info in checkpoint.tensors.items():
            array, matrix = checkpoint.read(name), name.removesuffix(".weight")
            tensors[name] = info.dtype, array
            if matrix in matrices and not any(each in matrix for each in scheme.plain):
                found, values[matrix] = scheme.pack(_floats(array))
                del tensors[name]
                tensors |= {f"{matrix}.{part}": tensor for part, tensor in found.items()}
        plain = {name: (info.dtype, checkpoint.read(name)) for name, info in checkpoint.tensors.items()}
        write_safetensors(target / "model.safetensors", tensors)
        plain |= {f"{matrix}.weight": ("F32", array) for matrix, array in values.items()}
        write_safetensors(dequantised / "model.safetensors", plain)
    return values


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A file, by the definition of the format."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, array) in tensors.items():
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [end, end := end + array.nbytes]}
    text = json.dumps(header).encode()
    data = b"".join(np.ascontiguousarray(array).tobytes() for _, array in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def _floats(array: NDArray[Any]) -> Floats:
    return (array.astype(np.uint32) << 16).view(np.float32) if array.dtype == np.uint16 else array.astype(np.float32)


# --- scales -------------------------------------------------------------------------------------------------


def _stored(scales: Floats, dtype: str) -> tuple[Tensor, Floats]:
    """Scales in a dtype, and what they are then."""
    match dtype:
        case "F32":
            return (dtype, scales), scales
        case "F16":
            return (dtype, scales.astype(np.float16)), scales.astype(np.float16).astype(np.float32)
        case "BF16":
            bits = (scales.view(np.uint32) >> 16).astype(np.uint16)
            return (dtype, bits), _floats(bits)
        case "F8_E4M3":
            codes = _e4m3(scales)
            return (dtype, codes), E4M3_VALUES[codes]
        case _:  # E8M0, which compressed-tensors calls U8
            powers = np.ceil(np.log2(scales))
            return (dtype, (powers + 127).astype(np.uint8)), np.exp2(powers).astype(np.float32)


def _e4m3(values: Floats) -> NDArray[np.uint8]:
    """The nearest codes."""
    return _nearest(values, E4M3_VALUES[:_E4M3_POSITIVE], sign=0x80)


def _nearest(values: Floats, sizes: Floats, *, sign: int) -> NDArray[np.uint8]:
    middles = (sizes[1:] + sizes[:-1]) / 2
    codes = np.searchsorted(middles, np.abs(values)).astype(np.uint8)
    return codes | np.where(values < 0, sign, 0).astype(np.uint8)


def _largest(values: Floats, rows: int, columns: int) -> Floats:
    """The largest size in each block `[rows, columns]`, the last ones partial."""
    out, inner = values.shape
    grid = [
        [np.abs(values[o : o + rows, i : i + columns]).max() for i in range(0, inner, columns)]
        for o in range(0, out, rows)
    ]
    return np.asarray(grid, np.float32)


def _spread(grid: NDArray[Any], rows: int, columns: int, shape: tuple[int, ...]) -> NDArray[Any]:
    return grid.repeat(rows, 0)[: shape[0]].repeat(columns, 1)[:, : shape[1]]


# --- packers ------------------------------------------------------------------------------------------------


def _fp8(name: str, dtype: str, block: tuple[int, int] | None, shape: tuple[int, ...] | None = None) -> Any:
    """FP8 with a scale per block, None being the whole matrix, of which the tensor may have another shape."""

    def pack(values: Floats) -> Packed:
        rows, columns = values.shape if block is None else (block[0], block[1] or values.shape[1])
        stored, scales = _stored(_largest(values, rows, columns) / np.float32(_LARGEST_E4M3), dtype)
        spread = _spread(scales, rows, columns, values.shape)
        codes = _e4m3(np.clip(values / spread, -_LARGEST_E4M3, _LARGEST_E4M3).astype(np.float32))
        tensor = stored if shape is None else (stored[0], stored[1].reshape(shape))
        found = {"weight": ("F8_E4M3", codes), name: tensor, "input_scale": ("F32", np.float32(0.5).reshape(1))}
        return (found if block is None else {k: v for k, v in found.items() if k != "input_scale"}), (
            E4M3_VALUES[codes] * spread
        )

    return pack


@dataclass(frozen=True, slots=True)
class _Integers:
    codes: NDArray[np.int64]
    zeros: NDArray[np.int64]
    scales: Tensor
    values: Floats


def _integers(values: Floats, *, bits: int, group: int | None, symmetric: bool, dtype: str) -> _Integers:
    columns = group or values.shape[1]
    most = (1 << bits) - 1
    grid = values.reshape(len(values), -1, columns)
    low, high = np.minimum(grid.min(2), 0), np.maximum(grid.max(2), 0)
    # As AutoGPTQ's `find_params` and compressed-tensors' `calculate_qparams`: the largest number lies between two
    # codes, and above zero it takes the lower one.
    sizes = np.abs(grid).max(2) / (most / 2) if symmetric else (high - low) / most
    stored, scales = _stored(np.maximum(sizes, np.float32(1e-4)).astype(np.float32), dtype)
    middle = np.full(scales.shape, (most + 1) // 2, np.int64)
    zeros = middle if symmetric else np.clip(np.rint(-low / scales), 1, most).astype(np.int64)
    codes = np.clip(np.rint(grid / scales[..., None]) + zeros[..., None], 0, most).astype(np.int64)
    found = (codes - zeros[..., None]).astype(np.float32) * scales[..., None]
    return _Integers(codes.reshape(values.shape), zeros, stored, found.reshape(values.shape))


def _packed_along(codes: NDArray[np.int64], bits: int, axis: int) -> NDArray[np.int32]:
    """compressed-tensors' and AutoGPTQ's order: the next code a few bits higher, the last word filled with zeros."""
    moved = np.moveaxis(codes, axis, 0)
    per_word = 32 // bits
    words = np.zeros((-(-len(moved) // per_word), *moved.shape[1:]), np.uint32)
    for index, row in enumerate(moved):
        words[index // per_word] |= row.astype(np.uint32) << np.uint32(bits * (index % per_word))
    return np.moveaxis(words.view(np.int32), 0, axis)


def _awq_packed(codes: NDArray[np.int64]) -> NDArray[np.int32]:
    """AutoAWQ's `WQLinear_GEMM.from_linear`, of `[n, out]`."""
    words = np.zeros((len(codes), codes.shape[1] // 8), np.uint32)
    for column in range(words.shape[1]):
        for index, source in enumerate(_AWQ_ORDER_MAP):
            words[:, column] |= codes[:, 8 * column + source].astype(np.uint32) << np.uint32(4 * index)
    return words.view(np.int32)


def _awq(group: int | None) -> Any:
    def pack(values: Floats) -> Packed:
        made = _integers(values, bits=4, group=group, symmetric=False, dtype="F16")
        dtype, scales = made.scales
        found = {
            "qweight": ("I32", _awq_packed(made.codes.T)),
            "qzeros": ("I32", _awq_packed(made.zeros.T)),
            "scales": (dtype, scales.T),
        }
        return found, made.values

    return pack


def _gptq(group: int | None, *, bits: int = 4, symmetric: bool = True, offset: int = 1) -> Any:
    def pack(values: Floats) -> Packed:
        made = _integers(values, bits=bits, group=group, symmetric=symmetric, dtype="F16")
        dtype, scales = made.scales
        columns = values.shape[1]
        found: dict[str, Tensor] = {
            "qweight": ("I32", _packed_along(made.codes.T, bits, 0)),
            "qzeros": ("I32", _packed_along(made.zeros.T - offset, bits, 1)),
            "scales": (dtype, scales.T),
            "g_idx": ("I32", np.asarray(np.arange(columns) // (group or columns), np.int32)),
        }
        return found, made.values

    return pack


def _compressed(group: int | None, *, bits: int = 4, symmetric: bool = True, dtype: str = "BF16") -> Any:
    def pack(values: Floats) -> Packed:
        made = _integers(values, bits=bits, group=group, symmetric=symmetric, dtype=dtype)
        found = {
            "weight_packed": ("I32", _packed_along(made.codes, bits, 1)),
            "weight_scale": made.scales,
            "weight_shape": ("I64", np.asarray(values.shape, np.int64)),
        }
        if not symmetric:
            found["weight_zero_point"] = ("I32", _packed_along(made.zeros, bits, 0))
        return found, made.values

    return pack


def _int8(values: Floats) -> Packed:
    made = _integers(values, bits=8, group=None, symmetric=True, dtype="BF16")
    return {"weight": ("I8", (made.codes - 128).astype(np.int8)), "weight_scale": made.scales}, made.values


def _e2m1(values: Floats, spread: Floats) -> tuple[NDArray[np.uint8], Floats]:
    """Pairs of codes, the even column low, and what they are times their scales."""
    codes = _nearest(values / spread, E2M1_VALUES[:8].astype(np.float32), sign=8)
    pairs = (codes[:, 0::2] + 16 * codes[:, 1::2]).astype(np.uint8)
    return pairs, E2M1_VALUES[codes].astype(np.float32) * spread


def _mxfp4(values: Floats) -> Packed:
    # compressed-tensors' `round_to_power_2`: up from 1.75 times a power of two on, else down; codes reach 1.5 times 4.
    fraction, exponent = np.frexp(_largest(values, 1, 32))
    powers = np.exp2(exponent - 1 + (2 * fraction >= 1.75) - 2).astype(np.float32)
    stored, scales = _stored(powers, "U8")
    pairs, found = _e2m1(values, _spread(scales, 1, 32, values.shape))
    return {"weight_packed": ("U8", pairs), "weight_scale": stored}, found


def _nvfp4(codes: str, name: str, *, divides: bool) -> Any:
    def pack(values: Floats) -> Packed:
        divisor = np.float32(_LARGEST_E4M3 * 6 / np.abs(values).max())
        factor = divisor if divides else np.float32(1) / divisor
        stored, scales = _stored(_largest(values, 1, 16) / np.float32(6) * divisor, "F8_E4M3")
        true = scales / factor if divides else scales * factor
        pairs, found = _e2m1(values, _spread(true.astype(np.float32), 1, 16, values.shape))
        return {codes: ("U8", pairs), "weight_scale": stored, name: ("F32", factor.reshape(1))}, found

    return pack


def _ggml(bits: int, codes: str, *, minimums: bool = False) -> Any:
    """As ggml's `quantize_row_q8_0_ref`, `_q4_0_ref` and `_q4_1_ref`, blocks taken apart."""

    def pack(values: Floats) -> Packed:
        grid = values.reshape(len(values), -1, 32)
        low = grid.min(2) if minimums else np.take_along_axis(grid, np.abs(grid).argmax(2)[..., None], 2)[..., 0]
        sizes = {(8, False): np.abs(low) / 127, (4, False): -low / 8, (4, True): (grid.max(2) - low) / 15}
        scales = np.where(sizes[bits, minimums] == 0, 1, sizes[bits, minimums]).astype(np.float16)
        lowest = low.astype(np.float16).astype(np.float32) if minimums else np.zeros_like(low)
        d, middle = scales.astype(np.float32)[..., None], 0 if minimums or bits == 8 else 8
        least, most = (-127, 127) if bits == 8 else (0, 15)
        found = np.clip(np.rint((grid - lowest[..., None]) / d) + middle, least, most).astype(np.int64)
        integers = found.reshape(values.shape)
        packed = (
            integers.astype(np.int8) if bits == 8 else (integers[:, 0::2] + 16 * integers[:, 1::2]).astype(np.uint8)
        )
        parts: dict[str, Tensor] = {codes: ("I8" if bits == 8 else "U8", packed), "scales": ("F16", scales)}
        if minimums:
            parts["minimums"] = ("F16", low.astype(np.float16))
        true = (found - middle).astype(np.float32) * d + lowest[..., None]
        return parts, true.reshape(values.shape).astype(np.float32)

    return pack


# --- configs ------------------------------------------------------------------------------------------------


def _groups(name: str, *, activations: Mapping[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    config = {"quant_method": "compressed-tensors", "format": name, "config_groups": {"group_0": group}}
    return config | {"ignore": ["lm_head"], "kv_cache_scheme": None}


def _integer_groups(group: int | None, *, bits: int = 4, symmetric: bool = True) -> dict[str, Any]:
    strategy = "channel" if group is None else "group"
    return _groups(
        "pack-quantized", num_bits=bits, type="int", strategy=strategy, group_size=group, symmetric=symmetric
    )


_DYNAMIC = {"num_bits": 8, "dynamic": True, "strategy": "token", "symmetric": True}
_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def schemes(group: int) -> dict[str, Scheme]:
    """Every layout, by a name for people; integers in groups of so many columns where the layout leaves it open."""
    awq = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": True, "desc_act": False}
    return {
        **{
            f"ggml {kind}": Scheme(config={"quant_method": "gguf", "type": kind}, pack=pack)
            for kind, pack in (
                ("Q8_0", _ggml(8, "q8_0")),
                ("Q4_0", _ggml(4, "q4_0")),
                ("Q4_1", _ggml(4, "q4_1", minimums=True)),
            )
        },
        **{
            f"fp8 blocks {dtype}": Scheme(config=_BLOCKS, pack=_fp8("weight_scale_inv", dtype, (128, 128)))
            for dtype in ("F32", "BF16", "F16", "F8_E8M0")
        },
        "fp8 per tensor static": Scheme(
            config={"quant_method": "fp8", "activation_scheme": "static"}, pack=_fp8("weight_scale", "F32", None, ())
        ),
        "fp8 modelopt": Scheme(
            config={"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
            pack=_fp8("weight_scale", "F32", None, (1,)),
        ),
        "fp8 per channel": Scheme(
            config=_groups(
                "float-quantized", num_bits=8, type="float", strategy="channel", symmetric=True, activations=_DYNAMIC
            ),
            pack=_fp8("weight_scale", "BF16", (1, 0)),
        ),
        "fbgemm fp8": Scheme(config={"quant_method": "fbgemm_fp8"}, pack=_fp8("weight_scale", "F32", (1, 0))),
        "awq": Scheme(config=awq, pack=_awq(group)),
        "gptq v1": Scheme(config=gptq, pack=_gptq(group)),
        "gptq v1 8 bits": Scheme(config=gptq | {"bits": 8}, pack=_gptq(group, bits=8)),
        "gptq v1 one group": Scheme(config=gptq | {"group_size": -1, "desc_act": True}, pack=_gptq(None)),
        "gptq v2": Scheme(config=gptq | {"checkpoint_format": "gptq_v2"}, pack=_gptq(group, offset=0)),
        "gptq v1 asymmetric": Scheme(config=gptq | {"sym": False}, pack=_gptq(group, symmetric=False)),
        "w4a16": Scheme(config=_integer_groups(group), pack=_compressed(group)),
        "w4a16 F16": Scheme(config=_integer_groups(group), pack=_compressed(group, dtype="F16")),
        "w4a16 asymmetric": Scheme(
            config=_integer_groups(group, symmetric=False), pack=_compressed(group, symmetric=False)
        ),
        "w4a16 channel": Scheme(config=_integer_groups(None), pack=_compressed(None)),
        "w8a16": Scheme(config=_integer_groups(None, bits=8), pack=_compressed(None, bits=8)),
        "w8a16 asymmetric": Scheme(
            config=_integer_groups(group, bits=8, symmetric=False), pack=_compressed(group, bits=8, symmetric=False)
        ),
        "w8a8": Scheme(
            config=_groups(
                "int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True, activations=_DYNAMIC
            ),
            pack=_int8,
        ),
        "mxfp4": Scheme(
            config=_groups(
                "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32, symmetric=True
            ),
            pack=_mxfp4,
        ),
        "nvfp4": Scheme(
            config=_groups(
                "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True
            ),
            pack=_nvfp4("weight_packed", "weight_global_scale", divides=True),
        ),
        "nvfp4 modelopt": Scheme(
            config={"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
            pack=_nvfp4("weight", "weight_scale_2", divides=False),
        ),
    }


SCHEMES: Mapping[str, Scheme] = schemes(32)
"""By a name for people."""

"""`quantization_config` of a `config.json`: which `StoredFormat` its quantised matrices have, and which are plain.

A config may name its plain matrices in three spellings (`modules_to_not_convert`, `ignored_layers`, `ignore`). That is
asked only where there is no checkpoint: otherwise the dtype of a tensor says whether it is quantised.
Activations are never quantised: their scales, static or dynamic, are ignored, which is more exact.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, cast

import msgspec

from openinfer_engine.weights.quantised import StoredMatrix
from openinfer_engine.weights.safetensors_file import TensorInfo
from openinfer_engine.weights.stored_format import FP8_BLOCKS, GGML_FORMATS, Packing, StoredFormat
from openinfer_kernels import Code, ScaleType, WeightFormat
from openinfer_kernels.weights.quantised import MXFP4

IGNORED_SUFFIXES = (".input_scale", ".input_global_scale", ".input_zero_point", ".k_scale", ".v_scale")
"""Tensors of scales of activations and of KV, which are read by nothing: the arithmetic is that of weights alone."""

_IGNORE_KEYS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
_GGUF = "gguf"
_MOST_PATTERN_CHARACTERS = 300
_MOST_REPEATS = 4
_REPEATED_GROUP = re.compile(r"\)\s*[*+?{]|\\[1-9]|\(\?")
_INT_CODES = {4: Code.INT4, 8: Code.INT8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """What a config says of its quantised matrices, and a checkpoint, once one is open."""

    format: StoredFormat
    """Of the matrices, where there is no checkpoint to look at."""
    ignored: tuple[str, ...] = ()
    tensors: Mapping[str, TensorInfo] | None = None
    others: tuple[StoredFormat, ...] = ()
    """That single matrices of a checkpoint may have in its place; their codes have another name."""
    dequantised: Mapping[str, int] = field(default_factory=dict[str, int])
    """What is read as plain weights: how many tensors of which type."""

    def format_of(self, name: str) -> StoredFormat | None:
        """Of matrix `name`, the name without `.weight`; None: it is in BF16, float16 or float32."""
        if self.tensors is not None:
            other = next((each for each in self.others if f"{name}.{each.codes}" in self.tensors), None)
            return (other or self.format).found(name, self.tensors)
        return None if any(_matches(each, name) for each in self.ignored) else self.format

    @property
    def described(self) -> str:
        """For people: the formats, each with how many matrices have it where that is known."""
        if self.tensors is None:
            return str(self.format.format)
        ends = [f".{each.codes}" for each in (self.format, *self.others)]
        names = (name.removesuffix(end) for end in ends for name in self.tensors if name.endswith(end))
        found = Counter(stored.format for stored in map(self.format_of, names) if stored is not None)
        if not found:
            return "all dequantised when they are loaded" if self.others else "no matrix is quantised"
        parts = [f"{count} matrices of {each}" for each, count in found.items()]
        parts += [f"{count} of ggml's {each} dequantised when loaded" for each, count in self.dequantised.items()]
        return "; ".join(parts)


class QuantisedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a model's config that says how its matrices are stored; a family's config extends it."""

    quantization_config: dict[str, Any] | None = None
    stored: Any = None
    """A `Quantisation`: what that means, and what the checkpoint says; whatever else a `config.json` has is replaced.
    None: no matrix is quantised."""

    def __post_init__(self) -> None:
        if not isinstance(self.stored, Quantisation):
            msgspec.structs.force_setattr(self, "stored", quantisation(self.quantization_config))

    def format_of(self, name: str) -> StoredFormat | None:
        """How matrix `name` is stored, the name without `.weight`; None: in BF16, float16 or float32."""
        return None if self.stored is None else self.stored.format_of(name)

    def matrix(self, name: str, rows: int, columns: int) -> StoredMatrix:
        """Matrix `name`, `[rows, columns]`, as it is stored."""
        return StoredMatrix(name=name, shape=(rows, columns), format=self.format_of(name))


def as_stored(config: Any, tensors: Mapping[str, TensorInfo]) -> Any:
    """A config with the formats that a checkpoint's tensors have, if it is a `QuantisedConfig` that has any."""
    if not isinstance(config, QuantisedConfig) or config.stored is None:
        return config
    return msgspec.structs.replace(config, stored=replace(config.stored, tensors=tensors))


def quantisation_reasons(config: Mapping[str, Any]) -> Iterator[str]:
    """Why weights that are quantised so are not served."""
    try:
        quantisation(config.get("quantization_config"))
    except ValueError as error:
        yield str(error)


def quantisation(quantization_config: object) -> Quantisation | None:
    """None: no matrix is quantised.

    Raises:
        ValueError: a format that is not served; says which.
    """
    fields = _object({"quantization_config": quantization_config}, "quantization_config")
    if not fields:
        return None
    method: object = fields.get("quant_method")
    read = _METHODS.get(method) if isinstance(method, str) else None
    if read is None:
        raise ValueError(f"quant_method is {method!r}: only {', '.join(_METHODS)} are served")
    made = read(fields)
    if method != _GGUF:
        return Quantisation(format=made, ignored=tuple(_ignored(fields)))
    others = tuple(each for each in GGML_FORMATS.values() if each != made)
    return Quantisation(format=made, others=others, dequantised=_object(fields, "dequantised"))


def stored_format(quantization_config: object) -> StoredFormat | None:
    """As `quantisation`, without the matrices that are named as plain."""
    found = quantisation(quantization_config)
    return None if found is None else found.format


def _ignored(fields: Mapping[str, Any]) -> Iterator[str]:
    for key in _IGNORE_KEYS:
        given: object = fields.get(key) or ()
        if not isinstance(given, Sequence) or isinstance(given, str):
            raise ValueError(f"{key} of quantised weights must be a list of names, not {given!r}")
        yield from (str(each) for each in cast("Sequence[object]", given))
    dynamic = fields.get("dynamic")
    if isinstance(dynamic, dict):
        # checked by `_gptq`: all of them are negative rules
        yield from (f"re:{rule.removeprefix('-:')}" for rule in cast("dict[str, object]", dynamic))


def _matches(entry: str, name: str) -> bool:
    """Whether an entry of a config means a matrix: a name, the end or middle of one, a wildcard or `re:` a pattern."""
    if entry.startswith("re:"):
        return _is_bounded(entry) and re.match(entry.removeprefix("re:"), name) is not None
    if "*" in entry:
        return fnmatchcase(name, entry)
    return f".{entry}." in f".{name}."


def _is_bounded(pattern: str) -> bool:
    """Whether matching cannot take time that grows exponentially; a pattern comes from strangers.

    Raises:
        ValueError: it could.
    """
    repeats = sum(pattern.count(each) for each in "*+{")
    if len(pattern) > _MOST_PATTERN_CHARACTERS or repeats > _MOST_REPEATS or _REPEATED_GROUP.search(pattern):
        raise ValueError(f"{pattern[:80]!r}, which names weights that are not quantised, is too involved to be matched")
    return True


# --- methods ------------------------------------------------------------------------------------------------


def _fp8(fields: Mapping[str, Any]) -> StoredFormat:
    """FP8 in blocks, as DeepSeek and Qwen publish it, or with one scale per tensor, as AutoFP8 writes it."""
    _require(fields, {"fmt": ("e4m3", "float8_e4m3fn"), "activation_scheme": ("dynamic", "static")})
    _require(fields, {"weight_block_size": ([128, 128], None)})
    if fields.get("weight_block_size") is not None:
        return FP8_BLOCKS
    return StoredFormat(format=_fp8_format(None, None), scales="weight_scale")


def _gguf(fields: Mapping[str, Any]) -> StoredFormat:
    """What `openinfer_engine.gguf` writes of a GGUF file: the type that most of its matrices have."""
    _require(fields, {"type": tuple(GGML_FORMATS)})
    return GGML_FORMATS[fields.get("type", "Q8_0")]


def _fbgemm_fp8(fields: Mapping[str, Any]) -> StoredFormat:
    del fields
    return StoredFormat(format=_fp8_format(1, None), scales="weight_scale")


def _awq(fields: Mapping[str, Any]) -> StoredFormat:
    _require(fields, {"bits": (4, None), "w_bit": (4, None), "version": ("gemm", "GEMM")})
    _require(fields, {"zero_point": (True,)})
    group = _group_size(fields, "group_size", "q_group_size")
    made = WeightFormat(code=Code.INT4, group_rows=1, group_columns=group, scales=ScaleType.F16, zero_points=True)
    return StoredFormat(format=made, packing=Packing.AWQ, codes="qweight", scales="scales", zero_points="qzeros")


def _gptq(fields: Mapping[str, Any]) -> StoredFormat:
    _require(fields, {"bits": (4, 8), "checkpoint_format": ("gptq", "gptq_v2"), "lm_head": (False,)})
    group, symmetric = _group_size(fields, "group_size"), bool(fields.get("sym", True))
    if fields.get("desc_act") and group is not None:
        raise ValueError("desc_act of quantised weights is True in groups: only groups of neighbours are served")
    positive = [rule for rule in _object(fields, "dynamic") if not rule.startswith("-:")]
    if positive:
        raise ValueError(
            f"dynamic of quantised weights has the rule {positive[0]!r}: only one format for all is served"
        )
    made = WeightFormat(
        code=_INT_CODES[fields.get("bits", 4)],
        group_rows=1,
        group_columns=group,
        scales=ScaleType.F16,
        zero_points=not symmetric,
    )
    offset = 0 if fields.get("checkpoint_format") == "gptq_v2" else 1
    return StoredFormat(
        format=made,
        packing=Packing.GPTQ,
        codes="qweight",
        scales="scales",
        zero_points="qzeros",
        zero_offset=offset,
    )


def _modelopt(fields: Mapping[str, Any]) -> StoredFormat:
    _require(fields, {"quant_algo": ("FP8", "NVFP4")})
    if fields.get("quant_algo") == "FP8":
        return StoredFormat(format=_fp8_format(None, None), scales="weight_scale")
    if fields.get("quant_algo") == "NVFP4":
        return StoredFormat(format=_NVFP4, scales="weight_scale", global_scale="weight_scale_2")
    raise ValueError("quant_algo of quantised weights is missing: FP8 and NVFP4 are served")


def _compressed_tensors(fields: Mapping[str, Any]) -> StoredFormat:
    name = "a group of config_groups"
    groups = [_object({name: each}, name) for each in _object(fields, "config_groups").values()]
    found = [_compressed_group(each, each.get("format") or fields.get("format")) for each in groups]
    if not found:
        return _compressed_group({}, fields.get("format"))
    if any(each != found[0] for each in found):
        raise ValueError("config_groups of quantised weights have several formats: only one for all is served")
    return found[0]


def _compressed_group(group: Mapping[str, Any], name: object) -> StoredFormat:
    weights = _object(group, "weights")
    read = _COMPRESSED.get(name) if isinstance(name, str) else None
    if read is None:
        raise ValueError(f"format of quantised weights is {name!r}: only {', '.join(_COMPRESSED)} are served")
    _require(group, {"output_activations": (None,)})
    _require(weights, {"actorder": (None, False, "weight", "static")})
    return read(group, weights)


def _pack_quantized(group: Mapping[str, Any], weights: Mapping[str, Any]) -> StoredFormat:
    _require(group, {"input_activations": (None,)})
    _require(weights, {"type": ("int",), "num_bits": (4, 8), "strategy": ("group", "channel")})
    symmetric = bool(weights.get("symmetric", True))
    made = WeightFormat(
        code=_INT_CODES[weights.get("num_bits", 4)],
        group_rows=1,
        group_columns=None if weights.get("strategy") == "channel" else _group_size(weights, "group_size", default=32),
        scales=ScaleType.BF16,
        zero_points=not symmetric,
    )
    return StoredFormat(
        format=made,
        codes="weight_packed",
        scales="weight_scale",
        zero_points=None if symmetric else "weight_zero_point",
        declared_shape="weight_shape",
    )


def _int_quantized(group: Mapping[str, Any], weights: Mapping[str, Any]) -> StoredFormat:
    del group
    _require(weights, {"type": ("int",), "num_bits": (8,), "symmetric": (True,)})
    rows, columns = _strategy(weights)
    made = WeightFormat(code=Code.INT8, group_rows=rows, group_columns=columns, scales=ScaleType.BF16)
    return StoredFormat(format=made, packing=Packing.SIGNED, scales="weight_scale")


def _float_quantized(group: Mapping[str, Any], weights: Mapping[str, Any]) -> StoredFormat:
    del group
    _require(weights, {"type": ("float",), "num_bits": (8,), "symmetric": (True,)})
    return StoredFormat(format=_fp8_format(*_strategy(weights), scales=ScaleType.BF16), scales="weight_scale")


def _naive_quantized(group: Mapping[str, Any], weights: Mapping[str, Any]) -> StoredFormat:
    """What files have that compressed-tensors wrote before it told floats and integers apart."""
    return (_float_quantized if weights.get("type") == "float" else _int_quantized)(group, weights)


def _mxfp4(group: Mapping[str, Any], weights: Mapping[str, Any]) -> StoredFormat:
    del group
    _require(weights, {"type": ("float",), "num_bits": (4,), "group_size": (32,), "symmetric": (True,)})
    return StoredFormat(format=MXFP4, codes="weight_packed", scales="weight_scale")


def _nvfp4(group: Mapping[str, Any], weights: Mapping[str, Any]) -> StoredFormat:
    del group
    _require(weights, {"type": ("float",), "num_bits": (4,), "group_size": (16,), "symmetric": (True,)})
    return StoredFormat(
        format=_NVFP4,
        codes="weight_packed",
        scales="weight_scale",
        global_scale="weight_global_scale",
        global_divides=True,
    )


def _strategy(weights: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Rows and columns that share a scale."""
    strategy: object = weights.get("strategy") or "tensor"
    if strategy == "block":
        _require(weights, {"block_structure": ([128, 128], (128, 128))})
        return 128, 128
    if strategy == "group":
        return 1, _group_size(weights, "group_size")
    if strategy not in ("channel", "tensor"):
        raise ValueError(f"strategy of quantised weights is {strategy!r}: tensor, channel, group and block are served")
    return (1, None) if strategy == "channel" else (None, None)


def _fp8_format(rows: int | None, columns: int | None, *, scales: ScaleType = ScaleType.F32) -> WeightFormat:
    return WeightFormat(code=Code.E4M3, group_rows=rows, group_columns=columns, scales=scales)


def _group_size(fields: Mapping[str, Any], *keys: str, default: int = 128) -> int | None:
    """None: -1, one group for all inputs."""
    key = next((each for each in keys if fields.get(each) is not None), None)
    size: object = default if key is None else fields[key]
    if type(size) is not int or (size != -1 and (size < 8 or size % 8)):
        raise ValueError(f"{key} of quantised weights is {size!r}: it must be -1 or a multiple of 8")
    return None if size == -1 else size


def _object(fields: Mapping[str, Any], key: str) -> dict[str, Any]:
    value: object = fields.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{key} of quantised weights must be a JSON object, not {value!r}")
    return cast("dict[str, Any]", value)


def _require(fields: Mapping[str, Any], served: Mapping[str, tuple[object, ...]]) -> None:
    """Absent keys are as served."""
    for key, possible in served.items():
        if key in fields and fields[key] not in possible:
            listed = " or ".join(repr(each) for each in possible if each is not None) or "none"
            raise ValueError(f"{key} of quantised weights is {fields[key]!r}: only {listed} is served")


_NVFP4 = WeightFormat(code=Code.E2M1, group_rows=1, group_columns=16, scales=ScaleType.E4M3, global_scale=True)
_METHODS: Mapping[str, Callable[[Mapping[str, Any]], StoredFormat]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
    "modelopt": _modelopt,
    _GGUF: _gguf,
}
_COMPRESSED: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any]], StoredFormat]] = {
    "pack-quantized": _pack_quantized,
    "int-quantized": _int_quantized,
    "float-quantized": _float_quantized,
    "naive-quantized": _naive_quantized,
    "mxfp4-pack-quantized": _mxfp4,
    "nvfp4-pack-quantized": _nvfp4,
}

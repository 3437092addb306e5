"""`AdapterConfig`: what an `adapter_config.json` of PEFT says about an adapter's mathematics.

The names are those of PEFT 0.21 (`peft.LoraConfig`). What changes the result and is not computed here is refused by its
name; so is a key that is not known, unless it says nothing (null, false, empty): PEFT adds keys with every release.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from openinfer_core import InvalidCheckpoint, Refused
from openinfer_core.family import check_model_file
from openinfer_engine.lora.setting import MAX_RANK
from openinfer_engine.weights.unique_json import decode_unique_json

CONFIG_FILE = "adapter_config.json"
MAX_CONFIG_BYTES = 1 << 20
_MAX_ALPHA = 1e6

_WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "lora_dropout",
        "lora_ga_config",
        "megatron_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
    }
)
"""Of training, or said again by the tensors, whose names decide what is adapted."""
_READ = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights"})
_KNOWN = _WITHOUT_EFFECT | _READ | {"bias"}
_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "alora_invocation_tokens": "adapters that begin at a token (aLoRA) are not served",
        "arrow_config": "Arrow's routing between adapters is not served",
        "corda_config": "CorDA changes the weights of the model",
        "fan_in_fan_out": "weights stored [in, out] are not served",
        "kasa_config": "KaSA is not served",
        "layer_replication": "replicated layers are not served",
        "loftq_config": "LoftQ changes the weights of the model",
        "lora_bias": "biases of adapters are not served",
        "modules_to_save": "whole modules in an adapter are not served; merge them into the checkpoint",
        "monteclora_config": "MonteCLoRA is not served",
        "target_parameters": "adapters of expert tensors are not served",
        "trainable_token_indices": "trained token embeddings are not served",
        "use_bdlora": "BD-LoRA is not served",
        "use_dora": "DoRA is not served; merge the adapter into the checkpoint",
        "use_qalora": "QA-LoRA is not served",
        "velora_config": "VeLoRA is not served",
    }
)
_CHANGES_THE_MODEL = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of `init_lora_weights` that begin: the weights of the model were changed with them."""
_LITERAL_KEY = re.compile(r"[A-Za-z0-9_.]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """The numbers of an adapter."""

    rank: int
    alpha: float
    rslora: bool = False
    """Whether the scale is `alpha / sqrt(rank)`: Kalajdzievski 2023, "A Rank Stabilization Scaling Factor"."""
    rank_pattern: Mapping[str, int] = field(default_factory=dict[str, int])
    """Ends of module paths -> their rank."""
    alpha_pattern: Mapping[str, float] = field(default_factory=dict[str, float])

    def rank_of(self, module: str) -> int:
        """`module` is a path of PEFT's without `base_model.model.`"""
        return _first_match(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """What `B A x` is multiplied by."""
        rank, alpha = self.rank_of(module), _first_match(self.alpha_pattern, module, self.alpha)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank


def read_adapter_config(folder: Path) -> AdapterConfig:
    """The `adapter_config.json` of a folder.

    Raises:
        InvalidCheckpoint: it is missing, too long or no such JSON, or a number is out of range.
        Refused: it asks for mathematics that are not served.
    """
    path = folder / CONFIG_FILE
    try:
        check_model_file(path)
        with path.open("rb") as file:
            encoded = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise InvalidCheckpoint(f"{path} cannot be read: {error.strerror}; a folder of PEFT's is needed") from error
    if len(encoded) > MAX_CONFIG_BYTES:
        raise InvalidCheckpoint(f"{path} has more than {MAX_CONFIG_BYTES} bytes")
    decoded = decode_unique_json(encoded, what=str(path))
    if not isinstance(decoded, dict):
        raise InvalidCheckpoint(f"{path} is no JSON object")
    return parse_adapter_config(cast("dict[str, Any]", decoded), what=str(path))


def parse_adapter_config(config: Mapping[str, Any], *, what: str) -> AdapterConfig:
    """Raises as `read_adapter_config`; `what` names the config in messages."""
    _check_kind(config, what)
    for key, value in config.items():
        if key in _REFUSED and _says_something(value):
            raise Refused(f"{what}: {key} is {_shown(value)}: {_REFUSED[key]}")
        if key not in _REFUSED and key not in _KNOWN and _says_something(value):
            raise Refused(f"{what}: {_shown(key)} is {_shown(value)}, a key that is not known here")
    rslora: object = config.get("use_rslora") or False
    if not isinstance(rslora, bool):
        raise InvalidCheckpoint(f"{what}: use_rslora is {_shown(rslora)}; it must be true or false")
    return AdapterConfig(
        rank=_rank(config.get("r"), f"{what}: r"),
        alpha=_alpha(config.get("lora_alpha"), f"{what}: lora_alpha"),
        rslora=rslora,
        rank_pattern={key: _rank(each, f"{what}: rank_pattern") for key, each in _pattern(config, "rank", what)},
        alpha_pattern={key: _alpha(each, f"{what}: alpha_pattern") for key, each in _pattern(config, "alpha", what)},
    )


def _check_kind(config: Mapping[str, Any], what: str) -> None:
    if config.get("peft_type") != "LORA":
        raise Refused(f"{what}: peft_type is {_shown(config.get('peft_type'))}; only LORA is served")
    bias: object = config.get("bias")
    if bias not in (None, False, "none"):
        raise Refused(f"{what}: bias is {_shown(bias)}: trained biases are not served, only none")
    initial: object = config.get("init_lora_weights")
    if isinstance(initial, str) and initial.lower().startswith(_CHANGES_THE_MODEL):
        raise Refused(
            f"{what}: init_lora_weights is {_shown(initial)}, which changes the weights of the model; convert the "
            "adapter (PEFT: path_initial_model_for_weight_conversion), or merge it into the checkpoint"
        )


def _pattern(config: Mapping[str, Any], kind: str, what: str) -> list[tuple[str, object]]:
    pattern: object = config.get(f"{kind}_pattern") or {}
    if not isinstance(pattern, dict):
        raise InvalidCheckpoint(f"{what}: {kind}_pattern is {_shown(pattern)}; it must be an object")
    entries = list(cast("dict[str, object]", pattern).items())
    for key, _ in entries:
        if not _LITERAL_KEY.fullmatch(key):
            raise Refused(
                f"{what}: {kind}_pattern has the key {_shown(key)}: regular expressions are not served, only ends of "
                "module paths"
            )
    return entries


def _first_match(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    if not pattern:  # of hundreds of modules
        return default
    # PEFT matches `(.*\.)?(key)$`, and takes the first key that does.
    return next((each for key, each in pattern.items() if f".{module}".endswith(f".{key}")), default)


def _rank(value: object, what: str) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise InvalidCheckpoint(f"{what} is {_shown(value)}; a rank must be an integer in 1 .. {MAX_RANK}")
    return value


def _alpha(value: object, what: str) -> float:
    if type(value) not in (int, float) or not abs(cast("float", value)) <= _MAX_ALPHA:  # not true of NaN either
        raise InvalidCheckpoint(f"{what} is {_shown(value)}; it must be a number of at most {_MAX_ALPHA:g}")
    return float(cast("float", value))


def _says_something(value: object) -> bool:
    return bool(value)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."

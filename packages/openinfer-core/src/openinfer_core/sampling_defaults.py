"""`SamplingDefaults`: how a model's publisher would have it sampled, from the folder's `generation_config.json`.

    a request's own value  ──►  the model's default  ──►  the parameter's own default, which changes nothing

`do_sample: false` makes 0 the default temperature, so that a request that gives one is sampled.
"""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias, cast

import msgspec

from openinfer_core.errors import InvalidCheckpoint, InvalidRequest
from openinfer_core.family import check_model_file
from openinfer_core.sampling import check_parameter
from openinfer_core.sampling_parameters import PARAMETERS, SamplingParameter

GENERATION_CONFIG_FILE = "generation_config.json"

Number: TypeAlias = int | float


class SamplingDefaultsFrom(StrEnum):
    """Where defaults of sampling parameters come from."""

    MODEL = "model"
    """`generation_config.json` of its folder, where there is one."""
    NONE = "none"
    """A request without parameters samples from the model's distribution as it is."""


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Values of parameters that a request does not give."""

    values: dict[str, Number] = {}
    """Only those that differ from the parameters' own defaults."""
    unknown: tuple[str, ...] = ()
    """Keys that ask for something about generation, and that nothing here does; reading them is logged."""

    def resolve(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Every parameter's value for a request; `None`, and names that are not given, are absent.

        A given `top_k` of -1 keeps all tokens, as 0 does.
        """
        resolved: dict[str, Any] = {}
        for parameter in PARAMETERS:
            value = given.get(parameter.name)
            resolved[parameter.name] = self.of(parameter) if value is None else _kept(parameter.name, value)
        return resolved

    def of(self, parameter: SamplingParameter) -> Number:
        return self.values.get(parameter.name, parameter.default)

    @property
    def described(self) -> str:
        """`temperature 0.6, top_k 20`."""
        return ", ".join(f"{name} {value:g}" for name, value in self.values.items()) or "none"


NO_DEFAULTS = SamplingDefaults()


def read_sampling_defaults(
    model_dir: Path, source: SamplingDefaultsFrom = SamplingDefaultsFrom.MODEL
) -> SamplingDefaults:
    """The defaults of a model folder; none without a `generation_config.json`.

    Raises:
        InvalidCheckpoint: the file cannot be read, or has a value that no request could ask for.
    """
    path = model_dir / GENERATION_CONFIG_FILE
    if source is SamplingDefaultsFrom.NONE or not path.exists():
        return NO_DEFAULTS
    try:
        check_model_file(path)
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise InvalidCheckpoint(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidCheckpoint(f"{path} is invalid: {error}") from error
    values: dict[str, Number] = {}
    for parameter in PARAMETERS:
        value = _value(config, parameter, path)
        if value is not None and value != parameter.default:
            values[parameter.name] = value
    if config.get("do_sample") is False:
        values = {"temperature": 0.0, **{name: value for name, value in values.items() if name != "temperature"}}
    unknown = _unknown(config)
    if unknown:
        import logging  # which takes longer to import than all of this package, and is seldom needed

        keys = ", ".join(unknown)
        logging.getLogger("openinfer").warning("%s asks for what is not known here, and is not done: %s", path, keys)
    return SamplingDefaults(values=values, unknown=unknown)


def _kept(name: str, value: Any) -> Any:
    return 0 if name == "top_k" and value == -1 and type(value) is int else value


def _value(config: Mapping[str, Any], parameter: SamplingParameter, path: Path) -> Number | None:
    value = config.get(parameter.name)
    if value is None:
        return None
    if parameter.kind is float and type(value) is int:
        value = float(value)
    value = _kept(parameter.name, value)
    try:
        check_parameter(parameter, value)
    except InvalidRequest as error:
        raise InvalidCheckpoint(f"{path}: {error}; mend it, or give --sampling-defaults none") from error
    return cast("Number", value)


# Keys that say nothing of how tokens are drawn, or what engine and server read elsewhere.
_OTHER_KEYS = frozenset(
    """
    _from_model_config assistant_confidence_threshold assistant_lookbehind bos_token_id cache_config
    cache_implementation compile_config decoder_start_token_id disable_compile do_sample eos_token_id is_assistant
    max_length max_matching_ngram_size max_new_tokens min_length num_assistant_tokens num_assistant_tokens_schedule
    num_return_sequences output_attentions output_hidden_states output_logits output_scores pad_token_id
    prefill_chunk_size prompt_lookup_num_tokens remove_invalid_values renormalize_logits return_dict_in_generate
    return_legacy_cache target_lookbehind token_healing trace transformers_version use_cache use_model_defaults
    """.split()
)
# Values with which transformers' further keys do nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0,),
    "early_stopping": (False,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "length_penalty": (1,),
    "low_memory": (False,),
    "no_repeat_ngram_size": (0,),
    "typical_p": (1,),
}


def _unknown(config: Mapping[str, Any]) -> tuple[str, ...]:
    known = _OTHER_KEYS | {parameter.name for parameter in PARAMETERS}
    asking = [name for name, value in config.items() if name not in known and value is not None]
    return tuple(sorted(name for name in asking if config[name] not in _NEUTRAL.get(name, ())))

"""Dynamo's request, as its frontend sends it to a worker, and what the engine is asked for it.

Source: `PreprocessedRequest` of ai-dynamo 1.6.1 (`lib/llm/src/protocols/common/preprocessor.rs`, `common.rs`); tests
have requests that its frontend sent. What says how tokens are drawn is read to the last field: one that is not known,
or cannot be done, is refused by name. Of the other fields those are refused that would change the answer; what is
routing, tracing or the frontend's own business is left alone.
"""

import array
import sys
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import msgspec

from openinfer_core import GenerateRequest, InvalidRequest, RequestId, SamplingParams
from openinfer_core.engine import EngineInfo
from openinfer_core.sampling import MAX_TOKEN_ID, Grammar, GrammarKind
from openinfer_core.sampling_defaults import SamplingDefaults

_PROBE = "_HEALTH_CHECK"
_TOKEN_BYTES = 4
_SEED_RANGE = 1 << 64
_REFUSED = ("prompt_embeds", "multi_modal_data", "encoder_result", "generate_request")

Part = TypeVar("Part", bound=msgspec.Struct)


class _Guided(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    backend: str | None = None  # which of an engine's compilers; there is one here
    whitespace_pattern: str | None = None
    structural_tag: Any = None


class _Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] | None = None
    guided_decoding: dict[str, Any] | None = None
    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    # The frontend's, which has the text.
    include_stop_str_in_output: bool | None = None
    detokenize: bool | None = None


class _Stop(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: tuple[int, ...] | None = None
    stop_token_ids_visible: tuple[int, ...] | None = None
    stop_token_ids_hidden: tuple[int, ...] | None = None
    max_thinking_tokens: int | None = None
    stop: list[str] | None = None  # the frontend's


class _Output(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    # The frontend's.
    skip_special_tokens: bool | None = None
    formatted_prompt: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    no_stop_trim: bool | None = None


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A request of Dynamo, read."""

    request: GenerateRequest
    is_probe: bool
    """Whether it is Dynamo's look at an idle worker, which is served alone whatever the role."""


class RequestReader:
    """Reads Dynamo's requests for one engine.

    Args:
        info: of the engine.
        defaults: of parameters that a request does not give.
    """

    def __init__(self, info: EngineInfo, defaults: SamplingDefaults) -> None:
        self._info = info
        self._defaults = defaults

    def read(self, request: Mapping[str, Any], request_id: RequestId, *, trace_parent: str | None = None) -> Asked:
        """What the engine is asked.

        Args:
            request: Dynamo's, as its `Worker` hands it over.
            request_id: for the engine.
            trace_parent: of the caller's span.

        Raises:
            InvalidRequest: something is out of range, unknown or not possible here.
        """
        for name in _REFUSED:
            if request.get(name):
                raise InvalidRequest(f"{name} is not possible with this engine", field=name)
        prompt = _token_ids(request.get("token_ids"))
        routing = _mapping(request, "routing")
        return Asked(
            request=GenerateRequest(
                request_id=request_id,
                prompt_token_ids=prompt,
                sampling=self._sampling(request, len(prompt)),
                lora=routing.get("lora_name"),
                cache_salt=routing.get("cache_salt"),
                priority=-_integer(routing, "priority"),  # Dynamo's larger one is served earlier
                trace_parent=trace_parent,
            ),
            is_probe=request.get(_PROBE) is True,
        )

    def _sampling(self, request: Mapping[str, Any], num_prompt_tokens: int) -> SamplingParams:
        sampling = _part(request, "sampling_options", _Sampling)
        stop = _part(request, "stop_conditions", _Stop)
        output = _part(request, "output_options", _Output)
        _refuse_searches(sampling)
        if stop.max_thinking_tokens is not None:
            raise InvalidRequest("max_thinking_tokens is not possible with this engine", field="max_thinking_tokens")
        room = max(1, self._info.max_model_tokens - num_prompt_tokens)
        most = room if stop.max_tokens is None else stop.max_tokens
        eos = () if stop.ignore_eos else self._info.eos_token_ids
        ends = (stop.stop_token_ids, stop.stop_token_ids_visible, () if stop.ignore_eos else stop.stop_token_ids_hidden)
        given = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
        return SamplingParams(
            max_tokens=most,
            min_tokens=min(stop.min_tokens or 0, most),
            seed=None if sampling.seed is None else sampling.seed % _SEED_RANGE,
            stop_token_ids=tuple(dict.fromkeys((*(each for ids in ends for each in ids or ()), *eos))),
            logit_bias=sampling.logit_bias or {},
            allowed_token_ids=sampling.allowed_token_ids,
            bad_words=sampling.bad_words_token_ids or (),
            grammar=_grammar(sampling, requires_reasoning=bool(request.get("require_reasoning"))),
            logprobs=output.logprobs,
            prompt_logprobs=output.prompt_logprobs,
            **self._defaults.resolve(given),
        )


def _token_ids(value: Any) -> tuple[int, ...]:
    """A list, or with `DYN_TOKEN_IDS_AS_BYTES` 32-bit numbers, little endian."""
    if isinstance(value, bytes | bytearray | memoryview):
        packed = bytes(cast("bytes", value))
        if len(packed) % _TOKEN_BYTES:
            raise InvalidRequest(f"token_ids has {len(packed)} bytes, which are no 32-bit numbers", field="token_ids")
        ids = array.array("i", packed)
        if sys.byteorder != "little":
            ids.byteswap()
        return tuple(ids)
    try:
        return tuple(msgspec.convert(value, list[int]))
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"token_ids: {error}", field="token_ids") from error


def _mapping(request: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value: Any = request.get(name) or {}
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{name} is of type {type(value).__name__}; it must be an object", field=name)
    return cast("Mapping[str, Any]", value)


def _integer(mapping: Mapping[str, Any], name: str) -> int:
    value = mapping.get(name) or 0
    if type(value) is not int or abs(value) > MAX_TOKEN_ID:
        raise InvalidRequest(f"{name} is {value!r}; it must be an integer of 32 bits", field=name)
    return value


def _part(request: Mapping[str, Any], name: str, kind: type[Part]) -> Part:
    """One of the request's objects, in which null means that nothing is said."""
    given = {key: value for key, value in _mapping(request, name).items() if value is not None}
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{name}: {error}", field=name) from error


def _refuse_searches(sampling: _Sampling) -> None:
    if (sampling.n or 1) > 1 or (sampling.best_of or 1) > 1:
        raise InvalidRequest("n and best_of must be 1: a worker gives one choice for a request", field="n")
    if sampling.use_beam_search or (sampling.length_penalty or 1.0) != 1.0:
        raise InvalidRequest("beam search is not possible with this engine", field="use_beam_search")


def _grammar(sampling: _Sampling, *, requires_reasoning: bool) -> Grammar | None:
    if not sampling.guided_decoding:
        return None
    guided = _part({"guided_decoding": sampling.guided_decoding}, "guided_decoding", _Guided)
    for name in ("structural_tag", "whitespace_pattern"):
        if getattr(guided, name) is not None:
            raise InvalidRequest(f"guided_decoding: {name} is not possible with this engine", field=name)
    asked = {
        GrammarKind.JSON_SCHEMA: guided.json,
        GrammarKind.REGEX: guided.regex,
        GrammarKind.CHOICE: guided.choice,
        GrammarKind.LARK: guided.grammar,
    }
    chosen = [(kind, value) for kind, value in asked.items() if value is not None]
    if len(chosen) != 1:
        raise InvalidRequest(
            f"guided_decoding has {len(chosen)} constraints; one of json, regex, choice and grammar is possible",
            field="guided_decoding",
        )
    if requires_reasoning:
        raise InvalidRequest(
            "guided_decoding after reasoning is not possible: the worker is not told what ends the reasoning",
            field="require_reasoning",
        )
    ((kind, value),) = chosen
    return Grammar(kind=kind, text=value if isinstance(value, str) else msgspec.json.encode(value).decode())

"""`SamplingParams`: how one request is sampled, validated once, when it is made."""

import math
from enum import StrEnum

import msgspec

from openinfer_core.errors import InvalidRequest

MAX_TOKEN_ID = 2**31 - 1
"""Token ids are int32 on every device."""
MAX_TOKENS = 2**24
"""No context is longer; keeps every sum of lengths far from int32."""
MAX_LOGPROBS = 20
"""Alternatives per position: OpenAI's bound for chat completions."""
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024


class GrammarKind(StrEnum):
    """The notation of a `Grammar`."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    CHOICE = "choice"


class Grammar(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A constraint on the output. An engine without a grammar compiler refuses it by name."""

    kind: GrammarKind
    text: str


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one request is sampled. The order of operations is `openinfer_kernels.SamplingBatch`'s.

    Raises:
        InvalidRequest: a value is out of range; `field` names it.
    """

    max_tokens: int
    """Tokens to generate at most, the stop token included; 0 only scores the prompt (`prompt_logprobs`)."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    """An unsigned 64-bit number; None draws one when the engine takes the request."""
    logit_bias: dict[int, float] = {}
    """Added to the logits; `-inf` forbids a token."""
    stop_token_ids: tuple[int, ...] = ()
    """Any of these ends the request; the ids of end of text are among them unless the caller ignores them."""
    min_tokens: int = 0
    """Stop tokens cannot be sampled before this many tokens."""
    logprobs: int | None = None
    """Alternatives per generated token; 0 gives the chosen one's log-probability alone; None none."""
    prompt_logprobs: int | None = None
    """The same for the prompt; turns the prefix cache off for the request, as every position must be computed."""
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        _integer("max_tokens", self.max_tokens, 0, MAX_TOKENS)
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        _number("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, 0, MAX_TOKEN_ID)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequest("top_p is 0; it must be in (0, 1]", field="top_p")
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        if self.seed is not None:
            _integer("seed", self.seed, 0, 2**64 - 1)
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _integer(name, count, 0, MAX_LOGPROBS)
        _check_stop_token_ids(self.stop_token_ids)
        _check_logit_bias(self.logit_bias)
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise InvalidRequest("max_tokens is 0 and no prompt_logprobs are asked: nothing to do", field="max_tokens")


def _integer(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidRequest(f"{name} is {value}; it must be between {low} and {high}", field=name)


def _number(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also refuses NaN
        raise InvalidRequest(f"{name} is {value}; it must be between {low} and {high}", field=name)


def _check_stop_token_ids(token_ids: tuple[int, ...]) -> None:
    if len(token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"stop_token_ids has {len(token_ids)} entries; at most {MAX_STOP_TOKEN_IDS} are possible",
            field="stop_token_ids",
        )
    for token_id in token_ids:
        _integer("stop_token_ids", token_id, 0, MAX_TOKEN_ID)


def _check_logit_bias(bias: dict[int, float]) -> None:
    if len(bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest(
            f"logit_bias has {len(bias)} entries; at most {MAX_LOGIT_BIAS} are possible", field="logit_bias"
        )
    for token_id, value in bias.items():
        _integer("logit_bias", token_id, 0, MAX_TOKEN_ID)
        if math.isnan(value) or value == math.inf:
            raise InvalidRequest(f"logit_bias of token {token_id} is {value}", field="logit_bias")

"""`SamplingParams`: how one request is sampled, validated once, when it is made."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from enum import StrEnum
from itertools import chain
from typing import Annotated, cast

import msgspec

from openinfer_core.errors import InvalidRequest
from openinfer_core.sampling_numbers import SamplingNumbers
from openinfer_core.sampling_parameters import PARAMETERS, SamplingParameter

MAX_TOKEN_ID = 2**31 - 1  # token ids are int32 on every device
TokenIds = tuple[Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)], ...]
MAX_TOKENS = 2**24  # no context is longer; keeps every sum of lengths far from int32
MAX_LOGPROBS = 20  # alternatives per position: OpenAI's bound for chat completions
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024  # entries of `logit_bias`
# Far beyond any logit, far below what overflows float32 or loses the logit's own digits to a NaN.
MAX_ABS_LOGIT_BIAS = 1e6
MAX_GRAMMAR_LENGTH = 2**20  # in characters; a compiler has bounds of its own
MAX_PREAMBLE_LENGTH = 64  # of each of its ends
MAX_ALLOWED_TOKEN_IDS = 2**16
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 256  # of each
_SLICE_IDS = 2**14  # that one call checks, during which no other thread runs


class GrammarKind(StrEnum):
    """The notation of a `Grammar`."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    """Matches the whole output, in the syntax of Rust's `regex`."""
    LARK = "lark"
    """llguidance's dialect of Lark, whose `%json` and `<[token id]>` frontends write; or GBNF, which has `::=`."""
    CHOICE = "choice"
    """A JSON list of strings."""


class Preamble(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Output before the constrained part, free up to where it ends: a model's reasoning.

    Raises:
        InvalidRequest: a text is empty or longer than `MAX_PREAMBLE_LENGTH`.
    """

    opening: str | None = None
    """What begins it; output that does not begin with it has none. None: the prompt has begun it."""
    closing: str
    without: tuple[str, ...] = ()
    """Texts that it has none of: what would begin the constrained part before it is closed."""

    def __post_init__(self) -> None:
        texts = (("opening", self.opening), ("closing", self.closing), *(("without", text) for text in self.without))
        for name, text in texts:
            if text is not None and not 1 <= len(text) <= MAX_PREAMBLE_LENGTH:
                message = f"the preamble's {name} has {len(text)} characters; 1 to {MAX_PREAMBLE_LENGTH} are possible"
                raise InvalidRequest(message, field="grammar")


class Grammar(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A constraint on the output. An engine without a grammar compiler refuses it by name.

    Raises:
        InvalidRequest: the text is longer than `MAX_GRAMMAR_LENGTH`.
    """

    kind: GrammarKind
    text: str
    preamble: Preamble | None = None

    def __post_init__(self) -> None:
        if len(self.text) > MAX_GRAMMAR_LENGTH:
            raise InvalidRequest(
                f"the grammar has {len(self.text)} characters; at most {MAX_GRAMMAR_LENGTH} fit", field="grammar"
            )


class SamplingParams(SamplingNumbers, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one request is sampled. The order of operations is `openinfer_kernels.SamplingBatch`'s.

    Raises:
        InvalidRequest: a value is out of range or not of its type; `field` names it.
    """

    max_tokens: int
    """Tokens to generate at most, the stop token included; 0 only scores the prompt (`prompt_logprobs`)."""
    seed: int | None = None
    """An unsigned 64-bit number; None draws one when the engine takes the request."""
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict[int, float])
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
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these are sampled, stop tokens among them or not; None allows all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that the output does not contain."""

    def __post_init__(self) -> None:
        check_integer("max_tokens", self.max_tokens, low=0, high=MAX_TOKENS)
        check_integer("min_tokens", self.min_tokens, low=0, high=self.max_tokens)
        for parameter in PARAMETERS:
            check_parameter(parameter, getattr(self, parameter.name))
        if self.seed is not None:
            check_integer("seed", self.seed, low=0, high=2**64 - 1)
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                check_integer(name, count, low=0, high=MAX_LOGPROBS)
        _check_stop_token_ids(self.stop_token_ids)
        _check_logit_bias(self.logit_bias)
        if self.allowed_token_ids is not None:
            _check_some_token_ids("allowed_token_ids", self.allowed_token_ids, at_most=MAX_ALLOWED_TOKEN_IDS)
        _check_bad_words(self.bad_words)
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise InvalidRequest("max_tokens is 0 and no prompt_logprobs are asked: nothing to do", field="max_tokens")

    @property
    def is_masked(self) -> bool:
        """Whether what may be sampled next is decided on the host, from what was sampled before."""
        return self.grammar is not None or self.is_restricted

    @property
    def is_restricted(self) -> bool:
        return self.allowed_token_ids is not None or bool(self.bad_words)

    def field_beyond(self, num_token_ids: int) -> str | None:
        """The first field that names a token id that a model with so many does not have; None for none."""
        named: dict[str, Iterable[int]] = {
            "logit_bias": self.logit_bias,
            "allowed_token_ids": self.allowed_token_ids or (),
            "bad_words": chain.from_iterable(self.bad_words),
        }
        return next((name for name, ids in named.items() if max(ids, default=-1) >= num_token_ids), None)


class BadWords:
    """Which tokens would complete a sequence that the output may not contain.

    Attributes:
        single: the sequences of one token.
    """

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        self.single: set[int] = set()
        self._longer: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)  # by their last token but one
        for word in words:
            if len(word) == 1:
                self.single.add(word[0])
            else:
                self._longer[word[-2]].append(tuple(word))

    def completing(self, said: Sequence[int]) -> set[int]:
        """The last tokens of longer sequences of which the output has all the others at its end."""
        candidates = self._longer.get(said[-1], ()) if said else ()
        return {word[-1] for word in candidates if tuple(said[1 - len(word) :]) == word[:-1]}


def check_integer(name: str, value: object, *, low: int, high: int) -> None:
    """Refuses what is not an `int` (a bool, a float or a NumPy scalar is none) within `low .. high`."""
    if type(value) is not int:
        raise InvalidRequest(f"{name} is of type {type(value).__name__}; it must be an integer", field=name)
    if not low <= value <= high:
        raise InvalidRequest(f"{name} is {value}; it must be between {low} and {high}", field=name)


def check_parameter(parameter: SamplingParameter, value: object) -> None:
    """Raises `InvalidRequest`: the value is not of the parameter's type, or out of its range."""
    name = parameter.name
    if parameter.kind is int:
        check_integer(name, value, low=int(parameter.low), high=int(parameter.high))
    else:
        _check_number(name, value, low=parameter.low, high=parameter.high)
    if parameter.excludes_low and value == parameter.low:
        raise InvalidRequest(f"{name} is {parameter.low:g}; it must be in {parameter.bounds}", field=name)


def _check_number(name: str, value: object, *, low: float, high: float) -> None:
    if type(value) is not float and type(value) is not int:
        raise InvalidRequest(f"{name} is of type {type(value).__name__}; it must be a number", field=name)
    if not low <= value <= high:  # also refuses NaN
        raise InvalidRequest(f"{name} is {value}; it must be between {low} and {high}", field=name)


def check_tuple(name: str, value: object) -> tuple[object, ...]:
    """Refuses what is not a tuple: a list could change after it was checked."""
    if type(value) is not tuple:
        raise InvalidRequest(f"{name} is of type {type(value).__name__}; it must be a tuple", field=name)
    return cast("tuple[object, ...]", value)


def check_token_ids(name: str, token_ids: object) -> None:
    """Raises `InvalidRequest`: these are not token ids. Types and range in C, in slices: 0.14 ms for 16k ids."""
    entries = check_tuple(name, token_ids)
    try:
        for begin in range(0, len(entries), _SLICE_IDS):
            msgspec.convert(entries[begin : begin + _SLICE_IDS], TokenIds)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{name} is not of token ids: {error}", field=name) from error


def _check_some_token_ids(name: str, token_ids: object, *, at_most: int) -> None:
    entries = check_tuple(name, token_ids)
    if not 1 <= len(entries) <= at_most:
        raise InvalidRequest(f"{name} has {len(entries)} token ids; 1 to {at_most} are possible", field=name)
    check_token_ids(name, entries)


def _check_bad_words(words: object) -> None:
    entries = check_tuple("bad_words", words)
    if len(entries) > MAX_BAD_WORDS:
        raise InvalidRequest(
            f"bad_words has {len(entries)} sequences of tokens; at most {MAX_BAD_WORDS} are possible", field="bad_words"
        )
    for word in entries:
        _check_some_token_ids("bad_words", word, at_most=MAX_BAD_WORD_TOKENS)


def _check_stop_token_ids(token_ids: object) -> None:
    entries = check_tuple("stop_token_ids", token_ids)
    if len(entries) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"stop_token_ids has {len(entries)} entries; at most {MAX_STOP_TOKEN_IDS} are possible",
            field="stop_token_ids",
        )
    for token_id in entries:
        check_integer("stop_token_ids", token_id, low=0, high=MAX_TOKEN_ID)


def _check_logit_bias(bias: dict[int, float]) -> None:
    if len(bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest(
            f"logit_bias has {len(bias)} entries; at most {MAX_LOGIT_BIAS} are possible", field="logit_bias"
        )
    for token_id, value in bias.items():
        check_integer("logit_bias", token_id, low=0, high=MAX_TOKEN_ID)
        if value != -math.inf:
            _check_number("logit_bias", value, low=-MAX_ABS_LOGIT_BIAS, high=MAX_ABS_LOGIT_BIAS)

"""Sampling parameters refuse every value out of range, made in Python or decoded."""

import math
from typing import Any

import msgspec
import pytest

from openinfer_core import Grammar, GrammarKind, InvalidRequest, OpenInferError, SamplingParams
from openinfer_core.sampling import (
    MAX_ABS_LOGIT_BIAS,
    MAX_GRAMMAR_LENGTH,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOKEN_ID,
    MAX_TOKENS,
    BadWords,
)

BOUNDS: dict[str, tuple[Any, Any]] = {
    "max_tokens": (1, MAX_TOKENS),
    "temperature": (0.0, 100.0),
    "top_k": (0, MAX_TOKEN_ID),
    "top_p": (5e-324, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
    "seed": (0, 2**64 - 1),
    "min_tokens": (0, 7),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
INTEGERS = ("max_tokens", "top_k", "seed", "min_tokens", "logprobs", "prompt_logprobs")


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 7, **fields})


@pytest.mark.parametrize("field", BOUNDS)
def test_sampling_at_each_bound_is_accepted(field: str) -> None:
    for value in BOUNDS[field]:
        assert getattr(params(**{field: value}), field) == value


@pytest.mark.parametrize("field", BOUNDS)
def test_sampling_beyond_each_bound_is_refused_by_name(field: str) -> None:
    low, high = BOUNDS[field]
    if field in INTEGERS:
        below, above = low - 1, high + 1
    else:
        below, above = math.nextafter(low, -math.inf), math.nextafter(high, math.inf)
    for value in (below, above):
        with pytest.raises(InvalidRequest, match=field) as caught:
            params(**{field: value})
        assert caught.value.field == field


@pytest.mark.parametrize("field", [name for name in BOUNDS if name not in INTEGERS])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_sampling_number_that_is_not_finite_is_refused(field: str, value: float) -> None:
    with pytest.raises(InvalidRequest) as caught:
        params(**{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize("field", INTEGERS)
@pytest.mark.parametrize("value", [1.0, True, "1"])
def test_sampling_integer_of_another_type_is_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=f"{field} is of type {type(value).__name__}"):
        params(**{field: value})


@pytest.mark.parametrize("value", ["0.5", None, True])
def test_sampling_number_of_another_type_is_refused(value: object) -> None:
    with pytest.raises(InvalidRequest, match="temperature is of type"):
        params(temperature=value)


def test_sampling_number_given_as_integer_is_accepted() -> None:
    assert params(temperature=0, repetition_penalty=1).temperature == 0


def test_sampling_without_anything_to_do_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="nothing to do"):
        SamplingParams(max_tokens=0)
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0


def test_sampling_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens is 3; it must be between 0 and 2"):
        SamplingParams(max_tokens=2, min_tokens=3)


def test_stop_token_ids_at_their_bounds_are_accepted() -> None:
    full = (*range(MAX_STOP_TOKEN_IDS - 1), MAX_TOKEN_ID)
    assert params(stop_token_ids=full).stop_token_ids == full


@pytest.mark.parametrize(
    "token_ids", [tuple(range(MAX_STOP_TOKEN_IDS + 1)), (-1,), (MAX_TOKEN_ID + 1,), (1.0,), [1], None]
)
def test_stop_token_ids_out_of_range_are_refused(token_ids: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        params(stop_token_ids=token_ids)
    assert caught.value.field == "stop_token_ids"


def test_logit_bias_at_its_bounds_is_accepted() -> None:
    full = dict.fromkeys(range(MAX_LOGIT_BIAS - 1), -MAX_ABS_LOGIT_BIAS) | {MAX_TOKEN_ID: -math.inf}
    assert params(logit_bias=full).logit_bias == full


@pytest.mark.parametrize(
    "bias",
    [
        dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.0),
        {-1: 0.0},
        {MAX_TOKEN_ID + 1: 0.0},
        {1: math.nan},
        {1: math.inf},
        {1: math.nextafter(MAX_ABS_LOGIT_BIAS, math.inf)},
        {1: -2 * MAX_ABS_LOGIT_BIAS},
        {1: "a"},
        {"a": 1.0},
    ],
)
def test_logit_bias_out_of_range_is_refused(bias: dict[int, float]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        params(logit_bias=bias)
    assert caught.value.field == "logit_bias"


def test_grammar_longer_than_its_bound_is_refused() -> None:
    Grammar(kind=GrammarKind.REGEX, text="a" * MAX_GRAMMAR_LENGTH)
    with pytest.raises(InvalidRequest, match="grammar has"):
        Grammar(kind=GrammarKind.REGEX, text="a" * (MAX_GRAMMAR_LENGTH + 1))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"allowed_token_ids": ()}, "0 token ids; 1 to 65536 are possible"),
        ({"allowed_token_ids": (1,) * 65_537}, "65537 token ids"),
        ({"allowed_token_ids": [1]}, "must be a tuple"),
        ({"allowed_token_ids": (-1,)}, "not of token ids"),
        ({"allowed_token_ids": (True,)}, "not of token ids"),
        ({"bad_words": ((),)}, "0 token ids"),
        ({"bad_words": ((1,) * 257,)}, "257 token ids"),
        ({"bad_words": ((1,),) * 1025}, "1025 sequences"),
        ({"bad_words": ((2**31,),)}, "not of token ids"),
        ({"bad_words": (1,)}, "must be a tuple"),
    ],
)
def test_restrictions_out_of_range_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refusal:
        params(**fields)
    assert refusal.value.field == next(iter(fields))


def test_bad_words_know_what_would_complete_them() -> None:
    words = BadWords([(1,), (2, 3), (4, 2, 5), (9, 4, 2, 6)])
    assert words.single == {1}
    assert words.completing([]) == set()
    assert words.completing([2]) == {3}
    assert words.completing([4, 2]) == {3, 5}
    assert words.completing([7, 9, 4, 2]) == {3, 5, 6}
    assert words.completing([2, 9]) == set()


def test_the_first_field_beyond_the_vocabulary_is_named() -> None:
    assert params(logit_bias={9: 1.0}, allowed_token_ids=(9,), bad_words=((9, 2),)).field_beyond(10) is None
    assert params(logit_bias={10: 1.0}).field_beyond(10) == "logit_bias"
    assert params(allowed_token_ids=(3, 10)).field_beyond(10) == "allowed_token_ids"
    assert params(bad_words=((3, 10),)).field_beyond(10) == "bad_words"


def test_sampling_is_frozen_and_its_default_bias_is_its_own() -> None:
    first, second = params(), params()
    with pytest.raises(AttributeError):
        first.top_k = 3  # type: ignore[misc]
    assert first.logit_bias is not second.logit_bias


def test_decoding_a_value_out_of_range_raises_validation_error_caused_by_invalid_request() -> None:
    bodies = {
        msgspec.json: b'{"max_tokens": 7, "top_p": 1.5}',
        msgspec.msgpack: msgspec.msgpack.encode({"max_tokens": 7, "top_p": 1.5}),
    }
    for codec, body in bodies.items():
        with pytest.raises(msgspec.ValidationError, match=r"top_p is 1\.5; it must be between") as caught:
            codec.decode(body, type=SamplingParams)
        assert isinstance(caught.value.__cause__, InvalidRequest)
        assert caught.value.__cause__.field == "top_p"


def test_decoding_names_the_place_of_what_is_out_of_range() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"min_p is 2\.0.* at `\$\[1\]`"):
        msgspec.json.decode(b'[{"max_tokens": 7}, {"max_tokens": 7, "min_p": 2}]', type=list[SamplingParams])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"max_tokens": 7, "best_of": 2}', "unknown field `best_of`"),
        (b'{"max_tokens": "7"}', "Expected `int`, got `str`"),
        (b"{}", "missing required field `max_tokens`"),
        (b'{"max_tokens": 7, "grammar": {"kind": "ebnf", "text": ""}}', "Invalid enum value 'ebnf'"),
    ],
)
def test_decoding_what_is_no_sampling_raises_validation_error(body: bytes, message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.json.decode(body, type=SamplingParams)


def test_sampling_survives_the_wire() -> None:
    original = params(
        temperature=0.5,
        top_k=3,
        seed=2**64 - 1,
        logit_bias={5: -math.inf, 6: 1.5},
        stop_token_ids=(1, 2),
        logprobs=0,
        grammar=Grammar(kind=GrammarKind.CHOICE, text="[]"),
        allowed_token_ids=(3, 4),
        bad_words=((1,), (2, 3)),
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(original), type=SamplingParams) == original


def test_invalid_request_is_both_ours_and_a_value_error() -> None:
    error = InvalidRequest("no", field="x")
    assert isinstance(error, OpenInferError)
    assert isinstance(error, ValueError)
    assert error.field == "x"

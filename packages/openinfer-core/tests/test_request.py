"""Requests refuse every value out of range, made in Python or decoded."""

import math
from typing import Any

import msgspec
import pytest

from openinfer_core import GenerateRequest, InvalidRequest, RequestId, SamplingParams
from openinfer_core.request import (
    MAX_DEADLINE_S,
    MAX_HINT_LENGTH,
    MAX_HINTS,
    MAX_NAME_LENGTH,
    MAX_RETAIN_S,
    MAX_RETAINED_PREFIXES,
    MAX_TRANSFER_BYTES,
    RetainedPrefix,
    with_fields,
)
from openinfer_core.sampling import MAX_TOKEN_ID, MAX_TOKENS

SAMPLING = SamplingParams(max_tokens=1)


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest(**{"request_id": RequestId(1), "prompt_token_ids": (1,), "sampling": SAMPLING, **fields})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", 0),
        ("request_id", 2**63 - 1),
        ("prompt_token_ids", (0, MAX_TOKEN_ID)),
        ("priority", -(2**31)),
        ("priority", 2**31 - 1),
        ("tenant", "t" * MAX_NAME_LENGTH),
        ("cache_salt", ""),
        ("deadline_s", 1e-3),
        ("deadline_s", 5),
        ("deadline_s", MAX_DEADLINE_S),
        ("hints", {"h" * MAX_HINT_LENGTH: "v" * MAX_HINT_LENGTH}),
        ("hints", {f"hint {index}": "" for index in range(MAX_HINTS)}),
        ("retain_s", 0.5),
        ("retain_s", MAX_RETAIN_S),
        ("retained_prefixes", (RetainedPrefix(1, MAX_RETAIN_S),) * MAX_RETAINED_PREFIXES),
    ],
)
def test_request_at_each_bound_is_accepted(field: str, value: object) -> None:
    assert getattr(request(**{field: value}), field) == value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", -1),
        ("request_id", 2**63),
        ("request_id", 1.0),
        ("request_id", "1"),
        ("prompt_token_ids", ()),
        ("prompt_token_ids", (-1,)),
        ("prompt_token_ids", (0, MAX_TOKEN_ID + 1)),
        ("prompt_token_ids", (1, 2.0)),
        ("prompt_token_ids", (1, True)),
        ("prompt_token_ids", (1, None)),
        ("prompt_token_ids", [1]),
        ("priority", 2**31),
        ("priority", -(2**31) - 1),
        ("priority", 0.5),
        ("lora", "x" * (MAX_NAME_LENGTH + 1)),
        ("cache_salt", "x" * (MAX_NAME_LENGTH + 1)),
        ("tenant", "x" * (MAX_NAME_LENGTH + 1)),
        ("trace_parent", "x" * (MAX_NAME_LENGTH + 1)),
        ("deadline_s", 0),
        ("deadline_s", -1.0),
        ("deadline_s", math.nan),
        ("deadline_s", math.inf),
        ("deadline_s", MAX_DEADLINE_S + 1),
        ("deadline_s", "1"),
        ("deadline_s", True),
        ("hints", {f"hint {index}": "" for index in range(MAX_HINTS + 1)}),
        ("hints", {"": "a name is missing"}),
        ("retain_s", 0),
        ("retained_prefixes", (RetainedPrefix(1, 60.0),) * (MAX_RETAINED_PREFIXES + 1)),
        ("retained_prefixes", (RetainedPrefix(0, 60.0),)),
        ("retained_prefixes", (RetainedPrefix(10_000, 60.0),)),
        ("retained_prefixes", (RetainedPrefix(1, 0.0),)),
        ("retained_prefixes", (RetainedPrefix(1, MAX_RETAIN_S + 1),)),
        ("retained_prefixes", ((1, 60.0),)),
        ("retained_prefixes", [RetainedPrefix(1, 60.0)]),
        ("retain_s", float("nan")),
        ("retain_s", MAX_RETAIN_S + 1),
        ("retain_s", "300"),
        ("retain_s", True),
        ("cache_key", "without retain_s"),
        ("cache_key", "k" * (MAX_NAME_LENGTH + 1)),
        ("hints", {"h" * (MAX_HINT_LENGTH + 1): ""}),
        ("hints", {"h": "v" * (MAX_HINT_LENGTH + 1)}),
        ("hints", {"h": 1}),
        ("hints", {1: "h"}),
        ("hints", [("h", "v")]),
        ("transfer", [1]),
        ("transfer", {"blocks": object()}),
        ("transfer", {"blocks": "x" * MAX_TRANSFER_BYTES}),
    ],
)
def test_request_out_of_range_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        request(**{field: value})
    assert caught.value.field == field


def test_request_with_the_longest_prompt_is_accepted_and_one_more_refused() -> None:
    request(prompt_token_ids=(7,) * MAX_TOKENS)
    with pytest.raises(InvalidRequest, match=f"the prompt has {MAX_TOKENS + 1} tokens"):
        request(prompt_token_ids=(7,) * (MAX_TOKENS + 1))


def test_request_names_the_place_of_the_bad_token() -> None:
    with pytest.raises(InvalidRequest, match=r"\$\[2\]"):
        request(prompt_token_ids=(1, 2, -3))


def test_other_fields_are_checked_and_all_else_is_the_requests_own() -> None:
    original = request(
        prompt_token_ids=(3, 1, 2), retained_prefixes=(RetainedPrefix(2, 60.0),), tenant="t", highest_token_id=3
    )
    changed = with_fields(original, deadline_s=2.5, prediction_token_ids=(4, 5))
    assert changed == msgspec.structs.replace(original, deadline_s=2.5, prediction_token_ids=(4, 5))
    assert changed.prompt_token_ids is original.prompt_token_ids
    assert (original.deadline_s, original.prediction_token_ids) == (None, ())
    for field, value in (("deadline_s", -1.0), ("prediction_token_ids", (-1,)), ("cache_key", "without retain_s")):
        with pytest.raises(InvalidRequest) as caught:
            with_fields(original, **{field: value})
        assert caught.value.field == field
    for field in ("prompt_token_ids", "retained_prefixes", "prompt"):
        with pytest.raises(TypeError, match=field):
            with_fields(original, **{field: ()})


def test_other_fields_leave_the_prompt_unread() -> None:
    original = request()
    msgspec.structs.force_setattr(original, "prompt_token_ids", ("no id, which is not seen",))
    assert with_fields(original, priority=1).priority == 1


def test_decoding_checks_the_request_and_what_is_inside_it() -> None:
    def decode(**fields: Any) -> GenerateRequest:
        body = {"request_id": 1, "prompt_token_ids": [1], "sampling": {"max_tokens": 1}, **fields}
        return msgspec.msgpack.decode(msgspec.msgpack.encode(body), type=GenerateRequest)

    assert decode() == request()
    with pytest.raises(msgspec.ValidationError, match="request_id is -1"):
        decode(request_id=-1)
    with pytest.raises(msgspec.ValidationError, match=r"max_tokens is -1.* at `\$\.sampling`"):
        decode(sampling={"max_tokens": -1})
    with pytest.raises(msgspec.ValidationError, match="unknown field `prompt`"):
        decode(prompt="text never reaches an engine")


def test_request_survives_the_wire() -> None:
    original = request(
        prompt_token_ids=(3, 1, 2), lora="a", cache_salt="s", tenant="t", priority=-5, trace_parent="00-ab-cd-01"
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(original), type=GenerateRequest) == original

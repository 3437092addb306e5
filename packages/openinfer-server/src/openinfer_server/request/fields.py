"""`RequestFields`: what every object of a request says about its own fields; and types of bounded fields.

The bounds are in the OpenAPI document; the code that uses a field checks them, because a decoder that did so would word
its refusals without saying what is possible. The decoder holds integers but token ids and seeds to 64 bits.
`tests/http/test_openapi.py` posts a value beyond each bound, and finds integers without.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec

from openinfer_core.request import MAX_DEADLINE_S, MAX_HINT_LENGTH, MAX_HINTS, MAX_NAME_LENGTH
from openinfer_core.sampling import MAX_ALLOWED_TOKEN_IDS, MAX_LOGPROBS, MAX_STOP_TOKEN_IDS, MAX_TOKEN_ID
from openinfer_core.sampling_parameters import PARAMETERS
from openinfer_server.request.rules import Rule


class RequestFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An object of a request: each of its fields is honoured unless it is named here."""

    RULES: ClassVar[Mapping[str, Rule]] = {}
    """What becomes of the fields that are not honoured; `null` is taken by all of them."""


def check_rules(request: RequestFields, where: str = "") -> None:
    """Holds an object, and the objects that are its fields, to their rules; lists are for those who read them.

    Raises:
        ApiError: 400; its `param` names the field.
    """
    rules = request.RULES
    for name, sent in zip(request.__struct_fields__, request.__struct_encode_fields__, strict=True):
        value = getattr(request, name)
        if value is None:
            continue
        if name in rules:
            rules[name].check(where + sent, value)
        elif isinstance(value, RequestFields):
            check_rules(value, f"{where}{sent}.")


def sent_name(kind: type[msgspec.Struct], name: str) -> str:
    """A field as JSON has it: some names are words of Python."""
    return kind.__struct_encode_fields__[kind.__struct_fields__.index(name)]


INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
MAX_STOPS = 4  # OpenAI's bound
MAX_STOP_CHARACTERS = 256
MAX_LOGIT_BIAS = 100.0  # OpenAI's bound
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARACTERS = 256


def _documented(**schema: Any) -> msgspec.Meta:
    return msgspec.Meta(extra_json_schema=schema)


def between(minimum: int, maximum: int = INT64_MAX) -> msgspec.Meta:
    """Documents the bounds of an integer, which the decoder holds to 64 bits."""
    return msgspec.Meta(ge=INT64_MIN, le=INT64_MAX, extra_json_schema={"minimum": minimum, "maximum": maximum})


def bounded(name: str) -> msgspec.Meta:
    parameter = next(each for each in PARAMETERS if each.name == name)
    if name == "top_k":  # -1 keeps all tokens, as 0 does: vLLM's and transformers' way to say it
        return between(-1, int(parameter.high))
    low, high = (int(bound) if bound == int(bound) else bound for bound in (parameter.low, parameter.high))
    return _documented(**{"exclusiveMinimum" if parameter.excludes_low else "minimum": low, "maximum": high})


Int64 = Annotated[int, between(INT64_MIN)]
Count = Annotated[int, between(1)]
Seed = Annotated[int, _documented(minimum=INT64_MIN, maximum=2**64 - 1)]
Logprobs = Annotated[int, between(0, MAX_LOGPROBS)]
Priority = Annotated[int, between(-(2**31), 2**31 - 1)]
NonNegative = Annotated[int, between(0)]
Deadline = Annotated[float, _documented(exclusiveMinimum=0, maximum=MAX_DEADLINE_S)]
Hints = Annotated[
    dict[str, str],
    _documented(maxProperties=MAX_HINTS, additionalProperties={"type": "string", "maxLength": MAX_HINT_LENGTH}),
]
Salt = Annotated[str, _documented(maxLength=MAX_NAME_LENGTH)]
LogitBias = Annotated[
    dict[str, float],
    _documented(additionalProperties={"type": "number", "minimum": -MAX_LOGIT_BIAS, "maximum": MAX_LOGIT_BIAS}),
]
Stop = Annotated[str, _documented(minLength=1, maxLength=MAX_STOP_CHARACTERS)]
Stops = Annotated[list[Stop], _documented(maxItems=MAX_STOPS)]
TokenId = Annotated[int, _documented(minimum=0, maximum=MAX_TOKEN_ID)]
AllowedTokenIds = Annotated[list[TokenId], _documented(minItems=1, maxItems=MAX_ALLOWED_TOKEN_IDS)]
BadWord = Annotated[str, _documented(minLength=1, maxLength=MAX_BAD_WORD_CHARACTERS)]
BadWords = Annotated[list[BadWord], _documented(maxItems=MAX_BAD_WORDS)]
NumKept = Annotated[int, between(-1)]
StopTokenIds = Annotated[list[TokenId], _documented(maxItems=MAX_STOP_TOKEN_IDS)]

"""Types of bounded fields: the bounds are in the OpenAPI document; the code that uses a field checks them.

A decoder that checked them would word its refusals without saying what is possible.
`tests/http/test_openapi.py` posts a value beyond each bound.
"""

from typing import Annotated, Any

import msgspec

from openinfer_core.request import MAX_NAME_LENGTH
from openinfer_core.sampling import MAX_LOGPROBS, MAX_STOP_TOKEN_IDS, MAX_TOKEN_ID

MAX_STOPS = 4
"""OpenAI's bound."""
MAX_STOP_CHARACTERS = 256
MAX_LOGIT_BIAS = 100.0
"""OpenAI's bound."""


def _documented(**schema: Any) -> msgspec.Meta:
    return msgspec.Meta(extra_json_schema=schema)


Count = Annotated[int, _documented(minimum=1)]
Seed = Annotated[int, _documented(minimum=-(2**63), maximum=2**64 - 1)]
Temperature = Annotated[float, _documented(minimum=0, maximum=100)]
TopP = Annotated[float, _documented(exclusiveMinimum=0, maximum=1)]
MinP = Annotated[float, _documented(minimum=0, maximum=1)]
Penalty = Annotated[float, _documented(minimum=-2, maximum=2)]
RepetitionPenalty = Annotated[float, _documented(minimum=0.01, maximum=100)]
TopK = Annotated[int, _documented(minimum=0, maximum=MAX_TOKEN_ID)]
Logprobs = Annotated[int, _documented(minimum=0, maximum=MAX_LOGPROBS)]
Priority = Annotated[int, _documented(minimum=-(2**31), maximum=2**31 - 1)]
NonNegative = Annotated[int, _documented(minimum=0)]
Salt = Annotated[str, _documented(maxLength=MAX_NAME_LENGTH)]
LogitBias = Annotated[
    dict[str, float],
    _documented(additionalProperties={"type": "number", "minimum": -MAX_LOGIT_BIAS, "maximum": MAX_LOGIT_BIAS}),
]
Stop = Annotated[str, _documented(minLength=1, maxLength=MAX_STOP_CHARACTERS)]
Stops = Annotated[list[Stop], _documented(maxItems=MAX_STOPS)]
TokenId = Annotated[int, _documented(minimum=0, maximum=MAX_TOKEN_ID)]
StopTokenIds = Annotated[list[TokenId], _documented(maxItems=MAX_STOP_TOKEN_IDS)]

"""OpenAI's `prediction`: what a client expects much of the answer to be, for an engine that drafts from it."""

from collections.abc import Sequence
from dataclasses import replace

from openinfer_core.engine import EngineCapability
from openinfer_core.request import MAX_PREDICTION_TOKENS, with_fields
from openinfer_server.http.api_errors import ApiError, invalid, refused
from openinfer_server.http.request import HttpRequest
from openinfer_server.openai.types import Prediction, check_part
from openinfer_server.request.plan import Plan
from openinfer_server.service import Service

_FIELD = "prediction"


async def prediction_ids(http_request: HttpRequest, service: Service, prediction: Prediction | None) -> Sequence[int]:
    """Token ids of a prediction; none where there is none, or it is empty.

    Raises:
        ApiError: 400; the engine drafts nothing from predictions, a part is not text, or there are too many tokens.
            429 or 503: see `Tokenizer.encode`.
        ClientDisconnected: the client has left.
    """
    if prediction is None:
        return ()
    if EngineCapability.PREDICTIONS not in service.info.capabilities:
        raise refused(_FIELD, "this server drafts nothing from predicted outputs; with --speculative ngram it does")
    text = _text(prediction)
    least = service.tokenizer.least_tokens(text)
    if least > MAX_PREDICTION_TOKENS:
        raise _too_long(f"at least {least}")
    token_ids = await service.tokenizer.encode(text, add_special_tokens=False, client=http_request)
    if len(token_ids) > MAX_PREDICTION_TOKENS:
        raise _too_long(str(len(token_ids)))
    return token_ids


def predicted(plan: Plan, token_ids: Sequence[int]) -> Plan:
    """The plan with a prediction for each of its requests."""
    if not token_ids:
        return plan
    ids = tuple(token_ids)
    return replace(plan, requests=[with_fields(each, prediction_token_ids=ids) for each in plan.requests])


def _text(prediction: Prediction) -> str:
    content = prediction.content
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        check_part(part, f"{_FIELD}.content[{index}]")
    return "".join(part.text or "" for part in content)


def _too_long(num_tokens: str) -> ApiError:
    return invalid(_FIELD, f"the prediction has {num_tokens} tokens; at most {MAX_PREDICTION_TOKENS} are possible")

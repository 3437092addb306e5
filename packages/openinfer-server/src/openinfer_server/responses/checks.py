"""What of a response's fields cannot be honoured, beyond their types."""

from openinfer_server.http.api_errors import invalid, refused
from openinfer_server.request.fields import check_rules
from openinfer_server.request.neutral_fields import METADATA
from openinfer_server.responses.types import (
    ENCRYPTED,
    FUNCTIONS_ONLY,
    LOGPROBS,
    ResponseRequest,
)


def check_response(request: ResponseRequest) -> None:
    check_rules(request)
    for name in request.include or []:
        if name not in (LOGPROBS, ENCRYPTED):
            raise refused("include", f"{name[:100]!r} is not among {LOGPROBS} and {ENCRYPTED}; {FUNCTIONS_ONLY}")
    if request.top_logprobs is not None and LOGPROBS not in (request.include or []):
        raise invalid("top_logprobs", f"top_logprobs needs include to have {LOGPROBS}")
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "stream_options is only for stream=true")
    if request.background and request.store is False:
        raise invalid("background", "a background response is stored until it is asked for; leave store out")
    METADATA.check("metadata", request.metadata or {})

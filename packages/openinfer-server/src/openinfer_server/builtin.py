"""The routes that every server has."""

from collections.abc import Sequence

from openinfer_server.adapters import adapter_routes
from openinfer_server.api_errors import ErrorResponse
from openinfer_server.api_events import ChatEvent, CompletionEvent
from openinfer_server.api_responses import ChatCompletion, Completion
from openinfer_server.api_types import ChatRequest, CompletionRequest
from openinfer_server.chat import ChatCompletions
from openinfer_server.completions import Completions
from openinfer_server.event_frames import DONE_DATA
from openinfer_server.generate import token_generation_routes
from openinfer_server.messages.handlers import message_routes
from openinfer_server.models import model_routes
from openinfer_server.operations import operation_routes
from openinfer_server.page_routes import page_routes
from openinfer_server.responses.routes import response_routes
from openinfer_server.routes import Endpoints, Route, RouteDoc
from openinfer_server.service import Service
from openinfer_server.tokens import token_routes

GENERATION_ERRORS = (404, 408, 413, 415, 429, 503)
"""What a route that generates may answer beside 400 and 500."""


def completion_routes(service: Service) -> list[Route]:
    """OpenAI's completions and chat completions."""
    return [
        Route(
            method="POST",
            path="/v1/completions",
            handler=Completions(service),
            doc=RouteDoc(
                summary="Continues prompts.",
                tag="OpenAI",
                body=CompletionRequest,
                answer=Completion,
                events=(CompletionEvent, ErrorResponse),
                last_data=DONE_DATA,
                errors=GENERATION_ERRORS,
            ),
        ),
        Route(
            method="POST",
            path="/v1/chat/completions",
            handler=ChatCompletions(service),
            doc=RouteDoc(
                summary="Answers a chat.",
                tag="OpenAI",
                body=ChatRequest,
                answer=ChatCompletion,
                events=(ChatEvent, ErrorResponse),
                last_data=DONE_DATA,
                errors=GENERATION_ERRORS,
            ),
        ),
    ]


BUILTIN: Sequence[Endpoints] = (
    completion_routes,
    response_routes,
    message_routes,
    token_generation_routes,
    token_routes,
    model_routes,
    adapter_routes,
    operation_routes,
    page_routes,
)

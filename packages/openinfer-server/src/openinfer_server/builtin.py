"""The routes that every server has."""

from collections.abc import Sequence

from openinfer_server.anthropic.handlers import message_routes
from openinfer_server.http.api_errors import ErrorResponse
from openinfer_server.http.page import page_routes
from openinfer_server.http.routes import Endpoints, Route, RouteDoc
from openinfer_server.observability.engine_commands import engine_command_routes
from openinfer_server.observability.operations import operation_routes
from openinfer_server.openai.adapters import adapter_routes
from openinfer_server.openai.chat import ChatCompletions
from openinfer_server.openai.completions import Completions
from openinfer_server.openai.event_frames import DONE_DATA
from openinfer_server.openai.events import ChatEvent, CompletionEvent
from openinfer_server.openai.models import model_routes
from openinfer_server.openai.objects import ChatCompletion, Completion, RenderedPrompt
from openinfer_server.openai.types import ChatRequest, CompletionRequest
from openinfer_server.responses.routes import response_routes
from openinfer_server.service import Service
from openinfer_server.tokens.generate import token_generation_routes
from openinfer_server.tokens.tokenize import ERRORS as TOKEN_ERRORS
from openinfer_server.tokens.tokenize import token_routes

GENERATION_ERRORS = (404, 408, 413, 415, 429, 503)  # what a route that generates may answer, next to 400 and 500


def completion_routes(service: Service) -> list[Route]:
    completions, chats = Completions(service), ChatCompletions(service)
    return [
        Route(
            method="POST",
            path="/v1/completions",
            handler=completions,
            is_stateless=True,
            doc=RouteDoc(
                summary="Continues prompts.",
                tag="OpenAI",
                body=CompletionRequest,
                response=Completion,
                events=(CompletionEvent, ErrorResponse),
                last_data=DONE_DATA,
                errors=GENERATION_ERRORS,
            ),
        ),
        Route(
            method="POST",
            path="/v1/chat/completions",
            handler=chats,
            is_stateless=True,
            doc=RouteDoc(
                summary="Answers a chat.",
                tag="OpenAI",
                body=ChatRequest,
                response=ChatCompletion,
                events=(ChatEvent, ErrorResponse),
                last_data=DONE_DATA,
                errors=GENERATION_ERRORS,
            ),
        ),
        Route(
            method="POST",
            path="/v1/completions/render",
            handler=completions.render,
            is_stateless=True,
            doc=RouteDoc(
                summary="The token ids of prompts, without an answer.",
                tag="Tokens",
                body=CompletionRequest,
                response=list[RenderedPrompt],
                errors=TOKEN_ERRORS,
            ),
        ),
        Route(
            method="POST",
            path="/v1/chat/completions/render",
            handler=chats.render,
            is_stateless=True,
            doc=RouteDoc(
                summary="The token ids of a chat's prompt, without an answer.",
                tag="Tokens",
                body=ChatRequest,
                response=RenderedPrompt,
                errors=TOKEN_ERRORS,
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
    engine_command_routes,
    page_routes,
)

"""openinfer-server: OpenAI's and Anthropic's protocols over HTTP for any `openinfer_core.engine.EngineHandle`.

Names are imported when they are first asked for: a command that starts an engine does so before it loads the rest.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openinfer_server.answering import AnswerForm, Completed, Conversation, Ended, answer, complete
    from openinfer_server.app import App, build_app, load_app
    from openinfer_server.chat.bounds import RenderingRefused
    from openinfer_server.chat.template import ChatTemplate
    from openinfer_server.errors import (
        CannotListen,
        ConflictingRoutes,
        ServerError,
        UnusableCertificate,
        UnusableKeys,
        UnusableParser,
        UnusableTemplate,
        UnusableTokenizer,
    )
    from openinfer_server.http.access import Level
    from openinfer_server.http.api_errors import ApiError, invalid, refused
    from openinfer_server.http.request import HttpRequest
    from openinfer_server.http.routes import Endpoints, Route, RouteDoc
    from openinfer_server.http.writers import JSON_LINES
    from openinfer_server.limits.conversation import read_conversation
    from openinfer_server.openai.types import AssistantTurn, FunctionCall, SystemTurn, ToolCall, ToolTurn, UserTurn
    from openinfer_server.options import EventLoop, ServerOptions
    from openinfer_server.plan_parts import frontend_parts
    from openinfer_server.request.fields import Int64, RequestFields, check_rules
    from openinfer_server.request.generation_fields import GenerationFields
    from openinfer_server.request.rules import ANY, Label, Neutral, Refused, Rule
    from openinfer_server.request.structured_types import StructuredOutputs
    from openinfer_server.server import run, run_starting, serve, serve_app
    from openinfer_server.service import Service
    from openinfer_server.text.tokenizer import Tokenizer
    from openinfer_server.tools.available import ToolMode
    from openinfer_server.tools.types import FunctionDefinition

__all__ = [
    "ANY",
    "JSON_LINES",
    "AnswerForm",
    "ApiError",
    "App",
    "AssistantTurn",
    "CannotListen",
    "ChatTemplate",
    "Completed",
    "ConflictingRoutes",
    "Conversation",
    "Ended",
    "Endpoints",
    "EventLoop",
    "FunctionCall",
    "FunctionDefinition",
    "GenerationFields",
    "HttpRequest",
    "Int64",
    "Label",
    "Level",
    "Neutral",
    "Refused",
    "RenderingRefused",
    "RequestFields",
    "Route",
    "RouteDoc",
    "Rule",
    "ServerError",
    "ServerOptions",
    "Service",
    "StructuredOutputs",
    "SystemTurn",
    "Tokenizer",
    "ToolCall",
    "ToolMode",
    "ToolTurn",
    "UnusableCertificate",
    "UnusableKeys",
    "UnusableParser",
    "UnusableTemplate",
    "UnusableTokenizer",
    "UserTurn",
    "answer",
    "build_app",
    "check_rules",
    "complete",
    "frontend_parts",
    "invalid",
    "load_app",
    "read_conversation",
    "refused",
    "run",
    "run_starting",
    "serve",
    "serve_app",
]

_MODULES = {
    "ANY": "request.rules",
    "AnswerForm": "answering",
    "ApiError": "http.api_errors",
    "App": "app",
    "AssistantTurn": "openai.types",
    "CannotListen": "errors",
    "ChatTemplate": "chat.template",
    "Completed": "answering",
    "ConflictingRoutes": "errors",
    "Conversation": "answering",
    "Ended": "answering",
    "Endpoints": "http.routes",
    "EventLoop": "options",
    "FunctionCall": "openai.types",
    "FunctionDefinition": "tools.types",
    "GenerationFields": "request.generation_fields",
    "HttpRequest": "http.request",
    "Int64": "request.fields",
    "JSON_LINES": "http.writers",
    "Label": "request.rules",
    "Level": "http.access",
    "Neutral": "request.rules",
    "Refused": "request.rules",
    "RenderingRefused": "chat.sandbox",
    "RequestFields": "request.fields",
    "Route": "http.routes",
    "RouteDoc": "http.routes",
    "Rule": "request.rules",
    "ServerError": "errors",
    "ServerOptions": "options",
    "Service": "service",
    "StructuredOutputs": "request.structured_types",
    "SystemTurn": "openai.types",
    "Tokenizer": "text.tokenizer",
    "ToolCall": "openai.types",
    "ToolMode": "tools.available",
    "ToolTurn": "openai.types",
    "UnusableCertificate": "errors",
    "UnusableKeys": "errors",
    "UnusableParser": "errors",
    "UnusableTemplate": "errors",
    "UnusableTokenizer": "errors",
    "UserTurn": "openai.types",
    "answer": "answering",
    "build_app": "app",
    "check_rules": "request.fields",
    "complete": "answering",
    "frontend_parts": "plan_parts",
    "invalid": "http.api_errors",
    "load_app": "app",
    "read_conversation": "limits.conversation",
    "refused": "http.api_errors",
    "run": "server",
    "run_starting": "server",
    "serve": "server",
    "serve_app": "server",
}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

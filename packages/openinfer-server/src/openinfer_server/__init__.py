"""openinfer-server: OpenAI's and Anthropic's protocols over HTTP for any `openinfer_core.engine.EngineHandle`.

Names are imported when they are first asked for: a command that starts an engine does so before it loads the rest.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openinfer_server.app import App, build_app, load_app
    from openinfer_server.chat.template import ChatTemplate, RenderingRefused
    from openinfer_server.completing import Completed, complete
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
    from openinfer_server.http.api_errors import ApiError
    from openinfer_server.http.request import HttpRequest
    from openinfer_server.http.routes import Endpoints, Route, RouteDoc
    from openinfer_server.options import EventLoop, ServerOptions
    from openinfer_server.plan_parts import frontend_parts
    from openinfer_server.request.generation_fields import GenerationFields
    from openinfer_server.server import run, run_starting, serve, serve_app
    from openinfer_server.service import Service
    from openinfer_server.text.tokenizer import Tokenizer

__all__ = [
    "ApiError",
    "App",
    "CannotListen",
    "ChatTemplate",
    "Completed",
    "ConflictingRoutes",
    "Endpoints",
    "EventLoop",
    "GenerationFields",
    "HttpRequest",
    "Level",
    "RenderingRefused",
    "Route",
    "RouteDoc",
    "ServerError",
    "ServerOptions",
    "Service",
    "Tokenizer",
    "UnusableCertificate",
    "UnusableKeys",
    "UnusableParser",
    "UnusableTemplate",
    "UnusableTokenizer",
    "build_app",
    "complete",
    "frontend_parts",
    "load_app",
    "run",
    "run_starting",
    "serve",
    "serve_app",
]

_MODULES = {
    "ApiError": "http.api_errors",
    "App": "app",
    "CannotListen": "errors",
    "ChatTemplate": "chat.template",
    "Completed": "completing",
    "ConflictingRoutes": "errors",
    "Endpoints": "http.routes",
    "EventLoop": "options",
    "HttpRequest": "http.request",
    "GenerationFields": "request.generation_fields",
    "Level": "http.access",
    "RenderingRefused": "chat.template",
    "Route": "http.routes",
    "RouteDoc": "http.routes",
    "ServerError": "errors",
    "ServerOptions": "options",
    "Service": "service",
    "Tokenizer": "text.tokenizer",
    "UnusableCertificate": "errors",
    "UnusableKeys": "errors",
    "UnusableParser": "errors",
    "UnusableTemplate": "errors",
    "UnusableTokenizer": "errors",
    "build_app": "app",
    "complete": "completing",
    "frontend_parts": "plan_parts",
    "load_app": "app",
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

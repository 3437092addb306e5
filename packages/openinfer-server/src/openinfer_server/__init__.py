"""openinfer-server: OpenAI's and Anthropic's protocols over HTTP for any `openinfer_core.engine.EngineHandle`."""

from openinfer_server.api_errors import ApiError
from openinfer_server.api_types import GenerationFields
from openinfer_server.app import App, build_app, load_app
from openinfer_server.chat_template import ChatTemplate, RenderingRefused
from openinfer_server.complete import Completed, complete
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
from openinfer_server.exchange import Exchange
from openinfer_server.frontend_parts import frontend_parts
from openinfer_server.levels import Level
from openinfer_server.options import EventLoop, ServerOptions
from openinfer_server.routes import Endpoints, Route, RouteDoc
from openinfer_server.server import run, run_starting, serve, serve_app
from openinfer_server.service import Service
from openinfer_server.tokenizer import Tokenizer

__all__ = [
    "ApiError",
    "App",
    "CannotListen",
    "ChatTemplate",
    "Completed",
    "ConflictingRoutes",
    "Endpoints",
    "EventLoop",
    "Exchange",
    "GenerationFields",
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

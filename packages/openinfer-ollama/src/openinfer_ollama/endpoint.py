"""All routes: answers, the model, and one sentence for each thing that Ollama does and this server does not."""

import time
from collections.abc import Callable
from typing import Any

import msgspec

from openinfer_ollama.fields import generation_fields
from openinfer_ollama.lines import AnswerLines, Piece, chat_line, error_json, generate_line
from openinfer_ollama.models import Models, served_name
from openinfer_ollama.objects import (
    ApiVersion,
    ChatLine,
    ErrorObject,
    GenerateLine,
    Line,
    Running,
    Shown,
    Tags,
    now,
)
from openinfer_ollama.turns import turns_of
from openinfer_ollama.types import (
    KEPT,
    ChatRequest,
    GenerateRequest,
    Request,
    ShowRequest,
)
from openinfer_server import (
    ApiError,
    Conversation,
    HttpRequest,
    Level,
    Route,
    RouteDoc,
    Service,
    SystemTurn,
    UserTurn,
    answer,
    check_rules,
    invalid,
    read_conversation,
    refused,
)

TAG = "Ollama"
ERRORS = (404, 408, 413, 415, 429, 503, 504)
ONE_FOLDER = "this server serves the one model it was started with"
_NOT_HERE = {
    ("POST", "/api/pull"): f"{ONE_FOLDER}; `openinfer pull` fetches others",
    ("POST", "/api/push"): f"{ONE_FOLDER} and publishes none",
    ("POST", "/api/create"): f"{ONE_FOLDER} and makes no others",
    ("POST", "/api/copy"): f"{ONE_FOLDER}; --model-name gives it further names",
    ("DELETE", "/api/delete"): f"{ONE_FOLDER} and deletes no files",
    ("POST", "/api/embed"): "this server generates text and makes no embeddings",
    ("POST", "/api/embeddings"): "this server generates text and makes no embeddings",
}

_chat_decoder = msgspec.json.Decoder(ChatRequest)
_generate_decoder = msgspec.json.Decoder(GenerateRequest)


class Answers:
    """The handlers of the routes that generate text."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def chat(self, http_request: HttpRequest) -> None:
        began_ns, service = time.monotonic_ns(), self._service
        service.check_serving(http_request.owner)
        request = await http_request.read_json(_chat_decoder)
        model = await self._check(http_request, request)
        messages = request.messages or []
        if not messages:
            await _send_loaded(http_request, request, chat_line)
            return
        conversation = Conversation(
            turns=await read_conversation(messages, "messages", lambda: turns_of(messages)),
            functions=[tool.function for tool in request.tools or ()],
            thinking=request.thinking,
        )
        await self._answer(http_request, request, conversation, chat_line, began_ns, model=model)

    async def generate(self, http_request: HttpRequest) -> None:
        began_ns, service = time.monotonic_ns(), self._service
        service.check_serving(http_request.owner)
        request = await http_request.read_json(_generate_decoder)
        model = await self._check(http_request, request)
        if not request.prompt:
            await _send_loaded(http_request, request, generate_line)
            return
        await self._answer(
            http_request, request, self._prompt(request, request.prompt), generate_line, began_ns, model=model
        )

    def _prompt(self, request: GenerateRequest, prompt: str) -> Conversation | str:
        """What is asked: a turn of a chat; the text as it stands if it is raw, or the model has no template."""
        if not request.raw and self._service.has_chat_template:
            system = [SystemTurn(content=request.system)] if request.system else []
            return Conversation(turns=[*system, UserTurn(content=prompt)], thinking=request.thinking)
        for name in ("system", "think"):
            if getattr(request, name):
                why = "raw continues the prompt as it stands" if request.raw else "the model has no chat template"
                raise refused(name, why)
        return prompt

    async def _check(self, http_request: HttpRequest, request: Request) -> str:
        """The served name of the model."""
        check_rules(request)
        model = await served_name(self._service, request.model, http_request.owner)
        if request.thinking and not self._service.tells_reasoning:
            raise refused("think", f"{request.model[:200]!r} does not think, or no --reasoning-parser is chosen for it")
        return model

    async def _answer(
        self,
        http_request: HttpRequest,
        request: Request,
        prompt: Conversation | str,
        line: Callable[..., Line],
        began_ns: int,
        *,
        model: str,
    ) -> None:
        form = AnswerLines(request.model, line, streams=request.streams, began_ns=began_ns)
        num_ctx = None if request.options is None else request.options.num_ctx
        fields = msgspec.structs.replace(generation_fields(request), model=model)
        await answer(http_request, self._service, prompt, fields, form, context_tokens=num_ctx)


async def _send_loaded(http_request: HttpRequest, request: Request, line: Callable[..., Line]) -> None:
    """Answers a request without a prompt, which asks to load the model, or to unload it."""
    if request.unloads:
        raise invalid("keep_alive", f"{KEPT}; stop the server to unload it")
    loaded = line(Piece(), model=request.model, created_at=now(), done=True, done_reason="load")
    await http_request.send(200, msgspec.json.encode(loaded))


def endpoints(service: Service) -> list[Route]:
    """The routes, for one server."""
    answers, models = Answers(service), Models(service)
    return [
        _route(
            "POST",
            "/api/chat",
            answers.chat,
            summary="Answers a chat.",
            body=ChatRequest,
            response=ChatLine,
            lines=(ChatLine, ErrorObject),
            errors=ERRORS,
        ),
        _route(
            "POST",
            "/api/generate",
            answers.generate,
            summary="Answers a prompt, or continues it as it stands.",
            body=GenerateRequest,
            response=GenerateLine,
            lines=(GenerateLine, ErrorObject),
            errors=ERRORS,
        ),
        _route("GET", "/api/tags", models.tags, summary="Lists the names the server answers to.", response=Tags),
        _route("GET", "/api/ps", models.running, summary="Lists the models in memory.", response=Running),
        _route(
            "POST",
            "/api/show",
            models.show,
            summary="Describes the model.",
            body=ShowRequest,
            response=Shown,
            errors=(404, 408, 413, 415),
        ),
        _route(
            "GET",
            "/api/version",
            models.version,
            level=Level.PUBLIC,
            summary="The release of Ollama whose API this is.",
            response=ApiVersion,
        ),
        *(_refusing(method, path, why) for (method, path), why in _NOT_HERE.items()),
    ]


def _route(method: str, path: str, handler: Any, *, level: Level = Level.USER, **doc: Any) -> Route:
    about = RouteDoc(tag=TAG, error_body=ErrorObject, **doc)
    return Route(method=method, path=path, handler=handler, level=level, doc=about, error_form=error_json)


def _refusing(method: str, path: str, why: str) -> Route:
    async def refuse(http_request: HttpRequest) -> None:
        del http_request
        raise ApiError(400, why, code="unsupported")

    return _route(method, path, refuse, summary=f"Refused: {why}.", media_type=b"")

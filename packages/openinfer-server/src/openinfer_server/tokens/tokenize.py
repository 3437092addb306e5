"""`/tokenize` and `/detokenize`: the model's tokenizer, without the model. Fields have vLLM's names."""

import asyncio
from collections.abc import Mapping

import msgspec

from openinfer_server.chat.prompt import chat_prompt
from openinfer_server.http.api_errors import invalid
from openinfer_server.http.request import HttpRequest
from openinfer_server.http.routes import Handler, Route, RouteDoc
from openinfer_server.openai.types import ChatTemplateOptions, Turn, check_turns
from openinfer_server.request.plan import check_prompt_token_ids, too_long
from openinfer_server.service import Service

ERRORS = (404, 408, 413, 415)


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /tokenize`: either a text or a chat, which is rendered as for its answer."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Turn] | None = None
    chat_template_kwargs: ChatTemplateOptions | None = None
    # Of the tokenizer's own; by default for a text, and not for a chat, whose template has put them there.
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `/tokenize`."""

    tokens: list[int]
    count: int
    max_model_len: int  # tokens of the model's context
    # Each token by itself; what is not whole UTF-8 is shown with replacement characters.
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: list[int]


class DetokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `/detokenize`; special tokens show by their names."""

    prompt: str


_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


class Tokens:
    """The routes' handlers."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, http_request: HttpRequest) -> None:
        request = await http_request.read_json(_tokenize_decoder)
        self._service.resolve_model(request.model)
        token_ids = await self._token_ids(request)
        response = TokenizeAnswer(
            tokens=token_ids,
            count=len(token_ids),
            max_model_len=self._service.info.max_model_tokens,
            token_strs=await self._strings(token_ids) if request.return_token_strs else None,
        )
        await http_request.send(200, msgspec.json.encode(response))

    async def _strings(self, token_ids: list[int]) -> list[str]:
        token_bytes = self._service.tokenizer.token_bytes
        return await asyncio.to_thread(lambda: [token_bytes(i).decode(errors="replace") for i in token_ids])

    async def _token_ids(self, request: TokenizeRequest) -> list[int]:
        if (request.prompt is None) == (request.messages is None):
            raise invalid("prompt", "give either prompt or messages")
        if request.prompt is not None:
            if request.chat_template_kwargs is not None:
                raise invalid("chat_template_kwargs", "chat_template_kwargs goes with messages")
            special = request.add_special_tokens is not False
            return await self._service.tokenizer.encode(request.prompt, add_special_tokens=special)
        if request.add_special_tokens:
            raise invalid("add_special_tokens", "the chat template writes special tokens itself; leave this out")
        check_turns(request.messages or [], "messages")
        prompt = await chat_prompt(self._service, request.messages or [], template_variables(request))
        return list(prompt.token_ids)

    async def detokenize(self, http_request: HttpRequest) -> None:
        request = await http_request.read_json(_detokenize_decoder)
        self._service.resolve_model(request.model)
        info = self._service.info
        if request.tokens:
            check_prompt_token_ids(request.tokens, info, "tokens")
        if len(request.tokens) > info.max_model_tokens:
            raise too_long(str(len(request.tokens)), info, "tokens")
        text = await asyncio.to_thread(self._service.tokenizer.decode_prompt, request.tokens)
        await http_request.send(200, msgspec.json.encode(DetokenizeAnswer(prompt=text)))


def template_variables(request: TokenizeRequest) -> Mapping[str, object]:
    given = request.chat_template_kwargs
    if given is None:
        return {}
    return {name: value for name, value in msgspec.structs.asdict(given).items() if value is not None}


def token_routes(service: Service) -> list[Route]:
    tokens = Tokens(service)

    def route(path: str, handler: Handler, summary: str, body: type, response: type) -> Route:
        doc = RouteDoc(summary=summary, tag="Tokens", body=body, response=response, errors=ERRORS)
        return Route(method="POST", path=path, handler=handler, doc=doc)

    return [
        route("/tokenize", tokens.tokenize, "Encodes a text, or a chat's prompt.", TokenizeRequest, TokenizeAnswer),
        route("/detokenize", tokens.detokenize, "Decodes token ids.", DetokenizeRequest, DetokenizeAnswer),
    ]

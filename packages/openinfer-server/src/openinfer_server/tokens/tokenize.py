"""`/tokenize` and `/detokenize`: the model's tokenizer, without the model. Fields have vLLM's names."""

from typing import Any

import msgspec

from openinfer_server.chat.prompt import chat_prompt, prompt_end
from openinfer_server.chat.variables import chat_variables
from openinfer_server.http.api_errors import invalid
from openinfer_server.http.request import HttpRequest
from openinfer_server.http.routes import Handler, Route, RouteDoc
from openinfer_server.limits.conversation import check_num_entries
from openinfer_server.openai.types import Effort, Turn, check_turns
from openinfer_server.request.fields import TokenId
from openinfer_server.request.plan import ID_BYTES, check_prompt_token_ids, too_long
from openinfer_server.service import Service
from openinfer_server.tools.available import AvailableTools, chat_tools
from openinfer_server.tools.dropped import note_dropped_tools
from openinfer_server.tools.types import Tool

ERRORS = (404, 408, 413, 415)


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /tokenize`: either a text or a chat, which is rendered as for its answer."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Turn] | None = None
    tools: list[Tool] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
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
    tokens: list[TokenId]


class DetokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `/detokenize`; special tokens show by their names."""

    prompt: str


_OF_CHATS = (
    *("tools", "documents", "reasoning_effort", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message"),
)
_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


class Tokens:
    """The routes' handlers."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, http_request: HttpRequest) -> None:
        request = await http_request.read_json(_tokenize_decoder)
        await self._service.find_model(request.model, http_request.owner)
        note_dropped_tools(self._service, http_request, request.tools)
        token_ids = await self._token_ids(http_request, request)
        response = TokenizeAnswer(
            tokens=token_ids,
            count=len(token_ids),
            max_model_len=self._service.info.max_model_tokens,
            token_strs=await self._strings(http_request, token_ids) if request.return_token_strs else None,
        )
        num_bytes = ID_BYTES * len(token_ids)
        body = await http_request.aside(lambda: msgspec.json.encode(response), num_bytes=num_bytes)
        await http_request.send(200, body)

    async def _strings(self, http_request: HttpRequest, token_ids: list[int]) -> list[str]:
        token_bytes = self._service.tokenizer.token_bytes
        return await http_request.in_thread(lambda: [token_bytes(i).decode(errors="replace") for i in token_ids])

    async def _token_ids(self, http_request: HttpRequest, request: TokenizeRequest) -> list[int]:
        if (request.prompt is None) == (request.messages is None):
            raise invalid("prompt", "give either prompt or messages")
        if request.prompt is not None:
            for name in _OF_CHATS:
                if getattr(request, name) is not None:
                    raise invalid(name, f"{name} goes with messages")
            special = request.add_special_tokens is not False
            return await self._service.tokenizer.encode(request.prompt, add_special_tokens=special, client=http_request)
        if request.add_special_tokens:
            raise invalid("add_special_tokens", "the chat template writes special tokens itself; leave this out")
        return await self._chat_token_ids(http_request, request, request.messages or [])

    async def _chat_token_ids(
        self, http_request: HttpRequest, request: TokenizeRequest, turns: list[Turn]
    ) -> list[int]:
        service = self._service

        def checked() -> AvailableTools:
            check_num_entries(turns, "messages")
            check_turns(turns, "messages")
            return chat_tools(service, request.tools, None, parallel=None)

        available = await http_request.aside(checked)
        variables = chat_variables(
            service,
            kwargs=request.chat_template_kwargs,
            effort=request.reasoning_effort,
            documents=request.documents,
        )
        end = prompt_end(
            turns,
            continue_final_message=request.continue_final_message,
            add_generation_prompt=request.add_generation_prompt,
        )
        prompt = await chat_prompt(http_request, service, turns, {**variables, **available.variables}, end=end)
        return list(prompt.token_ids)

    async def detokenize(self, http_request: HttpRequest) -> None:
        request = await http_request.read_json(_detokenize_decoder)
        await self._service.find_model(request.model, http_request.owner)
        info = self._service.info
        if request.tokens:
            await http_request.aside(lambda: check_prompt_token_ids(request.tokens, info, "tokens"))
        if len(request.tokens) > info.max_model_tokens:
            raise too_long(str(len(request.tokens)), info, "tokens")
        text = await http_request.in_thread(lambda: self._service.tokenizer.decode_prompt(request.tokens))
        await http_request.send(200, msgspec.json.encode(DetokenizeAnswer(prompt=text)))


def token_routes(service: Service) -> list[Route]:
    tokens = Tokens(service)

    def route(path: str, handler: Handler, summary: str, body: type, response: type) -> Route:
        doc = RouteDoc(summary=summary, tag="Tokens", body=body, response=response, errors=ERRORS)
        return Route(method="POST", path=path, handler=handler, doc=doc, is_stateless=True)

    return [
        route("/tokenize", tokens.tokenize, "Encodes a text, or a chat's prompt.", TokenizeRequest, TokenizeAnswer),
        route("/detokenize", tokens.detokenize, "Decodes token ids.", DetokenizeRequest, DetokenizeAnswer),
    ]

"""The routes of `/v1/messages`."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from openinfer_core import RetainedPrefix
from openinfer_core.sampling import Grammar
from openinfer_server.anthropic.blocks import TextBlock, system_text, turns_of
from openinfer_server.anthropic.builder import MessageBuilder
from openinfer_server.anthropic.marks import CacheMark, cache_marks
from openinfer_server.anthropic.objects import ErrorEvent, Event, MessageObject, TokenCount
from openinfer_server.anthropic.thinking import thinking_variables
from openinfer_server.anthropic.types import (
    FUNCTIONS_ONLY,
    NO_THREADS,
    THREAD_UNSUPPORTED,
    ClientTool,
    CountTokensRequest,
    MessagesRequest,
    Prompting,
    System,
    ThinkingEnabled,
    ToolChoiceAny,
    ToolChoiceNone,
    ToolChoiceTool,
)
from openinfer_server.chat.prompt import PromptEnd, chat_prompt, prompt_end
from openinfer_server.http.api_errors import AnthropicErrorResponse, ApiError, convert_inside, invalid, refused, renamed
from openinfer_server.http.request import HttpRequest
from openinfer_server.http.routes import Handler, Route, RouteDoc
from openinfer_server.http.writers import StreamWriter
from openinfer_server.limits.conversation import read_conversation
from openinfer_server.openai.types import AssistantTurn, SystemTurn, Turn
from openinfer_server.output.parsing import OutputParsers
from openinfer_server.output.pipeline import deliver, submit
from openinfer_server.output.response import Response
from openinfer_server.request.fields import check_rules
from openinfer_server.request.generation_fields import GenerationFields, SamplingFields
from openinfer_server.request.plan import Plan, Prompt, Scoring, make_plan, plan_bytes
from openinfer_server.request.retention import KeptPrompt, Retention, retention_of
from openinfer_server.request.structured import OutputConstraint, chat_grammar, constrained, output_constraint
from openinfer_server.service import Service
from openinfer_server.tools.available import AvailableTools, Fields, ToolMode, ToolRequest, available_tools
from openinfer_server.tools.dropped import kept_tools, note_dropped_tools
from openinfer_server.tools.types import MAX_TOOLS, FunctionDefinition

FIELD_NAMES = {"stop": "stop_sequences"}  # what errors of shared code call a field, and what this API calls it
BUDGET = "thinking.budget_tokens"
ERRORS = (404, 408, 413, 415, 429, 503)

_decoder = msgspec.json.Decoder(MessagesRequest)
_count_decoder = msgspec.json.Decoder(CountTokensRequest)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A message that is asked for, checked."""

    plan: Plan
    parsers: OutputParsers
    builder: MessageBuilder
    writer: StreamWriter | None


class Messages:
    """The routes' handlers."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, http_request: HttpRequest) -> None:
        asked = await self._asked(http_request)
        message, writer, response = asked.builder.message, asked.writer, Response(self._service.link)
        await submit(self._service, response, asked.plan, [asked.builder], parsers=asked.parsers)
        await deliver(
            http_request, self._service, response, writer, body=lambda: msgspec.json.encode(message), end=_end
        )

    async def _asked(self, http_request: HttpRequest) -> "_Asked":
        """What is asked. Of the request the tools' schemas alone outlive it, if a parser reads by them."""
        service = self._service
        service.check_serving(http_request.owner)
        request = await http_request.read_json(_decoder)
        check_prompting(request)
        model = await service.find_model(request.model, http_request.owner)
        note_dropped_tools(service, http_request, request.tools)
        prompt, available, marks = await self._prompt(http_request, request)
        retention = _retention(request, prompt, marks)
        thinking = request.thinking
        budget = thinking.budget_tokens if isinstance(thinking, ThinkingEnabled) else None
        parsers = OutputParsers.make(service, prompt, available, budget_tokens=budget, budget_field=BUDGET)

        def planned() -> tuple[Plan, bool]:
            grammar = chat_grammar(service, parsers.prompt, available, _constraint(request))
            return self._plan(http_request, request, parsers.prompt, grammar, retention)

        num_bytes = plan_bytes([parsers.prompt], 1)
        plan, full_context = await http_request.aside(planned, num_bytes=num_bytes)
        shows_thinking = getattr(thinking, "display", None) != "omitted"
        writer = http_request.stream(1) if request.stream else None
        message = MessageObject(id=f"msg_{secrets.token_hex(16)}", model=model)
        builder = MessageBuilder(
            message,
            writer,
            shows_thinking=shows_thinking,
            full_context=full_context,
            kept=KeptPrompt(retention, service.info.block_size_tokens),
        )
        return _Asked(plan, parsers, builder, writer)

    async def count_tokens(self, http_request: HttpRequest) -> None:
        request = await http_request.read_json(_count_decoder)
        check_prompting(request)
        await self._service.find_model(request.model, http_request.owner)
        note_dropped_tools(self._service, http_request, request.tools)
        prompt, _, _ = await self._prompt(http_request, request)
        await http_request.send(200, msgspec.json.encode(TokenCount(input_tokens=len(prompt.token_ids))))

    async def _prompt(
        self, http_request: HttpRequest, request: Prompting
    ) -> tuple[Prompt, AvailableTools, Sequence[CacheMark]]:
        available = await http_request.aside(lambda: _available_tools(self._service, request))
        turns: list[Turn] = [] if request.system is None else [SystemTurn(content=_system(request.system))]
        said = await read_conversation(request.messages, "messages", lambda: turns_of(request.messages))
        before = (request.tools, request.system)
        marks = cache_marks(said, num_before=len(turns), before=before, whole=request.cache_control)
        turns += [turn for turn, _ in said]
        variables = {**thinking_variables(self._service, request), **available.variables}
        end = _prompt_end(request, turns)
        salt = request.cache_salt if isinstance(request, MessagesRequest) else None
        places = [mark.place for mark in marks]
        prompt = await chat_prompt(
            http_request, self._service, turns, variables, end=end, cache_salt=salt, marks=places
        )
        return prompt, available, marks

    def _plan(
        self,
        http_request: HttpRequest,
        request: MessagesRequest,
        prompt: Prompt,
        grammar: Grammar | None,
        retention: Retention,
    ) -> tuple[Plan, bool]:
        """What the engine is asked, and whether the context ends before `max_tokens`."""
        given: dict[str, Any] = {name: getattr(request, name) for name in SamplingFields.__struct_fields__}
        given["stop"], given["model"] = request.stop_sequences, request.model
        fields = GenerationFields(**given)
        room = max(1, self._service.info.max_model_tokens - len(prompt.token_ids))
        with renamed(FIELD_NAMES):
            plan = make_plan(
                self._service,
                fields,
                [prompt],
                tenant=http_request.tenant,
                owner=http_request.owner,
                max_tokens=min(request.max_tokens, room),
                scoring=Scoring(),
                retention=retention,
            )
        return constrained(plan, grammar), request.max_tokens > room


def _retention(request: MessagesRequest, prompt: Prompt, marks: Sequence[CacheMark]) -> Retention:
    """What is kept: up to the marks, and what OpenAI's fields say."""
    given = retention_of(request.prompt_cache_key, request.prompt_cache_retention)
    prefixes = (
        RetainedPrefix(max(1, num_tokens), mark.seconds)
        for mark, num_tokens in zip(marks, prompt.prefix_tokens, strict=True)
    )
    return Retention(given.seconds, given.key, tuple(prefixes))


def _end(error: ApiError | None) -> bytes:
    # the builder has written the last event, unless the message failed
    return b"" if error is None else ErrorEvent(error=error.anthropic_body).frame()


def _system(system: System) -> str:
    if isinstance(system, str):
        return system
    blocks: list[TextBlock] = []
    for index, block in enumerate(system):
        given: Any = block
        blocks.append(convert_inside(given, TextBlock, f"system[{index}]"))
        check_rules(blocks[-1], f"system[{index}].")
    return system_text(blocks)


def _prompt_end(request: Prompting, turns: Sequence[Turn]) -> PromptEnd:
    goes_on, begins = None, None
    if isinstance(request, MessagesRequest):
        goes_on, begins = request.continue_final_message, request.add_generation_prompt
    if goes_on is None and begins is None:  # Anthropic's API continues a message of the assistant that comes last
        goes_on = isinstance(turns[-1], AssistantTurn)
    return prompt_end(turns, continue_final_message=goes_on, add_generation_prompt=begins)


def _available_tools(service: Service, request: Prompting) -> AvailableTools:
    functions = {
        place: FunctionDefinition(
            name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
        )
        for place, tool in read_tools(request.tools).items()
    }
    choice = request.tool_choice
    mode, only = ToolMode.AUTO, None
    match choice:
        case ToolChoiceAny():
            mode = ToolMode.REQUIRED
        case ToolChoiceTool():
            mode, only = ToolMode.REQUIRED, [choice.name]
        case ToolChoiceNone():
            mode = ToolMode.NONE
        case _:
            pass
    parallel = not getattr(choice, "disable_parallel_tool_use", None)
    return available_tools(
        service, ToolRequest(functions, mode, only, parallel, Fields(function="", schema="input_schema"))
    )


def _constraint(request: MessagesRequest) -> OutputConstraint:
    wanted = None if request.output_config is None else request.output_config.format
    return output_constraint(
        request, schema=None if wanted is None else wanted.schema, schema_field="output_config.format"
    )


def message_routes(service: Service) -> list[Route]:
    messages = Messages(service)

    def route(path: str, handler: Handler, **doc: Any) -> Route:
        about = RouteDoc(tag="Anthropic", also=(ClientTool, TextBlock), error_body=AnthropicErrorResponse, **doc)
        return Route(method="POST", path=path, handler=handler, doc=about, is_stateless=True)

    return [
        route(
            "/v1/messages",
            messages.create,
            summary="Answers a conversation with a message.",
            body=MessagesRequest,
            response=MessageObject,
            events=Event,
            errors=ERRORS,
        ),
        route(
            "/v1/messages/count_tokens",
            messages.count_tokens,
            summary="Counts the tokens of a prompt.",
            body=CountTokensRequest,
            response=TokenCount,
            errors=(404, 408, 413, 415),
        ),
    ]


def read_tools(given: Sequence[Mapping[str, Any]] | None) -> dict[str, ClientTool]:
    """The tools on offer, by their places; one that the server would have to run is refused, if it is not dropped."""
    if len(given or ()) > MAX_TOOLS:
        raise invalid("tools", f"{len(given or ())} tools are given; at most {MAX_TOOLS} are possible")
    tools: dict[str, ClientTool] = {}
    for index, tool in kept_tools(given).items():
        place, kind = f"tools[{index}]", tool.get("type")
        if kind not in (None, "custom"):
            raise refused(f"{place}.type", f"{FUNCTIONS_ONLY}, whose type is custom; not {str(kind)[:100]!r}")
        tools[place] = convert_inside(tool, ClientTool, place)
        check_rules(tools[place], f"{place}.")
    return tools


def check_prompting(request: Prompting) -> None:
    """Refuses what cannot be honoured of a prompt's fields."""
    if getattr(request, "thread", None) is not None:  # with the code at which the SDK goes on without a thread
        raise ApiError(400, f"thread is not supported: {NO_THREADS}", param="thread", code=THREAD_UNSUPPORTED)
    check_rules(request)
    thinking = request.thinking
    if isinstance(thinking, ThinkingEnabled) and thinking.budget_tokens < 1:
        raise invalid("thinking.budget_tokens", "thinking.budget_tokens must be at least 1")

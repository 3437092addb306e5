"""`answer` and `complete`: a prompt answered or continued, for endpoints of other packages.

    Conversation | str ─► checks, limits, grammar ─► engine ─► parsers ─► AnswerForm ─► the client

An endpoint brings what was asked and how its API writes an answer. What every generating route has, this has: the
checks of its fields, the bounds, the line in the log, the metrics, and the abort when the client leaves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from openinfer_core.engine import EngineInfo
from openinfer_core.events import FinishReason
from openinfer_core.sampling import Grammar
from openinfer_server.chat.prompt import chat_prompt, prompt_end
from openinfer_server.chat.variables import switch_variables
from openinfer_server.http.api_errors import ApiError, invalid
from openinfer_server.http.request import HttpRequest
from openinfer_server.http.writers import StreamWriter
from openinfer_server.limits.conversation import check_num_entries
from openinfer_server.openai.completion_sinks import TextSink
from openinfer_server.openai.types import Turn, check_turns
from openinfer_server.output.delivery import await_whole
from openinfer_server.output.delta_choice import DeltaChoice, Sink
from openinfer_server.output.logprobs import ScoredToken
from openinfer_server.output.parsing import OutputParsers
from openinfer_server.output.pipeline import deliver, submit
from openinfer_server.output.response import Response
from openinfer_server.parsers.deltas import Delta
from openinfer_server.request.fields import check_rules
from openinfer_server.request.generation_fields import GenerationFields
from openinfer_server.request.plan import (
    DEFAULT_COMPLETION_TOKENS,
    ID_BYTES,
    Plan,
    Prompt,
    Scoring,
    check_prompt_token_ids,
    make_plan,
    plan_bytes,
    too_long,
)
from openinfer_server.request.structured import chat_grammar, constrained, output_constraint, text_grammar
from openinfer_server.service import Service
from openinfer_server.tools.available import ToolMode, ToolRequest, available_tools
from openinfer_server.tools.types import FunctionDefinition


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A chat, which the model's template makes a prompt of.

    Attributes:
        turns: in their order; the answer is the assistant's next, unless the fields' `continue_final_message` is true.
        functions: that the model may call.
        tool_mode: whether it may, must, or must not.
        thinking: whether the template is told to think, if it can be told; None leaves it the choice.
    """

    turns: Sequence[Turn]
    functions: Sequence[FunctionDefinition] = ()
    tool_mode: ToolMode = ToolMode.AUTO
    thinking: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How an answer ended well.

    Attributes:
        finish_reason: `stop` or `length`.
        called: whether it has a tool call.
        stop_string: the one that ended it; None for another end.
        prompt_tokens: of the prompt, cached ones too.
        cached_tokens: of the prompt, found in a cache.
        completion_tokens: sampled, the stop token included.
        reasoning_tokens: those of them that were reasoning, as far as a parser told.
        queued_s: from the submission until the engine began.
        prefill_s: from there to the first token.
        decode_s: from the first token to the last.
    """

    finish_reason: str
    called: bool
    stop_string: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    queued_s: float
    prefill_s: float
    decode_s: float


class AnswerForm(Protocol):
    """How an API writes one answer. What each method returns, which may be empty, is the body's next piece.

    Attributes:
        streams: whether the client gets each piece as it is made, or all of them as one body at the end.
        content_type: of the body; pieces of `JSON_LINES` are whole lines.
    """

    streams: bool
    content_type: bytes

    def take(self, delta: Delta) -> bytes:
        """More of the answer; `openinfer_server.parsers` has the kinds of deltas, and in which order they come."""
        ...

    def end(self, ended: Ended) -> bytes:
        """The answer is complete."""
        ...

    def fail(self, error: ApiError) -> bytes:
        """The answer failed after its stream had begun; before that, `Route.error_form` writes the error."""
        ...


@dataclass(frozen=True, slots=True)
class Completed:
    """A text that has ended.

    Attributes:
        text: without the stop string that ended it.
        finish_reason: `stop` or `length`.
        prompt_tokens: of the prompt.
        completion_tokens: sampled, the stop token included.
    """

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


async def answer(
    http_request: HttpRequest,
    service: Service,
    prompt: Conversation | str,
    fields: GenerationFields,
    form: AnswerForm,
    *,
    context_tokens: int | None = None,
) -> None:
    """Sends one answer to a conversation, or what follows a text as it stands; aborted when the client leaves.

    The request's body must have been read. Fields mean what they do in `/v1/chat/completions`, but for `max_tokens`: an
    answer ends at the latest where the context does, whatever it says. `n` must be absent or 1; `form` says whether the
    answer is streamed. Of a text nothing is parsed.

    Args:
        http_request: who asks.
        service: see there.
        prompt: what is asked.
        fields: how.
        form: how the answer is written.
        context_tokens: of prompt and answer together at most; None for the served context.

    Raises:
        ApiError: a value is out of range, the prompt is too long, the queue is full, or the engine failed before the
            answer began.
        ClientDisconnected: the client has left.
    """
    service.check_serving(http_request.owner)
    _check_fields(fields)
    if isinstance(prompt, str):
        parsers, encoded = None, await _encoded(http_request, service, prompt)
        grammar = await http_request.aside(lambda: text_grammar(output_constraint(fields)))
    else:
        parsers, grammar = await _rendered(http_request, service, prompt, fields)
        encoded = parsers.prompt
    plan = await _plan(
        http_request,
        service,
        msgspec.structs.replace(fields, max_tokens=None),
        encoded,
        default_tokens=_room(service.info, encoded, fields.max_tokens, context_tokens),
        grammar=grammar,
    )
    writer = http_request.stream(1, content_type=form.content_type) if form.streams else None
    response, sink = Response(service.link), _FormSink(form, writer)
    await submit(service, response, plan, [sink], parsers=parsers)
    await deliver(
        http_request,
        service,
        response,
        writer,
        body=sink.body,
        end=lambda error: b"" if error is None else form.fail(error),
        content_type=form.content_type,
    )


async def complete(http_request: HttpRequest, service: Service, prompt: str, fields: GenerationFields) -> Completed:
    """Continues a prompt with one text and returns it; aborted when the client leaves.

    The request's body must have been read. Fields mean what they do in `/v1/completions`; `n` must be absent or 1.

    Raises:
        ApiError: a value is out of range, the prompt is too long, the queue is full, or the engine failed.
        ClientDisconnected: the client has left.
    """
    service.check_serving(http_request.owner)
    _check_fields(fields)
    plan = await _plan(
        http_request,
        service,
        fields,
        await _encoded(http_request, service, prompt),
        default_tokens=DEFAULT_COMPLETION_TOKENS,
        grammar=await http_request.aside(lambda: text_grammar(output_constraint(fields))),
    )
    response, sink = Response(service.link), TextSink()
    await submit(service, response, plan, [sink])
    await await_whole(http_request, response)
    (choice,) = response.choices
    return Completed(sink.text, str(choice.finish_reason), choice.prompt_tokens, choice.completion_tokens)


class _FormSink(Sink):
    """Hands an answer's deltas to its form, and what that makes of them to the stream or to one body."""

    __slots__ = ("_dirty", "_form", "_pieces", "_writer")

    def __init__(self, form: AnswerForm, writer: StreamWriter | None) -> None:
        self._dirty: list[StreamWriter] = []
        self._form = form
        self._pieces: list[bytes] = []
        self._writer = writer

    def begin(self, choice: DeltaChoice) -> None:
        self._dirty = choice.response.link.dirty

    def take(self, deltas: Sequence[Delta], scores: Sequence[ScoredToken]) -> None:
        del scores
        for delta in deltas:
            self._write(self._form.take(delta))

    def conclude(self, choice: DeltaChoice, reason: FinishReason) -> None:
        self._write(self._form.end(_ended(choice, reason)))

    def body(self) -> bytes:
        return b"".join(self._pieces)

    def _write(self, piece: bytes) -> None:
        writer = self._writer
        if writer is None:
            self._pieces.append(piece)
        elif piece:
            writer.events.append(piece)
            writer.mark_dirty(self._dirty)


def _ended(choice: DeltaChoice, reason: FinishReason) -> Ended:
    queued_s, began_s = choice.queued_s or 0.0, choice.first_token_s
    return Ended(
        finish_reason=str(reason),
        called=choice.called,
        stop_string=choice.stop_string,
        prompt_tokens=choice.prompt_tokens,
        cached_tokens=choice.cached_tokens,
        completion_tokens=choice.completion_tokens,
        reasoning_tokens=choice.reasoning_tokens,
        queued_s=queued_s,
        # an answer that is a stop token and nothing else has no first token to take the time of
        prefill_s=max(0.0, began_s - choice.submitted_s - queued_s) if began_s else 0.0,
        decode_s=choice.last_token_s - began_s if began_s else 0.0,
    )


def _check_fields(fields: GenerationFields) -> None:
    check_rules(fields)
    if fields.n not in (None, 1):
        raise invalid("n", "one prompt has one answer here")


async def _plan(
    http_request: HttpRequest,
    service: Service,
    fields: GenerationFields,
    prompt: Prompt,
    *,
    default_tokens: int,
    grammar: Grammar | None,
) -> Plan:
    def plan() -> Plan:
        plan = make_plan(
            service,
            fields,
            [prompt],
            tenant=http_request.tenant,
            owner=http_request.owner,
            max_tokens=fields.max_tokens,
            default_tokens=default_tokens,
            scoring=Scoring(),
        )
        return constrained(plan, grammar)

    return await http_request.aside(plan, num_bytes=plan_bytes([prompt], 1))


async def _rendered(
    http_request: HttpRequest, service: Service, conversation: Conversation, fields: GenerationFields
) -> tuple[OutputParsers, Grammar | None]:
    turns = conversation.turns
    check_num_entries(turns, "messages")
    if not turns:
        raise invalid("messages", "messages is empty")
    await http_request.aside(lambda: check_turns(turns, "messages"))
    functions = {f"tools[{index}]": function for index, function in enumerate(conversation.functions)}
    available = await http_request.aside(
        lambda: available_tools(service, ToolRequest(functions, conversation.tool_mode))
    )
    thinks = conversation.thinking
    variables = None if thinks is None else switch_variables(service, thinks=thinks)
    end = prompt_end(
        turns,
        continue_final_message=bool(fields.continue_final_message),
        add_generation_prompt=fields.add_generation_prompt,
    )
    prompt = await chat_prompt(
        http_request,
        service,
        turns,
        {**(variables or {}), **available.variables},
        end=end,
        cache_salt=fields.cache_salt,
    )
    parsers = OutputParsers.make(service, prompt, available, budget_tokens=None)
    grammar = await http_request.aside(
        lambda: chat_grammar(service, parsers.prompt, available, output_constraint(fields))
    )
    return parsers, grammar


async def _encoded(http_request: HttpRequest, service: Service, prompt: str) -> Prompt:
    info, least = service.info, service.tokenizer.least_tokens(prompt)
    if least > info.max_model_tokens:
        raise too_long(f"at least {least}", info, "prompt")
    token_ids = await service.tokenizer.encode(prompt, add_special_tokens=True, client=http_request)
    num_bytes = ID_BYTES * len(token_ids)
    await http_request.aside(lambda: check_prompt_token_ids(token_ids, info, "prompt"), num_bytes=num_bytes)
    return Prompt(tuple(token_ids), prompt, "prompt")


def _room(info: EngineInfo, prompt: Prompt, max_tokens: int | None, context_tokens: int | None) -> int:
    """How many tokens an answer may have at most."""
    if max_tokens is not None and max_tokens < 1:
        raise invalid("max_tokens", f"max_tokens is {max_tokens}; it must be at least 1")
    if context_tokens is None:
        context_tokens = info.max_model_tokens
    if not 1 <= context_tokens <= info.max_model_tokens:
        message = f"context_tokens is {context_tokens}; this server has a context of {info.max_model_tokens}"
        raise invalid("context_tokens", message)
    room = context_tokens - len(prompt.token_ids)
    if room < 1:
        message = f"the prompt has {len(prompt.token_ids)} tokens, and the context holds {context_tokens}"
        raise ApiError(400, message, param=prompt.field, code="context_length_exceeded")
    return room if max_tokens is None else min(max_tokens, room)

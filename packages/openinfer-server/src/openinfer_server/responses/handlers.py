"""The routes of `/v1/responses`."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec

from openinfer_server.http.api_errors import ApiError, invalid, renamed
from openinfer_server.http.request import HttpRequest
from openinfer_server.http.writers import StreamWriter
from openinfer_server.output import pipeline
from openinfer_server.output.delivery import await_end
from openinfer_server.output.parsing import OutputParsers
from openinfer_server.request.fields import check_rules
from openinfer_server.request.plan import Plan, plan_bytes
from openinfer_server.request.structured import chat_grammar, constrained
from openinfer_server.responses.checks import check_response
from openinfer_server.responses.items import InputItem
from openinfer_server.responses.objects import DeletedResponse, InputTokens
from openinfer_server.responses.offered import read_tools
from openinfer_server.responses.plan import (
    conversation_items,
    conversation_prompt,
    conversation_tools,
    new_response,
    response_constraint,
    response_plan,
    score_format,
)
from openinfer_server.responses.run import ResponseRun
from openinfer_server.responses.store import ResponseRecord, ResponseStore
from openinfer_server.responses.types import (
    MAX_ITEMS,
    Conversation,
    InputTokensRequest,
    ItemsQuery,
    ResponseRequest,
    RetrieveQuery,
)
from openinfer_server.service import Service
from openinfer_server.tools.dropped import note_dropped_tools

DEFAULT_ITEMS = 20  # OpenAI's default of `limit`
ERRORS = (404, 408, 413, 415, 429, 503)

_decoder = msgspec.json.Decoder(ResponseRequest)
_count_decoder = msgspec.json.Decoder(InputTokensRequest)


class ItemList(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `GET /v1/responses/{response_id}/input_items`."""

    object: str = "list"
    data: list[InputItem]
    has_more: bool
    first_id: str | None
    last_id: str | None


@dataclass(frozen=True, slots=True)
class _Asked:
    """A response that is asked for, checked."""

    plan: Plan
    parsers: OutputParsers
    run: ResponseRun
    record: ResponseRecord
    stream: bool


class Responses:
    """The routes' handlers, and the responses they keep."""

    def __init__(self, service: Service) -> None:
        options = service.options
        self._service = service
        self._scores = score_format(service.tokenizer)
        self._background: set[asyncio.Task[None]] = set()
        self.store = ResponseStore(
            # Each of several workers keeps its own, and all keep no more than was allowed.
            max_responses=max(1, options.max_stored_responses // options.workers),
            max_bytes=max(1, options.max_stored_response_bytes // options.workers),
        )
        service.budgets.further.append(self.store.uses)

    async def create(self, http_request: HttpRequest) -> None:
        asked = await self._asked(http_request)
        run, record = asked.run, asked.record

        async def submit() -> None:
            await pipeline.submit(self._service, run.response, asked.plan, [run], parsers=asked.parsers)

        if run.response_object.background:
            await self._answer_later(http_request, run, submit, record, stream=asked.stream)
        else:
            await self._answer_now(http_request, run, submit, stream=asked.stream)
            if run.response_object.store and run.builder.ended:
                self.store.add(record)

    async def _asked(self, http_request: HttpRequest) -> "_Asked":
        """What is asked. Of the request its items outlive it, if they are kept, and its tools as text."""
        service = self._service
        service.check_serving(http_request.owner)
        request = await http_request.read_json(_decoder)
        check_response(request)
        if request.store is not False or request.previous_response_id is not None:
            http_request.give_back()  # the store of responses is there
        model = await service.find_model(request.model, http_request.owner)
        items = await conversation_items(request, self._previous(http_request, request))
        note_dropped_tools(service, http_request, request.tools)
        offered = await http_request.aside(lambda: read_tools(request.tools))
        available = await http_request.aside(lambda: conversation_tools(service, request, offered))
        prompt = await conversation_prompt(http_request, service, request, items, available)
        parsers = OutputParsers.make(service, prompt, available, budget_tokens=request.thinking_token_budget)

        def planned() -> Plan:
            grammar = chat_grammar(service, parsers.prompt, available, response_constraint(request))
            return constrained(response_plan(http_request, service, request, parsers.prompt), grammar)

        plan = await http_request.aside(planned, num_bytes=plan_bytes([parsers.prompt], 1))
        run = ResponseRun(
            service.link,
            await http_request.aside(lambda: new_response(request, model, service.sampling_defaults)),
            names=offered.names,
            scores=self._scores,
            events=[] if request.background and request.stream else None,
        )
        record = ResponseRecord(run.response_object, items, http_request.tenant, http_request.owner)
        return _Asked(plan, parsers, run, record, stream=bool(request.stream))

    def _previous(self, http_request: HttpRequest, request: Conversation) -> ResponseRecord | None:
        if request.previous_response_id is None:
            return None
        with renamed({"response_id": "previous_response_id"}):
            return self.store.find(request.previous_response_id, http_request.tenant)

    async def _answer_now(
        self, http_request: HttpRequest, run: ResponseRun, submit: Callable[[], Awaitable[None]], *, stream: bool
    ) -> None:
        writer = http_request.stream(1) if stream else None
        if writer is not None:
            run.attach(writer)
        await submit()
        await pipeline.deliver(
            http_request,
            self._service,
            run.response,
            writer,
            body=lambda: msgspec.json.encode(run.response_object),
            end=lambda error: b"",  # the run itself writes the last event, whatever it is
        )

    async def _answer_later(
        self,
        http_request: HttpRequest,
        run: ResponseRun,
        submit: Callable[[], Awaitable[None]],
        record: ResponseRecord,
        *,
        stream: bool,
    ) -> None:
        """Begins a response that goes on without its client."""
        writer = http_request.stream(1) if stream else None
        record.run = run
        self.store.add(record)
        run.builder.queue()
        body = msgspec.json.encode(run.response_object)
        try:
            await submit()
        except BaseException:
            self.store.remove(record)  # the queue had no room
            raise
        task = asyncio.create_task(self._settle(run, record), name="openinfer-background-response")
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        if writer is None:
            await http_request.send(200, body)
        else:
            await self._follow(http_request, run, writer, after=-1)

    async def _settle(self, run: ResponseRun, record: ResponseRecord) -> None:
        await asyncio.wait((run.ended,))
        if run.events is None:
            record.run = None
        self.store.weigh(record)

    async def _follow(self, http_request: HttpRequest, run: ResponseRun, writer: StreamWriter, *, after: int) -> None:
        """Sends the events of a background response, past and to come."""
        run.attach(writer, after=after)
        http_request.status = 200
        try:
            await await_end(http_request, run.ended, writer)
        finally:
            run.detach(writer)
            self._service.metrics.slow_clients.value += writer.was_slow

    async def retrieve(self, http_request: HttpRequest) -> None:
        """A response that is kept, or the events of a background one."""
        query = http_request.read_query(RetrieveQuery)
        check_rules(query)
        record = self._find(http_request)
        if not query.stream:
            if query.starting_after is not None:
                raise invalid("starting_after", "starting_after is only for stream=true")
            await http_request.send(200, msgspec.json.encode(record.response))
            return
        if record.run is None:
            message = "only a response made with background=true and stream=true has its events kept"
            raise invalid("stream", message)
        after = -1 if query.starting_after is None else query.starting_after
        if after < -1:
            raise invalid("starting_after", "starting_after is the number of an event")
        await self._follow(http_request, record.run, http_request.stream(1), after=after)

    async def delete(self, http_request: HttpRequest) -> None:
        """Forgets a response; one in the making is cancelled."""
        record = self._find(http_request)
        if record.run is not None:
            record.run.cancel()
        self.store.remove(record)
        await http_request.send(200, msgspec.json.encode(DeletedResponse(id=record.response.id)))

    async def cancel(self, http_request: HttpRequest) -> None:
        """Ends a background response before its time."""
        record = self._find(http_request)
        if not record.response.background:
            raise invalid("response_id", "only a response made with background=true can be cancelled")
        if record.run is not None:
            record.run.cancel()
        await http_request.send(200, msgspec.json.encode(record.response))

    async def input_items(self, http_request: HttpRequest) -> None:
        """What a response's prompt was made of."""
        query = http_request.read_query(ItemsQuery)
        items = list(self._find(http_request).items)
        page, has_more = _page(items if query.order == "asc" else items[::-1], query)
        ends = (page[0].id, page[-1].id) if page else (None, None)
        body = ItemList(data=[*page], has_more=has_more, first_id=ends[0], last_id=ends[1])
        await http_request.send(200, msgspec.json.encode(body))

    async def input_tokens(self, http_request: HttpRequest) -> None:
        request = await http_request.read_json(_count_decoder)
        check_rules(request)
        if request.previous_response_id is not None:
            http_request.give_back()
        await self._service.find_model(request.model, http_request.owner)
        items = await conversation_items(request, self._previous(http_request, request))
        note_dropped_tools(self._service, http_request, request.tools)
        offered = read_tools(request.tools)
        available = await http_request.aside(lambda: conversation_tools(self._service, request, offered))
        prompt = await conversation_prompt(http_request, self._service, request, items, available)
        await http_request.send(200, msgspec.json.encode(InputTokens(input_tokens=len(prompt.token_ids))))

    async def compact(self, http_request: HttpRequest) -> None:
        """Refuses: nothing of a conversation is summarised."""
        del http_request
        message = "compact is not supported: nothing of a conversation is summarised; send what is to be kept as input"
        raise ApiError(400, message, code="unsupported_parameter")

    def _find(self, http_request: HttpRequest) -> ResponseRecord:
        return self.store.find(http_request.parameters["response_id"], http_request.tenant)


def _page(items: Sequence[InputItem], query: ItemsQuery) -> tuple[Sequence[InputItem], bool]:
    limit = DEFAULT_ITEMS if query.limit is None else query.limit
    if not 1 <= limit <= MAX_ITEMS:
        raise invalid("limit", f"limit is {limit}; it must be between 1 and {MAX_ITEMS}")
    begin = 0
    if query.after is not None:
        begin = next((place + 1 for place, item in enumerate(items) if item.id == query.after), -1)
        if begin < 0:
            raise invalid("after", "after names no item of this response")
    rest = items[begin:]
    return rest[:limit], len(rest) > limit

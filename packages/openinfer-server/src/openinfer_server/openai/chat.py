"""`POST /v1/chat/completions`."""

from collections.abc import Sequence

import msgspec

from openinfer_server.chat.prompt import chat_prompt, prompt_end
from openinfer_server.chat.variables import chat_variables
from openinfer_server.http.api_errors import invalid, refused, renamed
from openinfer_server.http.request import HttpRequest
from openinfer_server.limits.conversation import check_num_entries
from openinfer_server.openai.chat_sinks import ChatMessageSink, ChatStreamSink
from openinfer_server.openai.event_frames import ResponseHead, chat_delta_frame, chat_frame
from openinfer_server.openai.generation import Generation, ResponseShape, rendered_prompt
from openinfer_server.openai.objects import ChatChoice, ChatCompletion, Usage
from openinfer_server.openai.prediction import predicted, prediction_ids
from openinfer_server.openai.types import ChatRequest, check_turns, field_names
from openinfer_server.output.delta_choice import DeltaChoice
from openinfer_server.output.logprobs import chat_format, prompt_format
from openinfer_server.output.parsing import OutputParsers
from openinfer_server.output.response import told_transfer
from openinfer_server.request.fields import check_rules
from openinfer_server.request.plan import (
    Plan,
    Prompt,
    Scoring,
    check_num_choices,
    check_stream_options,
    make_plan,
    num_kept_tokens,
    plan_bytes,
    prompt_alternatives,
)
from openinfer_server.request.structured import chat_grammar, constrained, output_constraint
from openinfer_server.service import Service
from openinfer_server.tools.available import AvailableTools, chat_tools
from openinfer_server.tools.dropped import note_dropped_tools

_decoder = msgspec.json.Decoder(ChatRequest)


class ChatCompletions:
    """The route's handler."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._logprobs = chat_format(service.tokenizer)
        self._prompt_logprobs = prompt_format(service.tokenizer)
        self._shape = ResponseShape(
            id_prefix="chatcmpl",
            event_object="chat.completion.chunk",
            frame=chat_frame,
            stream_sink=lambda head, index, events: ChatStreamSink(
                chat_delta_frame(head, index),
                events,
                self._logprobs,
                tells_token_ids=head.tells_token_ids,
                may_call=head.may_call,
            ),
            whole_sink=ChatMessageSink,
            body=self._body,
        )

    async def render(self, http_request: HttpRequest) -> None:
        """The token ids of the prompt, as the engine would get them; nothing is generated."""
        service = self._service
        request = await http_request.read_json(_decoder, _check)
        model = await service.find_model(request.model, http_request.owner)
        note_dropped_tools(service, http_request, request.tools)
        _, parsers = await self._prepared(http_request, request)
        body = rendered_prompt(self._shape.id_prefix, model, parsers.prompt)
        await http_request.send(200, msgspec.json.encode(body))

    async def __call__(self, http_request: HttpRequest) -> None:
        await (await self._generation(http_request)).deliver(http_request)

    async def _generation(self, http_request: HttpRequest) -> Generation:
        """What is asked. Of the request the tools' schemas alone outlive it, if a parser reads by them."""
        service = self._service
        service.check_serving(http_request.owner)
        request = await http_request.read_json(_decoder, _check)
        if request.logprobs and request.include_reasoning is False and service.parsers.reasoning is not None:
            raise refused("include_reasoning", "log-probabilities show every token, those of the reasoning too")
        model = await service.find_model(request.model, http_request.owner)
        usage = check_stream_options(request)
        check_num_choices(request, 1, service.options)
        note_dropped_tools(service, http_request, request.tools)
        available, parsers = await self._prepared(http_request, request)
        expected = await prediction_ids(http_request, service, request.prediction)

        def planned() -> Plan:
            grammar = chat_grammar(service, parsers.prompt, available, output_constraint(request))
            alternatives = (request.top_logprobs or 0) if request.logprobs else None
            with renamed(field_names(request)):
                plan = make_plan(
                    service,
                    request,
                    [parsers.prompt],
                    tenant=http_request.tenant,
                    owner=http_request.owner,
                    max_tokens=_max_tokens(request),
                    transfer=request.kv_transfer_params,
                    scoring=Scoring(output=alternatives, prompt=prompt_alternatives(request)),
                )
            return predicted(constrained(plan, grammar), expected)

        plan = await http_request.aside(planned, num_bytes=plan_bytes([parsers.prompt], request.n or 1))
        return Generation(
            service=service,
            shape=self._shape,
            plan=plan,
            model=model,
            stream=bool(request.stream),
            usage=usage,
            tells_token_ids=bool(request.return_token_ids),
            parsers=None if parsers.is_plain else parsers,
            hides_reasoning=request.include_reasoning is False,
        )

    async def _prepared(self, http_request: HttpRequest, request: ChatRequest) -> tuple[AvailableTools, OutputParsers]:
        """What a request offers the model, and its prompt with what reads the answer."""
        service = self._service

        def offered() -> AvailableTools:
            return chat_tools(service, request.tools, request.tool_choice, parallel=request.parallel_tool_calls)

        available = await http_request.aside(offered) if request.tools else offered()
        prompt = await self._prompt(http_request, request, available)
        parsers = OutputParsers.make(service, prompt, available, budget_tokens=request.thinking_token_budget)
        return available, parsers

    async def _prompt(self, http_request: HttpRequest, request: ChatRequest, available: AvailableTools) -> Prompt:
        variables = chat_variables(
            self._service,
            kwargs=request.chat_template_kwargs,
            effort=request.reasoning_effort,
            documents=request.documents,
        )
        end = prompt_end(
            request.messages,
            continue_final_message=request.continue_final_message,
            add_generation_prompt=request.add_generation_prompt,
        )
        with renamed(field_names(request)):
            num_kept = num_kept_tokens(request, self._service.info, max_tokens=_max_tokens(request))
        variables = {**variables, **available.variables}
        return await chat_prompt(
            http_request,
            self._service,
            request.messages,
            variables,
            end=end,
            num_kept=num_kept,
            cache_salt=request.cache_salt,
        )

    def _body(
        self,
        asked: Generation,
        head: ResponseHead,
        choices: Sequence[DeltaChoice],
        sinks: Sequence[ChatMessageSink],
        usage: Usage,
    ) -> ChatCompletion:
        answers = [
            ChatChoice(
                index=choice.index,
                message=sink.message,
                logprobs=self._logprobs(sink.scores) if sink.scores else None,
                finish_reason=sink.finish_reason,
                stop_reason=choice.stop_reason,
                token_ids=sink.token_ids if asked.tells_token_ids else msgspec.UNSET,
            )
            for choice, sink in zip(choices, sinks, strict=True)
        ]
        prompt_ids, alternatives = asked.plan.prompts[0].token_ids, asked.plan.scoring.prompt
        return ChatCompletion(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=answers,
            usage=usage,
            prompt_logprobs=msgspec.UNSET
            if alternatives is None
            else self._prompt_logprobs(prompt_ids, choices[0].prompt_logprobs, alternatives),
            prompt_token_ids=prompt_ids if asked.tells_token_ids else msgspec.UNSET,
            kv_transfer_params=told_transfer(choices),
        )


def _max_tokens(request: ChatRequest) -> int | None:
    # `max_completion_tokens` is the newer name and wins
    return request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens


def _check(request: ChatRequest) -> None:
    check_rules(request)
    check_num_entries(request.messages, "messages")
    if not request.messages:
        raise invalid("messages", "messages is empty")
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs=true")
    check_turns(request.messages, "messages")

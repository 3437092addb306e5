"""`POST /v1/completions`."""

from collections.abc import Sequence
from typing import cast

import msgspec

from openinfer_core.engine import EngineInfo
from openinfer_server.http.api_errors import invalid, refused, renamed
from openinfer_server.http.request import HttpRequest
from openinfer_server.openai.completion_sinks import TextSink, TextStreamSink
from openinfer_server.openai.event_frames import ResponseHead, completion_frame
from openinfer_server.openai.generation import Generation, ResponseShape, rendered_prompt
from openinfer_server.openai.objects import Completion, CompletionChoice, Usage
from openinfer_server.openai.types import CompletionRequest, field_names
from openinfer_server.output.delta_choice import DeltaChoice
from openinfer_server.output.logprobs import legacy_format, prompt_format
from openinfer_server.output.response import told_transfer
from openinfer_server.request.fields import check_rules
from openinfer_server.request.plan import (
    DEFAULT_COMPLETION_TOKENS,
    ID_BYTES,
    Plan,
    Prompt,
    Scoring,
    check_num_choices,
    check_prompt_token_ids,
    check_stream_options,
    make_plan,
    num_kept_tokens,
    plan_bytes,
    prompt_alternatives,
    too_long,
)
from openinfer_server.request.structured import constrained, output_constraint, text_grammar
from openinfer_server.service import Service

_SLICE_ENTRIES = 2**14

_decoder = msgspec.json.Decoder(CompletionRequest)


class Completions:
    """The route's handler."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._logprobs = legacy_format(service.tokenizer)
        self._prompt_logprobs = prompt_format(service.tokenizer)
        self._shape = ResponseShape(
            id_prefix="cmpl",
            event_object="text_completion",
            frame=completion_frame,
            stream_sink=lambda head, index, events: TextStreamSink(
                completion_frame(head, index), events, self._logprobs, tells_token_ids=head.tells_token_ids
            ),
            whole_sink=TextSink,
            body=self._body,
        )

    async def render(self, http_request: HttpRequest) -> None:
        """The token ids of each prompt, as the engine would get them; nothing is generated."""
        request = await http_request.read_json(_decoder)
        check_rules(request)
        model = await self._service.find_model(request.model, http_request.owner)
        prompts = await self._prompts(http_request, request)
        rendered = [rendered_prompt(self._shape.id_prefix, model, prompt) for prompt in prompts]
        await http_request.send(200, msgspec.json.encode(rendered))

    async def __call__(self, http_request: HttpRequest) -> None:
        await (await self._generation(http_request)).deliver(http_request)

    async def _generation(self, http_request: HttpRequest) -> Generation:
        """What is asked. Nothing of the request outlives it: what a large body was decoded to is freed here."""
        service = self._service
        service.check_serving(http_request.owner)
        request = await http_request.read_json(_decoder)
        check_rules(request)
        if request.best_of not in (None, request.n or 1):
            raise refused("best_of", "ask for n choices and choose yourself")
        model = await service.find_model(request.model, http_request.owner)
        usage = check_stream_options(request)
        prompts = await self._prompts(http_request, request)

        def planned() -> Plan:
            with renamed(field_names(request)):
                plan = make_plan(
                    service,
                    request,
                    prompts,
                    tenant=http_request.tenant,
                    owner=http_request.owner,
                    max_tokens=_max_tokens(request),
                    default_tokens=DEFAULT_COMPLETION_TOKENS,
                    transfer=request.kv_transfer_params,
                    scoring=Scoring(
                        output=request.logprobs,
                        echo=request.logprobs if request.echo else None,
                        prompt=prompt_alternatives(request),
                    ),
                )
            return constrained(plan, text_grammar(output_constraint(request)))

        plan = await http_request.aside(planned, num_bytes=plan_bytes(prompts, request.n or 1))
        return Generation(
            service=service,
            shape=self._shape,
            plan=plan,
            model=model,
            stream=bool(request.stream),
            usage=usage,
            echo=bool(request.echo),
            tells_token_ids=bool(request.return_token_ids),
        )

    async def _prompts(self, http_request: HttpRequest, request: CompletionRequest) -> list[Prompt]:
        """A prompt is text or a list of token ids; several are a list of either."""
        given = request.prompt
        if given is None:
            raise invalid("prompt", "prompt is required")
        check_num_choices(request, 1, self._service.options)
        if isinstance(given, str):
            return [await self._text_prompt(http_request, given, request)]
        kinds = await http_request.aside(lambda: _kinds(given))
        if len(kinds) != 1:
            raise invalid("prompt", "prompt must be text, token ids, or a list of several of one of the two")
        if kinds == {int}:
            return [await http_request.aside(lambda: self._id_prompt(cast("list[int]", given), request))]
        if len(given) > self._service.options.max_choices:
            raise invalid("prompt", f"{len(given)} prompts exceed {self._service.options.max_choices} choices")
        check_num_choices(request, len(given), self._service.options)
        if kinds == {str}:
            return [await self._text_prompt(http_request, text, request) for text in cast("list[str]", given)]
        several = cast("list[list[int]]", given)
        return await http_request.aside(lambda: [self._id_prompt(token_ids, request) for token_ids in several])

    async def _text_prompt(self, http_request: HttpRequest, text: str, request: CompletionRequest) -> Prompt:
        tokenizer, info = self._service.tokenizer, self._service.info
        num_kept = _num_kept(request, info)
        least = tokenizer.least_tokens(text)
        if num_kept is None and least > info.max_model_tokens:
            raise too_long(f"at least {least}", info, "prompt")
        token_ids = await tokenizer.encode(text, add_special_tokens=True, client=http_request)

        def prompt() -> Prompt:
            check_prompt_token_ids(token_ids, info, "prompt")
            if num_kept is not None and len(token_ids) > num_kept:
                return self._id_prompt(token_ids, request)
            return Prompt(tuple(token_ids), text, "prompt")

        return await http_request.aside(prompt, num_bytes=ID_BYTES * len(token_ids))

    def _id_prompt(self, token_ids: list[int], request: CompletionRequest) -> Prompt:
        info = self._service.info
        check_prompt_token_ids(token_ids, info, "prompt")
        kept = token_ids[-(_num_kept(request, info) or 0) :]
        if len(kept) > info.max_model_tokens:
            raise too_long(str(len(kept)), info, "prompt")
        text = self._service.tokenizer.decode_prompt(kept) if request.echo else ""
        return Prompt(tuple(kept), text, "prompt")

    def _body(
        self,
        asked: Generation,
        head: ResponseHead,
        choices: Sequence[DeltaChoice],
        sinks: Sequence[TextSink],
        usage: Usage,
    ) -> Completion:
        completions = [self._choice(asked, choice, sink) for choice, sink in zip(choices, sinks, strict=True)]
        return Completion(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=completions,
            usage=usage,
            kv_transfer_params=told_transfer(choices),
        )

    def _choice(self, asked: Generation, choice: DeltaChoice, sink: TextSink) -> CompletionChoice:
        prompt_ids, alternatives = asked.plan.prompt_of(choice.index).token_ids, asked.plan.scoring.prompt
        return CompletionChoice(
            index=choice.index,
            text=sink.text,
            logprobs=self._logprobs(sink.scores) if sink.scores else None,
            finish_reason=str(choice.finish_reason),
            stop_reason=choice.stop_reason,
            prompt_logprobs=msgspec.UNSET
            if alternatives is None
            else self._prompt_logprobs(prompt_ids, choice.prompt_logprobs, alternatives),
            prompt_token_ids=prompt_ids if asked.tells_token_ids else msgspec.UNSET,
            token_ids=sink.token_ids if asked.tells_token_ids else msgspec.UNSET,
        )


def _kinds(entries: Sequence[object]) -> set[type]:
    # in slices: one call for a million entries would hold the interpreter for 10 ms
    slices = (entries[begin : begin + _SLICE_ENTRIES] for begin in range(0, len(entries), _SLICE_ENTRIES))
    return set[type]().union(*(set(map(type, some)) for some in slices))


def _num_kept(request: CompletionRequest, info: EngineInfo) -> int | None:
    with renamed(field_names(request)):
        return num_kept_tokens(request, info, max_tokens=_max_tokens(request), default_tokens=DEFAULT_COMPLETION_TOKENS)


def _max_tokens(request: CompletionRequest) -> int | None:
    # a chat's name of it, which wins as it does there: proxies send both
    return request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens

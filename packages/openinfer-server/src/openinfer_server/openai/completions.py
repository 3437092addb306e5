"""`POST /v1/completions`."""

from collections.abc import Sequence
from typing import cast

import msgspec

from openinfer_server.http.api_errors import invalid, refused
from openinfer_server.http.request import HttpRequest
from openinfer_server.openai.completion_sinks import TextSink, TextStreamSink
from openinfer_server.openai.event_frames import ResponseHead, completion_frame
from openinfer_server.openai.generation import Generation, ResponseShape
from openinfer_server.openai.objects import Completion, CompletionChoice, Usage
from openinfer_server.openai.types import CompletionRequest
from openinfer_server.output.logprobs import legacy_format
from openinfer_server.output.response import Choice
from openinfer_server.request.fields import check_rules
from openinfer_server.request.plan import (
    DEFAULT_COMPLETION_TOKENS,
    Prompt,
    Scoring,
    check_num_choices,
    check_prompt_token_ids,
    check_stream_options,
    make_plan,
    too_long,
)
from openinfer_server.request.structured import constrained, output_constraint, text_grammar
from openinfer_server.service import Service

_decoder = msgspec.json.Decoder(CompletionRequest)


class Completions:
    """The route's handler."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._logprobs = legacy_format(service.tokenizer)
        self._shape = ResponseShape(
            id_prefix="cmpl",
            event_object="text_completion",
            frame=completion_frame,
            stream_sink=lambda head, index, events: TextStreamSink(
                completion_frame(head, index), events, self._logprobs
            ),
            whole_sink=TextSink,
            body=self._body,
        )

    async def __call__(self, http_request: HttpRequest) -> None:
        service = self._service
        service.check_serving()
        request = await http_request.read_json(_decoder)
        check_rules(request)
        if request.best_of not in (None, request.n or 1):
            raise refused("best_of", "ask for n choices and choose yourself")
        model = service.resolve_model(request.model)
        usage = check_stream_options(request)
        prompts = await self._prompts(request)
        plan = make_plan(
            service,
            request,
            prompts,
            tenant=http_request.tenant,
            max_tokens=request.max_tokens,
            default_tokens=DEFAULT_COMPLETION_TOKENS,
            scoring=Scoring(output=request.logprobs, prompt=request.logprobs if request.echo else None),
        )
        plan = constrained(plan, text_grammar(output_constraint(request)))
        generation = Generation(
            service=service,
            shape=self._shape,
            plan=plan,
            model=model,
            stream=bool(request.stream),
            usage=usage,
            echo=bool(request.echo),
        )
        await generation.deliver(http_request)

    async def _prompts(self, request: CompletionRequest) -> list[Prompt]:
        """A prompt is text or a list of token ids; several are a list of either."""
        given = request.prompt
        if given is None:
            raise invalid("prompt", "prompt is required")
        check_num_choices(request, 1, self._service.options)
        if isinstance(given, str):
            return [await self._text_prompt(given)]
        kinds = set(map(type, given))
        if len(kinds) != 1:
            raise invalid("prompt", "prompt must be text, token ids, or a list of several of one of the two")
        if kinds == {int}:
            return [self._id_prompt(cast("list[int]", given), request)]
        if len(given) > self._service.options.max_choices:
            raise invalid("prompt", f"{len(given)} prompts exceed {self._service.options.max_choices} choices")
        check_num_choices(request, len(given), self._service.options)
        several = cast("list[str | list[int]]", given)
        return [await self._text_prompt(p) if isinstance(p, str) else self._id_prompt(p, request) for p in several]

    async def _text_prompt(self, text: str) -> Prompt:
        tokenizer, info = self._service.tokenizer, self._service.info
        least = tokenizer.least_tokens(text)
        if least > info.max_model_tokens:
            raise too_long(f"at least {least}", info, "prompt")
        token_ids = await tokenizer.encode(text, add_special_tokens=True)
        check_prompt_token_ids(token_ids, info, "prompt")
        return Prompt(tuple(token_ids), text, "prompt")

    def _id_prompt(self, token_ids: list[int], request: CompletionRequest) -> Prompt:
        info = self._service.info
        check_prompt_token_ids(token_ids, info, "prompt")
        if len(token_ids) > info.max_model_tokens:
            raise too_long(str(len(token_ids)), info, "prompt")
        text = self._service.tokenizer.decode_prompt(token_ids) if request.echo else ""
        return Prompt(tuple(token_ids), text, "prompt")

    def _body(
        self, head: ResponseHead, choices: Sequence[Choice], sinks: Sequence[TextSink], usage: Usage
    ) -> Completion:
        completions = [
            CompletionChoice(
                choice.index,
                sink.text,
                self._logprobs(sink.scores) if sink.scores else None,
                str(choice.finish_reason),
            )
            for choice, sink in zip(choices, sinks, strict=True)
        ]
        return Completion(id=head.id, created=head.created, model=head.model, choices=completions, usage=usage)

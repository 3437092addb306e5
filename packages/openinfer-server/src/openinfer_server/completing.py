"""`complete`: a prompt continued and awaited, for endpoints of other packages."""

from dataclasses import dataclass

from openinfer_server.http.api_errors import invalid
from openinfer_server.http.request import HttpRequest
from openinfer_server.openai.completion_sinks import TextSink
from openinfer_server.output.delivery import await_whole
from openinfer_server.output.pipeline import submit
from openinfer_server.output.response import Response
from openinfer_server.request.generation_fields import GenerationFields
from openinfer_server.request.plan import (
    DEFAULT_COMPLETION_TOKENS,
    Prompt,
    Scoring,
    check_prompt_token_ids,
    make_plan,
    too_long,
)
from openinfer_server.request.structured import constrained, output_constraint, text_grammar
from openinfer_server.service import Service


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


async def complete(http_request: HttpRequest, service: Service, prompt: str, fields: GenerationFields) -> Completed:
    """Continues a prompt with one text; aborted when the client leaves.

    The request's body must have been read. Fields mean what they do in `/v1/completions`; `n` must be absent or 1.

    Raises:
        ApiError: a value is out of range, the prompt is too long, the queue is full, or the engine failed.
        ClientDisconnected: the client has left.
    """
    service.check_serving()
    if fields.n not in (None, 1):
        raise invalid("n", "one prompt is continued with one text here")
    plan = make_plan(
        service,
        fields,
        [await _encoded(service, prompt)],
        tenant=http_request.tenant,
        max_tokens=fields.max_tokens,
        default_tokens=DEFAULT_COMPLETION_TOKENS,
        scoring=Scoring(),
    )
    plan = constrained(plan, text_grammar(output_constraint(fields)))
    response, sink = Response(service.link), TextSink()
    submit(service, response, plan, [sink])
    await await_whole(http_request, response)
    (choice,) = response.choices
    return Completed(sink.text, str(choice.finish_reason), choice.prompt_tokens, choice.completion_tokens)


async def _encoded(service: Service, prompt: str) -> Prompt:
    info, least = service.info, service.tokenizer.least_tokens(prompt)
    if least > info.max_model_tokens:
        raise too_long(f"at least {least}", info, "prompt")
    token_ids = await service.tokenizer.encode(prompt, add_special_tokens=True)
    check_prompt_token_ids(token_ids, info, "prompt")
    return Prompt(tuple(token_ids), prompt, "prompt")

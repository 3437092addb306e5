"""From a checked plan to a delivered response: what all generating APIs have in common.

    plan ─► DeltaChoice per request ─► the API's Sink ─► events of a stream, or one body

An API brings its sinks and what ends its streams; making text of tokens, submitting and delivering are here.
"""

from collections.abc import Callable, Sequence

from openinfer_server.http.request import JSON, HttpRequest
from openinfer_server.http.writers import StreamWriter
from openinfer_server.limits.loop_turns import Slices
from openinfer_server.output.delivery import StreamEnd, send_stream, send_whole
from openinfer_server.output.delta_choice import DeltaChoice, ParsingOptions, Sink
from openinfer_server.output.parsing import OutputParsers
from openinfer_server.output.response import Response
from openinfer_server.output.text_choices import TextOptions
from openinfer_server.parsers.output import OutputParser
from openinfer_server.request.plan import Plan
from openinfer_server.service import Service


async def submit(
    service: Service,
    response: Response,
    plan: Plan,
    sinks: Sequence[Sink],
    *,
    parsers: OutputParsers | None = None,
    echo: bool = False,
    tells_token_ids: bool = False,
) -> None:
    """Hands every request of a plan to the engine; what comes of each goes to its sink.

    Raises:
        ApiError: 429 or 503; the queue has no room for it.
        ParserFault: a parser cannot be made.
    """
    options = TextOptions(
        tokenizer=service.tokenizer,
        stops=plan.stops,
        min_tokens=plan.min_tokens,
        echo=echo,
        echo_alternatives=plan.scoring.echo,
        shows_stop=plan.shows_stop,
        tells_token_ids=tells_token_ids,
        visible_tokens=frozenset() if parsers is None else service.parsers.visible_tokens,
        begin_tokens={} if parsers is None else parsers.begin_tokens,
    )
    choices: list[DeltaChoice] = []
    slices = Slices(service.link.turns)
    for index, (request, sink) in enumerate(zip(plan.requests, sinks, strict=True)):
        await slices.before(num_tokens=0)
        parsing = (
            ParsingOptions(parser=OutputParser(), request=request, max_model_tokens=service.info.max_model_tokens)
            if parsers is None
            else parsers.parsing(request)
        )
        prompt = plan.prompt_of(index)
        choices.append(DeltaChoice(response, index, prompt=prompt, options=options, parsing=parsing, sink=sink))
    await response.submit(choices, plan.requests)


async def deliver(
    http_request: HttpRequest,
    service: Service,
    response: Response,
    writer: StreamWriter | None,
    *,
    body: Callable[[], bytes],
    end: StreamEnd,
    content_type: bytes = JSON,
) -> None:
    """Sends a submitted response: as a stream where there is a writer, else in one body of this type."""
    if writer is None:
        await send_whole(http_request, response, body, content_type=content_type)
        return
    try:
        await send_stream(http_request, response, writer, end)
    finally:
        service.metrics.slow_clients.value += writer.was_slow

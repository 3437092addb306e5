"""One answer that is read by parsers: how the APIs of items and blocks ask the engine."""

from openinfer_server.output.delta_choice import DeltaChoice, DeltaSink
from openinfer_server.output.reader import Reader
from openinfer_server.output.response import Answer
from openinfer_server.output.text_choices import TextOptions
from openinfer_server.request.plan import Plan
from openinfer_server.service import Service


def submit_read(service: Service, answer: Answer, plan: Plan, reader: Reader, sink: DeltaSink) -> None:
    """Hands the one request of a plan to the engine; what comes of it goes to the sink.

    Raises:
        ParserFault: a parser cannot be made.
    """
    (request,) = plan.requests
    text = TextOptions(
        tokenizer=service.tokenizer,
        stops=plan.stops,
        min_tokens=plan.min_tokens,
        echo=False,
        visible_tokens=service.parsers.visible_tokens,
    )
    choice = DeltaChoice(answer, 0, prompt=plan.prompt_of(0), options=text, reading=reader.reading(request), sink=sink)
    answer.submit([choice], [request])

"""`WithoutReasoning`: answers whose reasoning is not shown; their tokens count all the same."""

from collections.abc import Sequence

from openinfer_core.events import FinishReason
from openinfer_server.output.delta_choice import DeltaChoice, Sink
from openinfer_server.output.logprobs import ScoredToken
from openinfer_server.parsers.deltas import Delta, ReasoningDelta


class WithoutReasoning(Sink):
    """Hands on to another sink what is no reasoning."""

    __slots__ = ("_sink",)

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def begin(self, choice: DeltaChoice) -> None:
        self._sink.begin(choice)

    def take_token_id(self, token_id: int) -> None:
        self._sink.take_token_id(token_id)

    def take_prompt(self, text: str, scores: Sequence[ScoredToken]) -> None:
        self._sink.take_prompt(text, scores)

    def take(self, deltas: Sequence[Delta], scores: Sequence[ScoredToken]) -> None:
        self._sink.take([delta for delta in deltas if not isinstance(delta, ReasoningDelta)], scores)

    def conclude(self, choice: DeltaChoice, reason: FinishReason) -> None:
        self._sink.conclude(choice, reason)

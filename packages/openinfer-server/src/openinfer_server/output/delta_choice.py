"""`DeltaChoice`: a choice whose text is read by parsers, for every API that tells reasoning, answer and calls apart.

    token ─► detokenizer ─► stop scanner ─► OutputParser ─► Sink

    Scheduled ─► sink.begin      each token ─► sink.take(deltas, scores)      the end ─► sink.take, sink.conclude

When the reasoning has used up its budget, the engine's request is replaced: what was generated so far and the text
that closes the reasoning become part of the prompt (the prefix cache has nearly all of it), and the answer goes on from
there. To the sink it is one answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from openinfer_core.events import Finished, FinishReason, Scheduled
from openinfer_core.request import GenerateRequest
from openinfer_core.sampling import Grammar
from openinfer_server.output.logprobs import ScoredToken
from openinfer_server.output.response import Response
from openinfer_server.output.text_choices import TextChoice, TextOptions
from openinfer_server.parsers.deltas import CallArguments, CallEnd, CallStart, ContentDelta, Delta, ReasoningDelta
from openinfer_server.parsers.output import OutputParser
from openinfer_server.request.plan import Prompt

_TEXTS = frozenset((ContentDelta, ReasoningDelta, CallArguments))  # deltas that neither begin nor end a call


class Sink:
    """Where the output of one choice goes: an API's events, or what it keeps for one body."""

    __slots__ = ()

    def begin(self, choice: "DeltaChoice") -> None:
        """The engine works on it."""

    def take_token_id(self, token_id: int) -> None:
        """Takes the token that the next deltas come of; told only where `TextOptions.tells_token_ids`."""
        raise NotImplementedError

    def take_prompt(self, text: str, scores: Sequence[ScoredToken]) -> None:
        """Takes the echoed prompt, which may be large; only APIs with `echo` get it."""
        raise NotImplementedError

    def take(self, deltas: Sequence[Delta], scores: Sequence[ScoredToken]) -> None:
        """Takes what came of one token, which may be nothing, or of text that no token brought."""
        raise NotImplementedError

    def conclude(self, choice: "DeltaChoice", reason: FinishReason) -> None:
        """The choice has ended well; its counts are known."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsingOptions:
    """How one answer is read."""

    parser: OutputParser
    request: GenerateRequest  # what the engine is asked
    parallel_calls: bool = True  # whether there may be more than one call; otherwise the answer ends with the first
    reasoning_budget_tokens: int | None = None  # tokens of reasoning after which it is closed
    max_model_tokens: int  # the engine's context


class DeltaChoice(TextChoice):
    """Feeds a parser and hands on what it says.

    Attributes:
        called: whether a call has begun.
        sink: where its deltas go.
    """

    __slots__ = (
        "_budget_tokens",
        "_call_ended",
        "_num_before",
        "_num_read",
        "_options",
        "_out_of_budget",
        "_parser",
        "_parsing",
        "called",
        "sink",
    )

    def __init__(
        self,
        response: Response,
        index: int,
        *,
        prompt: Prompt,
        options: TextOptions,
        parsing: ParsingOptions,
        sink: Sink,
    ) -> None:
        super().__init__(response, index, prompt=prompt, options=options)
        self.called = False
        self._budget_tokens = parsing.reasoning_budget_tokens
        self._call_ended = False
        self._num_before: int | None = None  # tokens that were generated before the engine's request was replaced
        self._num_read: int | None = None  # tokens that the parser was fed, when the engine has said all
        self._options = options
        self._out_of_budget = False
        self._parser = parsing.parser
        self._parsing = parsing
        self._generated_ids = None if parsing.reasoning_budget_tokens is None else []
        self.sink = sink

    def scheduled(self, event: Scheduled) -> None:
        # after a replacement, what the engine found cached are tokens of this very answer: no news to the client
        if self._num_before is None:
            super().scheduled(event)
            self.sink.begin(self)

    def show_token_id(self, token_id: int) -> None:
        self.sink.take_token_id(token_id)

    def show_prompt(self, text: str, scores: Sequence[ScoredToken]) -> None:
        self.sink.take_prompt(text, scores)

    def show(self, text: str, scores: Sequence[ScoredToken]) -> None:
        if self._parser.is_plain:  # also where the text is held back: its token has an event
            self.sink.take((ContentDelta(text),), scores)
            return
        deltas = self._parser.feed(text, self._begun)
        if self._begun:
            self._begun = []
        if self._parser.reasoning:
            self.reasoning_tokens = self.completion_tokens
            if self._budget_tokens is not None and self.completion_tokens >= self._budget_tokens:
                self.is_complete = self._out_of_budget = True
        if len(deltas) > 1 or (deltas and type(deltas[0]) not in _TEXTS):
            deltas = self._with_calls_noted(deltas)
        self.sink.take(deltas, scores)

    def complete(self) -> None:
        if self._out_of_budget and self.stop_string is None:
            self.is_complete = self._out_of_budget = False
            self._close_reasoning()
        else:
            super().complete()

    def finished(self, event: Finished) -> None:
        self._num_read = self.completion_tokens
        # the engine's counts are of its last request alone, and the answer may have had two
        if self._num_before is not None:
            completion_tokens = self._num_before + event.completion_tokens
            event = msgspec.structs.replace(
                event, completion_tokens=completion_tokens, cached_tokens=self.cached_tokens
            )
        super().finished(event)

    def conclude(self, reason: FinishReason) -> None:
        if not self._call_ended:
            rest = self._with_calls_noted(self._parser.finish())
            if rest and type(rest[-1]) is ReasoningDelta:  # what might have become a call
                self.reasoning_tokens = self.completion_tokens if self._num_read is None else self._num_read
            if rest:
                self.sink.take(rest, ())
        self.sink.conclude(self, reason)
        super().conclude(reason)

    def _with_calls_noted(self, deltas: list[Delta]) -> list[Delta]:
        """The deltas up to where the answer ends if there may be one call only."""
        for place, delta in enumerate(deltas):
            if isinstance(delta, CallStart):
                self.called = True
            elif isinstance(delta, CallEnd) and not self._parsing.parallel_calls:
                self.is_complete = self._call_ended = True
                return deltas[: place + 1]
        return deltas

    def _close_reasoning(self) -> None:
        self._num_before, self._budget_tokens = self.completion_tokens, None
        closing = self._parser.closing_text
        rest = self.take_held()
        self.sink.take(self._with_calls_noted(self._parser.feed(rest + closing)), ())
        closing_ids = self._options.tokenizer.encode_short(closing)
        said = (
            *self._parsing.request.prompt_token_ids,
            *(self._generated_ids or ())[: self.completion_tokens],
            *closing_ids,
        )
        self._generated_ids = None
        request = self._continuation(said)
        if request is None:
            self.end_early(FinishReason.LENGTH)
        else:
            self.continue_after(said, visible=self._options.visible_tokens)
            self.response.link.replace(self, request)

    def _continuation(self, token_ids: tuple[int, ...]) -> GenerateRequest | None:
        """What the engine is asked instead; None if there is no room for a single token."""
        request, sampling = self._parsing.request, self._parsing.request.sampling
        max_tokens = min(sampling.max_tokens - self.completion_tokens, self._parsing.max_model_tokens - len(token_ids))
        if max_tokens < 1:
            return None
        min_tokens = max(0, min(sampling.min_tokens - self.completion_tokens, max_tokens))
        return msgspec.structs.replace(
            request,
            request_id=self.response.link.new_id(),
            prompt_token_ids=token_ids,
            sampling=msgspec.structs.replace(
                sampling,
                max_tokens=max_tokens,
                min_tokens=min_tokens,
                prompt_logprobs=None,  # they have been told
                grammar=_without_preamble(sampling.grammar),
            ),
        )


def _without_preamble(grammar: Grammar | None) -> Grammar | None:
    return None if grammar is None else msgspec.structs.replace(grammar, preamble=None)

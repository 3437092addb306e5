"""What must hold of every answer, whatever went wrong: no wrong token, and one end, which says whose fault it is."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openinfer_bench.simulate.clients import Answer
from openinfer_bench.simulate.readings import Call, OutOfOrder, Reading, read
from openinfer_bench.simulate.traffic import ARGUMENTS, ATTACKER, CHATS, TOOL, TOOL_CALL, Api, Ask
from openinfer_core.request import GenerateRequest
from openinfer_core.testing import fake_model
from openinfer_core.testing.fake_model import ExpectedOutcome
from openinfer_server import Tokenizer

LONGEST_S = 30.0  # that a request may take, in virtual seconds; the slowest of thousands took 9
# The same of a request of another tenant than the attacker, while nothing but attacks is wrong: the slowest of 14,000
# took 0.75, and one that waits for another's masks, grammars or bodies takes seconds.
VICTIM_S = 2.0
_LATE_BY_S = 0.5  # what the news of a deadline may take, beside a step of a slow GPU
_NOT_ACCEPTED_S = 1.0  # for so long a connection may wait while there are no descriptors
_BUSY, _LATE = {429, 503}, 504


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What happened while a request was open."""

    engine_died: bool
    """So that the server ended, too."""
    is_draining: bool
    """Whether the server was asked to end; then it takes nothing new, and answers what it has taken."""
    is_disturbed: bool
    """Whether a fault that is felt by all struck not long before."""
    makes_room: bool = False
    """Whether its connection may be closed for another: there were no descriptors, or its owner has most."""
    stalled_s: float = 0.0
    """For so long nothing came from the engine."""


class AnswerChecks:
    """Compares answers with what the fake model says.

    Args:
        text_of: the text of token ids, as the server's tokenizer has it.
        max_model_tokens: the engine's.

    Attributes:
        num_tokens: of whole answers so far, compared one by one.
        longest_victim_s: the most that a request took which only attacks could have held up.
    """

    def __init__(self, text_of: "TextOf", *, max_model_tokens: int) -> None:
        self._text_of = text_of
        self._max_model_tokens = max_model_tokens
        self.num_tokens = 0
        self.longest_victim_s = 0.0
        self.submitted: dict[int, dict[int, GenerateRequest]] = {}

    def note(self, request: GenerateRequest) -> None:
        """A request as the engine got it."""
        number = int(request.hints.get("number", "0"))
        requests = self.submitted.setdefault(number, {})
        requests[len(requests)] = request

    def check(self, ask: Ask, answer: Answer, circumstances: Circumstances) -> str:
        """Returns how the request ended, in a word.

        Raises:
            Violation: it may not end so.
        """
        requests = self.submitted.pop(ask.number, {})
        self._check_latency(ask, answer, circumstances)
        if answer.status == 200 and ask.api is Api.TOKENIZE and answer.is_whole:
            return self._check_tokenized(ask, answer)
        if answer.status == 200 and not ask.is_refused:
            try:
                reading = read(ask, answer)
            except OutOfOrder as fault:
                raise self._wrong(ask, answer, str(fault)) from fault
            return self._check_tokens(ask, answer, reading, requests, circumstances)
        ended = self._without_tokens(ask, answer, circumstances)
        if ended is None:
            raise self._wrong(ask, answer, f"status {answer.status}, whole: {answer.is_whole}")
        return ended

    def _check_latency(self, ask: Ask, answer: Answer, circumstances: Circumstances) -> None:
        took_s = answer.ended_s - answer.sent_s
        manners_s = ask.manners.reads_slowly_s + ask.manners.sends_body_for_s
        is_victim = ask.tenant != ATTACKER and not circumstances.is_disturbed
        if took_s > (VICTIM_S + manners_s if is_victim else LONGEST_S):
            raise self._wrong(ask, answer, f"it took {took_s:.1f} s; disturbed: {circumstances.is_disturbed}")
        if is_victim:
            self.longest_victim_s = max(self.longest_victim_s, took_s - manners_s)

    def _without_tokens(self, ask: Ask, answer: Answer, circumstances: Circumstances) -> str | None:
        """How a request ended that was not answered; None if it may not."""
        if ask.is_refused and answer.status == 400 and answer.is_whole:
            return "invalid"
        if answer.status in _BUSY and answer.is_whole and "retry-after" not in answer.headers:
            raise self._wrong(ask, answer, f"status {answer.status} does not say when to try again")
        reasons = {
            "left": answer.has_left,
            "died": circumstances.engine_died and (answer.status in (0, 500, 503) or not answer.is_whole),
            "refused": circumstances.is_draining and answer.status in (0, 503),
            "evicted": circumstances.makes_room and answer.status == 0,
            "busy": answer.status in _BUSY and answer.is_whole,
            "late": answer.status == _LATE and self._is_over(ask, answer),
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def _check_tokenized(self, ask: Ask, answer: Answer) -> str:
        told = json.loads(bytes(answer.body))
        if self._text_of(told["tokens"]) != ask.body["prompt"] or told["count"] != len(told["tokens"]):
            raise self._wrong(ask, answer, f"{told['count']} tokens are not those of the text")
        return "tokenized"

    def _check_tokens(
        self,
        ask: Ask,
        answer: Answer,
        reading: Reading,
        requests: Mapping[int, GenerateRequest],
        circumstances: Circumstances,
    ) -> str:
        expected = [
            fake_model.outcome(request, max_model_tokens=self._max_model_tokens) for request in requests.values()
        ]
        if ask.api not in CHATS:
            asked = ask.body["token_ids" if ask.api is Api.TOKENS else "prompt"]
            if any(list(request.prompt_token_ids) != asked for request in requests.values()):
                raise self._wrong(ask, answer, "the engine got another prompt")
        error = reading.error
        is_cut = answer.has_left or not answer.is_whole or error is not None
        if ask.calls_tool:
            self._check_call(ask, answer, reading, is_whole=not is_cut and expected[0].stop_token_id is not None)
        else:
            self._check_said(ask, answer, reading, expected, is_cut=is_cut)
        if not is_cut:
            self._check_time(ask, answer, circumstances)
            self._check_usage(ask, answer, reading, requests, expected)
            self.num_tokens += sum(len(outcome.token_ids) for outcome in expected)
            return "answered"
        if answer.has_left:
            return "left"
        if circumstances.engine_died:
            return "died"
        if error is not None and "deadline" in error and self._is_over(ask, answer):
            return "late"
        if ask.manners.reads_slowly_s:
            return "slow"
        raise self._wrong(ask, answer, f"it was cut off: {error}")

    def _check_said(
        self, ask: Ask, answer: Answer, reading: Reading, expected: list[ExpectedOutcome], *, is_cut: bool
    ) -> None:
        if reading.calls:
            raise self._wrong(ask, answer, f"it calls {reading.calls}; the model called nothing")
        for index, outcome in enumerate(expected):
            right: Any = [*outcome.token_ids] if ask.api is Api.TOKENS else self._text_of(outcome.token_ids)
            got = reading.said.get(index, right[:0])
            if got != right and not (is_cut and right[: len(got)] == got):
                raise self._wrong(ask, answer, f"choice {index} says {got!r}; the model said {right!r}")

    def _check_call(self, ask: Ask, answer: Answer, reading: Reading, *, is_whole: bool) -> None:
        """One call, as far as it came, and no text, unless so little came that it is no call yet."""
        text = reading.said.get(0, "").strip()
        if text and (is_whole or not TOOL_CALL.startswith(text)):
            raise self._wrong(ask, answer, f"it says {reading.said}; the model called a tool")
        if is_whole:
            got = [Call(call.name, _as_written(call.arguments)) for call in reading.calls]
            is_right = got == [Call(TOOL, ARGUMENTS)]
        else:
            # One that was cut off may have been read as JSON by its API, where it had to be an object.
            got = reading.calls
            is_right = len(got) <= 1 and all(
                call.name == TOOL and (ARGUMENTS.startswith(call.arguments) or not ask.is_stream) for call in got
            )
        if not is_right:
            raise self._wrong(ask, answer, f"it calls {got}; the model called {TOOL} with {ARGUMENTS}")

    @staticmethod
    def _is_over(ask: Ask, answer: Answer) -> bool:
        """Whether a request's deadline has passed: it is not over before."""
        return ask.deadline_s is not None and answer.ended_s - answer.sent_s >= ask.deadline_s

    def _check_time(self, ask: Ask, answer: Answer, circumstances: Circumstances) -> None:
        manners = ask.manners
        slack_s = (
            _LATE_BY_S
            + circumstances.stalled_s
            + _NOT_ACCEPTED_S * circumstances.is_disturbed
            + manners.reads_slowly_s
            + manners.sends_body_for_s
        )
        took_s = answer.ended_s - answer.sent_s
        if ask.deadline_s is not None and took_s > ask.deadline_s + slack_s:
            raise self._wrong(ask, answer, f"it was answered after {took_s:.2f} s; its deadline was {ask.deadline_s} s")

    def _check_usage(
        self,
        ask: Ask,
        answer: Answer,
        reading: Reading,
        requests: Mapping[int, GenerateRequest],
        expected: list[ExpectedOutcome],
    ) -> None:
        if reading.usage is None:
            if ask.is_stream and ask.api is Api.TOKENS:
                return
            raise self._wrong(ask, answer, "it has no usage")
        prompt_tokens = len(requests[0].prompt_token_ids)
        generated = sum(len(outcome.token_ids) + (outcome.stop_token_id is not None) for outcome in expected)
        if reading.usage != (prompt_tokens, generated):
            raise self._wrong(
                ask, answer, f"usage is {reading.usage}; {prompt_tokens} and {generated} tokens were there"
            )
        # The last token of a prompt is computed whatever is cached.
        if reading.cached_tokens is not None and not 0 <= reading.cached_tokens < prompt_tokens:
            raise self._wrong(ask, answer, f"{reading.cached_tokens} of {prompt_tokens} tokens were cached, it says")

    def _wrong(self, ask: Ask, answer: Answer, what: str) -> Violation:
        return Violation(
            f"request {ask.number} to {ask.api}: {what}\n  asked: {ask.body}\n  {ask.manners}\n  answer: "
            f"{answer.status} {bytes(answer.body[-600:])!r}"
        )


class TextOf:
    """The text of token ids, from the bytes of each."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        if tokenizer.table is None:
            raise Violation("the model's tokenizer has no table of bytes")
        self._raw = tokenizer.table.raw

    def __call__(self, token_ids: Sequence[int]) -> str:
        return b"".join(self._raw[token_id] for token_id in token_ids).decode("utf-8", "replace")


def _as_written(arguments: str) -> str:
    """JSON as the model has written it, where an API has read it in between; what is no JSON stays as it is."""
    try:
        return json.dumps(json.loads(arguments))
    except ValueError:
        return arguments

"""What must hold of every answer, whatever went wrong: no wrong token, and one end, which says whose fault it is."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openinfer_bench.simulate.clients import Answer
from openinfer_bench.simulate.traffic import ATTACKER, Api, Ask
from openinfer_core.request import GenerateRequest
from openinfer_core.testing import fake_model

LONGEST_S = 30.0  # that a request may take, in virtual seconds; the slowest of thousands took 9
VICTIM_S = 5.0  # the same of a request of another tenant than the attacker, while nothing but attacks is wrong
_LATE_BY_S = 0.5  # what the news of a deadline may take, beside a step of a slow GPU
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
        if answer.status == 200 and not ask.is_refused:
            return self._check_tokens(ask, answer, requests, circumstances)
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
        reasons = {
            "left": answer.has_left,
            "died": circumstances.engine_died and (answer.status in (0, 500, 503) or not answer.is_whole),
            "refused": circumstances.is_draining and answer.status in (0, 503),
            "busy": answer.status in _BUSY and answer.is_whole,
            "late": answer.status == _LATE and ask.deadline_s is not None,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def _check_tokens(
        self, ask: Ask, answer: Answer, requests: Mapping[int, GenerateRequest], circumstances: Circumstances
    ) -> str:
        expected = [
            fake_model.outcome(request, max_model_tokens=self._max_model_tokens) for request in requests.values()
        ]
        if ask.api is not Api.CHAT:
            asked = ask.body["token_ids" if ask.api is Api.TOKENS else "prompt"]
            if any(list(request.prompt_token_ids) != asked for request in requests.values()):
                raise self._wrong(ask, answer, "the engine got another prompt")
        events = answer.events() if ask.is_stream else _whole(answer)
        said, error = _said(ask, events)
        is_cut = answer.has_left or not answer.is_whole or error is not None
        for index, outcome in enumerate(expected):
            right: Any = [*outcome.token_ids] if ask.api is Api.TOKENS else self._text_of(outcome.token_ids)
            got = said.get(index, right[:0])
            if got != right and not (is_cut and right[: len(got)] == got):
                raise self._wrong(ask, answer, f"choice {index} says {got!r}; the model said {right!r}")
        if not is_cut:
            self._check_time(ask, answer)
            self._check_usage(ask, answer, events, requests, expected)
            self.num_tokens += sum(len(outcome.token_ids) for outcome in expected)
            return "answered"
        if answer.has_left:
            return "left"
        if circumstances.engine_died:
            return "died"
        if ask.deadline_s is not None and error is not None and "deadline" in error:
            return "late"
        if ask.manners.reads_slowly_s:
            return "slow"
        raise self._wrong(ask, answer, f"it was cut off: {error}")

    def _check_time(self, ask: Ask, answer: Answer) -> None:
        manners = ask.manners
        slack_s = _LATE_BY_S + manners.reads_slowly_s + manners.sends_body_for_s
        took_s = answer.ended_s - answer.sent_s
        if ask.deadline_s is not None and took_s > ask.deadline_s + slack_s:
            raise self._wrong(ask, answer, f"it was answered after {took_s:.2f} s; its deadline was {ask.deadline_s} s")

    def _check_usage(
        self,
        ask: Ask,
        answer: Answer,
        events: list[Any],
        requests: Mapping[int, GenerateRequest],
        expected: list[Any],
    ) -> None:
        usages = [event["usage"] for event in events if event.get("usage")]
        if not usages:
            if ask.is_stream and ask.api is Api.TOKENS:
                return
            raise self._wrong(ask, answer, "it has no usage")
        prompt_tokens = len(requests[0].prompt_token_ids)
        generated = sum(len(outcome.token_ids) + (outcome.stop_token_id is not None) for outcome in expected)
        if usages[-1]["prompt_tokens"] != prompt_tokens or usages[-1]["completion_tokens"] != generated:
            raise self._wrong(ask, answer, f"usage is {usages[-1]}; {prompt_tokens} and {generated} tokens were there")

    def _wrong(self, ask: Ask, answer: Answer, what: str) -> Violation:
        return Violation(
            f"request {ask.number} to {ask.api}: {what}\n  asked: {ask.body}\n  {ask.manners}\n  answer: "
            f"{answer.status} {bytes(answer.body[-600:])!r}"
        )


class TextOf:
    """The text of token ids, from the bytes of each."""

    def __init__(self, raw: list[bytes]) -> None:
        self._raw = raw

    def __call__(self, token_ids: tuple[int, ...]) -> str:
        return b"".join(self._raw[token_id] for token_id in token_ids).decode("utf-8", "replace")


def _whole(answer: Answer) -> list[Any]:
    """The body of an answer that is no stream, if all of it came."""
    return [json.loads(bytes(answer.body))] if answer.is_whole else []


def _said(ask: Ask, events: list[Any]) -> tuple[dict[int, Any], str | None]:
    """What each choice says, and the error that ended the answer."""
    said: dict[int, Any] = {}
    for event in events:
        if "error" in event:
            return said, str(event["error"]["message"])
        for choice in event["choices"]:
            part = _part(ask, choice)
            if part is not None:
                said[choice["index"]] = said[choice["index"]] + part if choice["index"] in said else part
    return said, None


def _part(ask: Ask, choice: Any) -> Any:
    if ask.api is Api.TOKENS:
        return choice["token_ids"]
    if ask.api is Api.COMPLETIONS:
        return choice["text"]
    return choice["delta" if ask.is_stream else "message"].get("content")

"""What requests are answered by a step loop, alone, at once or in random traffic."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from openinfer_core import (
    Failed,
    Finished,
    GenerateRequest,
    RequestId,
    SamplingParams,
    Scheduled,
    TokenEvent,
    TokenLogprobs,
    Tokens,
)
from openinfer_core.process.host import EngineLoop

_ABORTED = range(1000, 1004)


@dataclass(slots=True)
class Answer:
    """What one request got. Two are equal whatever was drafted on the way: drafts change no answer."""

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    cached_tokens: int = 0
    finished: Finished | None = None  # as if nothing had been drafted
    drafts: tuple[int, int] = field(default=(0, 0), compare=False)  # accepted and rejected ones

    def take(self, event: TokenEvent) -> None:
        """Adds what an event says.

        Raises:
            AssertionError: the request has failed, or had ended before.
        """
        assert self.finished is None, f"{event} came after the end"
        match event:
            case Scheduled():
                self.cached_tokens = event.cached_tokens
            case Tokens():
                self.token_ids += event.token_ids
                self.logprobs += event.logprobs or ()
                self.prompt_logprobs += event.prompt_logprobs or ()
            case Finished():
                self.finished = msgspec.structs.replace(event, accepted_drafts=0, rejected_drafts=0)
                self.drafts = event.accepted_drafts, event.rejected_drafts
            case Failed():
                raise AssertionError(event)


def run_alone(loop: EngineLoop, requests: Sequence[GenerateRequest]) -> dict[int, Answer]:
    """Each request when the one before has ended."""
    answers: dict[int, Answer] = {}
    for request in requests:
        answers |= run_at_once(loop, [request])
    return answers


def run_at_once(loop: EngineLoop, requests: Sequence[GenerateRequest]) -> dict[int, Answer]:
    """All requests are there before the first step."""
    answers: dict[int, Answer] = {request.request_id: Answer() for request in requests}
    for request in requests:
        _deliver(loop.submit(request), answers)
    while loop.busy:
        _deliver(loop.step(), answers)
    return answers


def run_together(loop: EngineLoop, requests: Sequence[GenerateRequest], *, seed: int) -> dict[int, Answer]:
    """Requests arrive in random order between steps; some further ones come and are aborted somewhere."""
    rng = np.random.default_rng(seed)
    extra = [
        GenerateRequest(
            request_id=RequestId(request_id),
            prompt_token_ids=tuple(rng.integers(0, 100, 60).tolist()),
            sampling=SamplingParams(max_tokens=60, seed=request_id),
        )
        for request_id in _ABORTED
    ]
    coming = [*requests, *extra]
    order: list[int] = rng.permutation(len(coming)).tolist()
    answers: dict[int, Answer] = {request.request_id: Answer() for request in requests}
    to_abort = list(_ABORTED)
    while order or loop.busy:
        events: list[TokenEvent] = []
        for _ in range(rng.integers(0, 4)):
            if order:
                events += loop.submit(coming[order.pop()])
        events += loop.step()
        if to_abort and rng.random() < 0.1:
            events += loop.abort(RequestId(to_abort.pop()))
        _deliver(events, answers)
    return answers


def prompt_differences(answers: Mapping[int, Answer], others: Mapping[int, Answer]) -> NDArray[np.float64]:
    """How far the log-probabilities of all tokens of prompts are from the others', `[tokens]`.

    Raises:
        ValueError: the answers are to other requests, or to others of their tokens.
    """
    if answers.keys() != others.keys():
        raise ValueError(f"answers to requests {sorted(answers)} and {sorted(others)}")
    pairs = [
        (ours.logprob, theirs.logprob)
        for i, answer in answers.items()
        for ours, theirs in zip(answer.prompt_logprobs, others[i].prompt_logprobs, strict=True)
    ]
    return np.abs(np.diff(pairs, axis=1))[:, 0]


def top_differences(ours: TokenLogprobs, theirs: TokenLogprobs) -> list[float]:
    """How far the log-probabilities of those ids are from each other that are among the likeliest of both."""
    found, expected = (dict(zip(each.top_ids, each.top_logprobs, strict=True)) for each in (ours, theirs))
    return [abs(found[token_id] - expected[token_id]) for token_id in found.keys() & expected.keys()]


def _deliver(events: Iterable[TokenEvent], answers: Mapping[int, Answer]) -> None:
    for event in events:
        if event.request_id in answers:
            answers[event.request_id].take(event)

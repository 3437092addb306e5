"""`Transcript`: what was said of one request, checked against the contract event by event.

submitted ──► Scheduled ──► Tokens* ──► Finished      nothing before, nothing after,
    └────────────┴────────────┴───────► Failed        and every count agrees with what was delivered
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from openinfer_core.engine import EngineInfo
from openinfer_core.events import (
    Failed,
    Finished,
    FinishReason,
    Scheduled,
    TerminalEvent,
    TokenEvent,
    TokenLogprobs,
    Tokens,
)
from openinfer_core.request import GenerateRequest
from openinfer_core.testing.errors import require

LOGPROB_TOLERANCE = 1e-3  # in nat: two ways of computing one log-probability agree within this


class Transcript:
    """The events of one request."""

    def __init__(self, request: GenerateRequest, info: EngineInfo) -> None:
        self.request = request
        self.scheduled: Scheduled | None = None
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.terminal: TerminalEvent | None = None
        self._info = info

    def add(self, event: TokenEvent) -> None:
        """Takes the next event; `ConformanceError` if it must not come, or must not look like this."""
        self._require(self.terminal is None, f"{event} after the terminal event {self.terminal}")
        if isinstance(event, Scheduled):
            self._add_scheduled(event)
        elif isinstance(event, Tokens):
            self._add_tokens(event)
        elif isinstance(event, Finished):
            self._check_finished(event)
            self.terminal = event
        else:
            self._require(event.message, "a Failed without a message")
            self.terminal = event

    def _add_scheduled(self, event: Scheduled) -> None:
        self._require(self.scheduled is None, "a second Scheduled")
        cached, num_prompt = event.cached_tokens, len(self.request.prompt_token_ids)
        self._require(0 <= cached < num_prompt, f"{cached} tokens cached of a prompt of {num_prompt}")
        self._require(event.queued_s >= 0, f"queued for {event.queued_s} s")
        if self.request.sampling.prompt_logprobs is not None:
            self._require(cached == 0, f"prompt_logprobs need every position; {cached} tokens came from a cache")
        self.scheduled = event

    def _add_tokens(self, event: Tokens) -> None:
        sampling = self.request.sampling
        self._require(self.scheduled is not None, "Tokens before Scheduled")
        self._require(event.token_ids or event.prompt_logprobs, "Tokens without any")
        self._add_prompt_logprobs(event)
        for token_id in event.token_ids:
            self._require(0 <= token_id < self._info.num_token_ids, f"token id {token_id} does not exist")
            self._require(token_id not in sampling.stop_token_ids, f"the stop token {token_id} was delivered")
        self._add_logprobs(event)
        self.token_ids += event.token_ids
        num_tokens = len(self.token_ids)
        self._require(num_tokens <= sampling.max_tokens, f"{num_tokens} tokens; max_tokens is {sampling.max_tokens}")

    def _add_logprobs(self, event: Tokens) -> None:
        top = self.request.sampling.logprobs
        if top is None:
            self._require(event.logprobs is None, "logprobs that were not asked for")
            return
        logprobs = event.logprobs or ()
        self._require(
            len(logprobs) == len(event.token_ids), f"{len(logprobs)} logprobs for {len(event.token_ids)} tokens"
        )
        for token_id, entry in zip(event.token_ids, logprobs, strict=True):
            self._check_logprobs(token_id, entry, top)
        self.logprobs += logprobs

    def _add_prompt_logprobs(self, event: Tokens) -> None:
        if event.prompt_logprobs is None:
            return
        top = self.request.sampling.prompt_logprobs
        if top is None:
            self._require(not event.prompt_logprobs, "prompt_logprobs that were not asked for")
            return
        self._require(not self.token_ids, "prompt_logprobs after the first token")
        predicted = self.request.prompt_token_ids[1 + len(self.prompt_logprobs) :]
        self._require(
            len(event.prompt_logprobs) <= len(predicted), "more prompt_logprobs than prompt tokens to predict"
        )
        for token_id, entry in zip(predicted, event.prompt_logprobs, strict=False):
            self._check_logprobs(token_id, entry, top)
        self.prompt_logprobs += event.prompt_logprobs

    def _check_logprobs(self, token_id: int, entry: TokenLogprobs, num_top: int) -> None:
        num_token_ids = self._info.num_token_ids
        num_top = min(num_top, num_token_ids)
        top = entry.top_logprobs
        self._require(
            len(entry.top_ids) == len(top) == num_top,
            f"{len(entry.top_ids)} alternatives with {len(top)} logprobs; {num_top} were asked for",
        )
        self._require(len(set(entry.top_ids)) == num_top, f"alternatives {entry.top_ids} are not distinct")
        self._require(all(0 <= other < num_token_ids for other in entry.top_ids), "an alternative does not exist")
        self._require(all(a >= b for a, b in pairwise(top)), f"alternatives are not sorted, best first: {top}")
        mass = top if token_id in entry.top_ids else (*top, entry.logprob)
        self._require(_is_distribution(mass), f"probabilities sum to more than 1 in {entry}")
        self._require(1 <= entry.rank <= num_token_ids, f"rank {entry.rank}; ranks are 1 .. {num_token_ids}")
        likelier = sum(other > entry.logprob + LOGPROB_TOLERANCE for other in top)
        self._require(entry.rank > likelier, f"rank {entry.rank}, but {likelier} alternatives are likelier: {entry}")
        if token_id in entry.top_ids:
            index = entry.top_ids.index(token_id)
            agree = math.isclose(top[index], entry.logprob, rel_tol=0, abs_tol=LOGPROB_TOLERANCE)
            self._require(agree, f"token {token_id} has two log-probabilities in {entry}")
            self._require(entry.rank <= index + 1, f"rank {entry.rank}, but alternative number {index + 1}: {entry}")
        elif top:
            self._require(entry.logprob <= top[-1] + LOGPROB_TOLERANCE, f"token {token_id} belongs into {entry}")

    def _check_finished(self, event: Finished) -> None:
        sampling = self.request.sampling
        self._check_counts(event)
        stopped = event.reason is FinishReason.STOP
        self._require(stopped == (event.stop_token_id is not None), f"reason and stop_token_id contradict: {event}")
        if event.reason is FinishReason.ABORT:
            return
        self._require(self.scheduled is not None, f"{event} before Scheduled")
        if sampling.prompt_logprobs is not None:
            missing = len(self.request.prompt_token_ids) - 1 - len(self.prompt_logprobs)
            self._require(missing == 0, f"{missing} prompt tokens have no log-probabilities")
        if stopped:
            self._require(event.stop_token_id in sampling.stop_token_ids, f"{event.stop_token_id} is no stop token")
            self._require(
                event.completion_tokens > sampling.min_tokens,
                f"a stop token after {len(self.token_ids)} tokens; min_tokens is {sampling.min_tokens}",
            )
        else:
            context_tokens = event.prompt_tokens + event.completion_tokens
            full = event.completion_tokens == sampling.max_tokens or context_tokens == self._info.max_model_tokens
            self._require(full, f"reason length after {event.completion_tokens} of {sampling.max_tokens} tokens")

    def _check_counts(self, event: Finished) -> None:
        sampled = len(self.token_ids) + (event.stop_token_id is not None)
        counts = {
            "prompt_tokens": (event.prompt_tokens, len(self.request.prompt_token_ids)),
            "completion_tokens": (event.completion_tokens, sampled),
            "cached_tokens": (event.cached_tokens, self.scheduled.cached_tokens if self.scheduled else 0),
        }
        for name, (said, counted) in counts.items():
            self._require(said == counted, f"Finished says {name}={said}; by the events it is {counted}")
        self._require(
            event.completion_tokens <= self.request.sampling.max_tokens,
            f"{event.completion_tokens} tokens sampled; max_tokens is {self.request.sampling.max_tokens}",
        )

    def _require(self, condition: object, violation: str) -> None:
        require(condition, f"request {self.request.request_id}: {violation}")


def _is_distribution(logprobs: Sequence[float]) -> bool:
    return sum(map(math.exp, logprobs)) <= 1 + LOGPROB_TOLERANCE


def describe_end(transcript: Transcript) -> str:
    terminal = transcript.terminal
    if isinstance(terminal, Failed):
        return f"failed ({terminal.kind}: {terminal.message})"
    return "has not ended" if terminal is None else f"finished with {terminal.reason}"

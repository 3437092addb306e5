"""`QueuedStep`: a step on its way on a GPU, whose result lands in pinned memory."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from openinfer_core import TokenLogprobs
from openinfer_core.scheduling import StepResult
from openinfer_engine.cpu.worker import NOT_FINITE
from openinfer_engine.worker.logprobs import HostLogprobs
from openinfer_kernels import HostArray
from openinfer_kernels.cuda.common.graphs import Event

PromptLogprobs: TypeAlias = dict[int, tuple[TokenLogprobs, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """What comes back of the rows that sample."""

    rows: HostArray  # `[n]` rows of the plan
    places: HostArray  # `[n]` where each is in the next two
    token_ids: HostArray
    logprobs: HostLogprobs | None
    tops: HostArray  # `[n]` alternatives that each row's request asked for; -1 for no log-probabilities

    def result(self, num_rows: int, prompt_logprobs: PromptLogprobs) -> StepResult:
        token_ids = np.full(num_rows, -1, np.int32)
        token_ids[self.rows] = self.token_ids[self.places]
        failed = self.rows[token_ids[self.rows] < 0].tolist()
        return StepResult.of_single_tokens(
            token_ids,
            logprobs=self._logprobs(token_ids),
            prompt_logprobs=prompt_logprobs,
            failed_rows=dict.fromkeys(failed, NOT_FINITE),
        )

    def _logprobs(self, token_ids: HostArray) -> dict[int, TokenLogprobs]:
        if self.logprobs is None:
            return {}
        asked = (self.tops >= 0) & (token_ids[self.rows] >= 0)
        found = self.logprobs.of_rows(self.places[asked].tolist(), self.tops[asked].tolist())
        return dict(zip(self.rows[asked].tolist(), found, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionLogprobs:
    """Log-probabilities at one sampled position of rows that have it."""

    spans: HostArray  # `[n]` numbers of these rows among those that sample
    logprobs: HostLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedTokens:
    """What comes back of the rows that sample, in an engine with a drafter."""

    rows: HostArray  # `[n]` rows of the plan
    token_ids: HostArray  # `[positions, n]`, of each row as many as `new_counts` says
    new_counts: HostArray  # `[n]`
    compared: HostArray  # `[n]` drafts that there were
    drafts: HostArray | None  # `[n, max_drafts]` for the next step; None where no row wants them
    num_drafts: HostArray  # `[n]` of them that are token ids, from the front
    wants_drafts: HostArray  # `[n]`
    logprobs: list[PositionLogprobs]  # by sampled position; none where no row asks
    tops: HostArray  # as in `SampledTokens`

    def result(self, num_rows: int, prompt_logprobs: PromptLogprobs) -> StepResult:
        new_counts, draft_counts = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
        new_counts[self.rows], draft_counts[self.rows] = self.new_counts, self.compared
        is_token = np.arange(len(self.token_ids)) < self.new_counts[:, None]
        return StepResult(
            new_counts=new_counts,
            token_ids=self.token_ids.T[is_token],
            draft_counts=draft_counts,
            next_drafts=self._next_drafts(),
            logprobs=self._logprobs(),
            prompt_logprobs=prompt_logprobs,
            failed_rows=dict.fromkeys(self.rows[self.new_counts == 0].tolist(), NOT_FINITE),
        )

    def _next_drafts(self) -> dict[int, tuple[int, ...]]:
        wanting = np.flatnonzero(self.wants_drafts & (self.new_counts > 0)).tolist()
        if self.drafts is None:
            return {int(self.rows[span]): () for span in wanting}
        return {int(self.rows[span]): tuple(self.drafts[span, : self.num_drafts[span]].tolist()) for span in wanting}

    def _logprobs(self) -> dict[int, tuple[TokenLogprobs, ...]]:
        found: dict[int, tuple[TokenLogprobs, ...]] = {}
        for position, at in enumerate(self.logprobs):
            asked = np.flatnonzero((self.tops[at.spans] >= 0) & (self.new_counts[at.spans] > position))
            spans = at.spans[asked]
            of_rows = at.logprobs.of_rows(asked.tolist(), self.tops[spans].tolist())
            for row, one in zip(self.rows[spans].tolist(), of_rows, strict=True):
                found[row] = (*found.get(row, ()), one)
        return found


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """What comes back of a row that owes log-probabilities of the prompt."""

    row: int
    chunks: list[HostLogprobs]
    top: int

    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        return tuple(
            one
            for chunk in self.chunks
            for one in chunk.of_rows(range(len(chunk.chosen)), [self.top] * len(chunk.chosen))
        )


@dataclass(frozen=True, slots=True)
class QueuedStep:
    """Implements `openinfer_engine.worker.runner.PendingStep`."""

    done: Event
    num_rows: int
    sampled: SampledTokens | DraftedTokens
    prompts: list[ScoredPrompt]
    after: Callable[[], None]  # called once the step is over

    def result(self) -> StepResult:
        self.done.wait()
        self.after()
        prompt_logprobs = {prompt.row: prompt.logprobs() for prompt in self.prompts}
        return self.sampled.result(self.num_rows, prompt_logprobs)

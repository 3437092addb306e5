"""`QueuedStep`: a step on its way on a GPU, whose result lands in pinned memory."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from openinfer_core import TokenLogprobs
from openinfer_core.scheduling import StepResult
from openinfer_engine.cpu.worker import NOT_FINITE
from openinfer_engine.worker.logprobs import HostLogprobs
from openinfer_kernels import HostArray
from openinfer_kernels.cuda.common.graphs import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """What comes back of the rows that sample."""

    rows: HostArray  # `[n]` rows of the plan
    places: HostArray  # `[n]` where each is in the next two
    token_ids: HostArray
    logprobs: HostLogprobs | None
    tops: HostArray  # `[n]` alternatives that each row's request asked for; -1 for no log-probabilities


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
    sampled: SampledTokens
    prompts: list[ScoredPrompt]
    after: Callable[[], None]  # called once the step is over

    def result(self) -> StepResult:
        self.done.wait()
        self.after()
        sampled = self.sampled
        token_ids = np.full(self.num_rows, -1, np.int32)
        token_ids[sampled.rows] = sampled.token_ids[sampled.places]
        failed = sampled.rows[token_ids[sampled.rows] < 0].tolist()
        return StepResult.of_single_tokens(
            token_ids,
            logprobs=self._logprobs(token_ids),
            prompt_logprobs={prompt.row: prompt.logprobs() for prompt in self.prompts},
            failed_rows=dict.fromkeys(failed, NOT_FINITE),
        )

    def _logprobs(self, token_ids: HostArray) -> dict[int, TokenLogprobs]:
        sampled = self.sampled
        if sampled.logprobs is None:
            return {}
        asked = (sampled.tops >= 0) & (token_ids[sampled.rows] >= 0)
        found = sampled.logprobs.of_rows(sampled.places[asked].tolist(), sampled.tops[asked].tolist())
        return dict(zip(sampled.rows[asked].tolist(), found, strict=True))

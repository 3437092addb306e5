"""What rounding to BF16 alone costs a model: the measure of how far a GPU's answers may be from the CPU's.

A GPU keeps in BF16 what the CPU keeps in float32. `RoundedOps` rounds the CPU's results where a GPU stores them, so
that a model computed with it is about as far from the truth as a GPU without a mistake, which rounds inside of
operators too. Near ties of routers and of selected entries turn on both: some tokens are far off, and the largest
difference says nothing. `Distance` has the mean and the 99th percentile.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from openinfer_engine.testing.answers import Answer
from openinfer_engine.testing.family import FamilyHarness
from openinfer_kernels import Array, AttentionBatch, ExpertChoice, LinearWeight, PagedCache
from openinfer_kernels.cpu import CpuOps
from openinfer_kernels.cpu.gemm.linear import linear
from openinfer_kernels.cpu.moe.experts import experts
from openinfer_kernels.providers import PROVIDABLE
from openinfer_kernels.weights.bfloat16 import rounded

PromptLogprobs: TypeAlias = NDArray[np.float64]
"""`[tokens]`"""

_UNROUNDED = frozenset({"experts", "index_scores", "logits", "residual_embedding", "select_entries"})
"""What a GPU answers in float32, or in integers."""
_WRITTEN: Mapping[str, int | str] = {
    "compress_overlapping_windows": "cache",
    "compress_windows": "cache",
    "gated_qk_norm_rope_append": "cache",
    "hyper_add": 1,
    "hyper_write": 1,
    "latent_norm_rope_append": "cache",
    "qk_norm_rope_append": "cache",
    "rope_append": "cache",
    "zero_centred_qk_norm_rope_append": "cache",
}
"""The argument that an operator writes in the compute dtype, by position or keyword."""


class RoundedOps:
    """The CPU's operators; what a GPU stores of their results in BF16 is rounded to it."""

    def __init__(self) -> None:
        self._cpu = CpuOps()

    def __getattr__(self, name: str) -> Any:
        operator = getattr(self._cpu, name)
        return _rounding(name, operator) if name in PROVIDABLE else operator

    def experts(
        self,
        x: Array,
        choice: ExpertChoice,
        gate_up: LinearWeight,
        down: LinearWeight,
        *,
        first_expert: int = 0,
        limit: float | None = None,
        shared: Array | None = None,
    ) -> Array:
        """Their products are rounded, the sum over a token's experts is not."""
        return experts(
            x,
            choice,
            gate_up,
            down,
            first_expert=first_expert,
            limit=limit,
            shared=shared,
            multiply=lambda tokens, weight: rounded(linear(tokens, weight)),
        )


class QueriesOneOff(RoundedOps):
    """With a mistake that a bound on distances has to find: DeepSeek-V4's queries are rotated by the next position."""

    def norm_rope_tail(
        self, x: Array, weight: Array | None, *, eps: float, rope: Array, batch: AttentionBatch
    ) -> Array:
        """Queries are what has no weight."""
        if weight is None:
            batch = replace(batch, positions=batch.positions + 1)
        return rounded(CpuOps().norm_rope_tail(x, weight, eps=eps, rope=rope, batch=batch))


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """How far log-probabilities are from others."""

    mean: float
    p99: float

    @classmethod
    def between(cls, ours: PromptLogprobs, theirs: PromptLogprobs) -> Self:
        """Of two models that were asked about the same tokens.

        Raises:
            ValueError: they were not.
        """
        if ours.shape != theirs.shape or not len(ours):
            raise ValueError(f"log-probabilities of {len(ours)} tokens and of {len(theirs)}")
        differences = np.abs(ours - theirs)
        return cls(mean=float(differences.mean()), p99=float(np.quantile(differences, 0.99)))

    def over(self, other: "Distance") -> float:
        """How many times as far as `other`, by the larger of the two ratios."""
        return max(self.mean / other.mean, self.p99 / other.p99)


def computed_logprobs(harness: FamilyHarness, prompts: Iterable[Sequence[int]]) -> PromptLogprobs:
    """Of all tokens of prompts but the first of each, which are computed whole."""
    found: list[PromptLogprobs] = []
    for tokens in prompts:
        logits = harness.step({"prompt": tokens})["prompt"][:-1].astype(np.float64)
        harness.restart("prompt")
        logits -= logits.max(axis=1, keepdims=True)
        found.append(logits[range(len(logits)), list(tokens[1:])] - np.log(np.exp(logits).sum(axis=1)))
    return np.concatenate(found)


def answered_logprobs(answers: Mapping[int, Answer]) -> PromptLogprobs:
    """The same as an engine said, in the order of request ids."""
    return np.array([one.logprob for _, answer in sorted(answers.items()) for one in answer.prompt_logprobs])


def _rounding(name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        result = operator(*given, **named)
        if name in _WRITTEN:
            place = _WRITTEN[name]
            written = given[place] if isinstance(place, int) else named[place]
            array = written.data if isinstance(written, PagedCache) else written
            array[...] = rounded(array)
        if result is None or name in _UNROUNDED:
            return result
        if isinstance(result, tuple):  # what else comes with it is float32
            first, *others = cast("tuple[Any, ...]", result)
            return rounded(first), *others
        return rounded(result)

    return call

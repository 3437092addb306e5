"""Routers: which experts each token goes to, in float32."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from openinfer_kernels.ops.experts import ExpertChoice, GroupScore, Routing, Scoring

_SOFTPLUS_LINEAR = 20
"""Above it `softplus(x)` is `x`."""
_LEAST_SUM = np.float32(1e-20)


@np.errstate(over="ignore", invalid="ignore")
def top_experts(
    logits: NDArray[Any],
    *,
    routing: Routing,
    cache_slots: NDArray[Any] | None = None,
    bias: NDArray[Any] | None = None,
) -> ExpertChoice:
    scores = _scores(logits[:, : routing.num_experts], routing.scoring)
    wanted = scores if bias is None else scores + bias
    if routing.num_groups > 1:
        wanted = np.where(_kept(wanted, routing), wanted, -np.inf)
    ids = _largest(wanted, routing.num_experts_per_token)
    return _choice(ids, scores, logits, routing, cache_slots)


@np.errstate(over="ignore", invalid="ignore")
def table_experts(
    logits: NDArray[Any],
    token_ids: NDArray[Any],
    table: NDArray[Any],
    *,
    routing: Routing,
    cache_slots: NDArray[Any] | None = None,
) -> ExpertChoice:
    scores = _scores(logits[:, : routing.num_experts], routing.scoring)
    return _choice(table[token_ids], scores, logits, routing, cache_slots)


def _scores(logits: NDArray[Any], scoring: Scoring) -> NDArray[Any]:
    if scoring is Scoring.SIGMOID:
        return 1 / (1 + np.exp(-logits))
    if scoring is Scoring.SQRT_SOFTPLUS:
        # `log1p(exp(x))` overflows for large `x`, where it is `x` to float32's precision.
        return np.sqrt(np.where(logits > _SOFTPLUS_LINEAR, logits, np.log1p(np.exp(logits))))
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shares / shares.sum(axis=1, keepdims=True)


def _kept(wanted: NDArray[Any], routing: Routing) -> NDArray[np.bool_]:
    """`[T, E]`, whether an expert's group is one of the best."""
    groups = wanted.reshape(len(wanted), routing.num_groups, -1)
    judged = 1 if routing.group_score is GroupScore.MAX else 2
    group_scores = np.sort(groups, axis=2)[:, :, -judged:].sum(axis=2)
    kept = np.zeros(group_scores.shape, np.bool_)
    np.put_along_axis(kept, _largest(group_scores, routing.num_kept_groups), True, axis=1)
    return np.repeat(kept, groups.shape[2], axis=1)


def _largest(values: NDArray[Any], count: int) -> NDArray[Any]:
    """Indices of the largest of each row, in descending order, equal ones by the lower index; NaN last."""
    return np.argsort(-values, axis=1, kind="stable")[:, :count]


def _choice(
    ids: NDArray[Any],
    scores: NDArray[Any],
    logits: NDArray[Any],
    routing: Routing,
    cache_slots: NDArray[Any] | None,
) -> ExpertChoice:
    # The bias takes part in the choice alone: weights are of the scores without it.
    weights = np.take_along_axis(scores, ids, axis=1)
    if routing.normalised:
        weights = weights / (weights.sum(axis=1, keepdims=True) + _LEAST_SUM)
    weights = weights * np.float32(routing.scale)
    num_experts = routing.num_experts
    if routing.shared_expert:
        ids = np.concatenate([ids, np.full((len(ids), 1), num_experts)], axis=1)
        shared = _scores(logits[:, num_experts : num_experts + 1], Scoring.SIGMOID)
        weights, num_experts = np.concatenate([weights, shared], axis=1), num_experts + 1
    if cache_slots is not None:
        padding = cache_slots[:, None] < 0
        ids, weights = np.where(padding, -1, ids), np.where(padding, np.float32(0), weights)
    return ExpertChoice(ids=ids.astype(np.int32), weights=weights.astype(np.float32), num_experts=num_experts)

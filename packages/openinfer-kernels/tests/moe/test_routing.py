"""Routers against float64 loops over one token, with groups, biases, tables, ties and padding."""

from dataclasses import replace

import numpy as np
import pytest

from openinfer_kernels import GroupScore, Routing, Scoring


def naive_scores(logits: np.ndarray, scoring: Scoring) -> np.ndarray:
    if scoring is Scoring.SOFTMAX:
        shares = np.exp(logits - logits.max())
        return shares / shares.sum()
    if scoring is Scoring.SIGMOID:
        return 1 / (1 + np.exp(-logits))
    return np.sqrt(np.log1p(np.exp(logits)))


def naive_choice(logits: np.ndarray, routing: Routing, bias: np.ndarray) -> tuple[list[int], np.ndarray]:
    scores = naive_scores(logits.astype(np.float64), routing.scoring)
    wanted = scores + bias
    size = routing.num_experts // routing.num_groups
    groups = [sorted(wanted[g * size : (g + 1) * size], reverse=True) for g in range(routing.num_groups)]
    judged = [sum(each[: 1 if routing.group_score is GroupScore.MAX else 2]) for each in groups]
    kept = sorted(range(len(groups)), key=lambda g: -judged[g])[: routing.num_kept_groups]
    possible = [e for e in range(routing.num_experts) if e // size in kept]
    ids = sorted(possible, key=lambda e: (-wanted[e], e))[: routing.num_experts_per_token]
    weights = scores[ids]
    if routing.normalised:
        weights = weights / weights.sum()
    return ids, weights * routing.scale


PUBLISHED = [
    Routing(scoring=Scoring.SOFTMAX, num_experts=64, num_experts_per_token=6),
    Routing(
        scoring=Scoring.SOFTMAX, num_experts=16, num_experts_per_token=4, num_groups=4, num_kept_groups=2, scale=16.0
    ),
    Routing(scoring=Scoring.SIGMOID, num_experts=384, num_experts_per_token=8, normalised=True, scale=2.827),
    Routing(
        scoring=Scoring.SIGMOID,
        num_experts=24,
        num_experts_per_token=5,
        num_groups=6,
        num_kept_groups=3,
        group_score=GroupScore.TOP_TWO_SUM,
        normalised=True,
        scale=2.5,
    ),
    Routing(scoring=Scoring.SQRT_SOFTPLUS, num_experts=256, num_experts_per_token=6, normalised=True, scale=1.5),
]


@pytest.mark.parametrize("routing", PUBLISHED, ids=lambda each: f"{each.scoring}-{each.num_experts}")
@pytest.mark.parametrize("biased", [False, True])
def test_choice_equals_float64(ops, upload, routing, biased):
    rng = np.random.default_rng(routing.num_experts)
    logits = rng.normal(0, 2, (37, routing.num_experts)).astype(np.float32)
    bias = rng.normal(0, 0.2, routing.num_experts).astype(np.float32) if biased else None
    given = None if bias is None else upload(bias)
    choice = ops.top_experts(upload(logits), routing=routing, bias=given)
    ids, weights = ops.download(choice.ids), ops.download(choice.weights)
    assert (ids.dtype, weights.dtype) == (np.int32, np.float32)
    for token, row in enumerate(logits):
        expected_ids, expected_weights = naive_choice(row, routing, np.zeros(1) if bias is None else bias)
        assert ids[token].tolist() == expected_ids
        np.testing.assert_allclose(weights[token], expected_weights, rtol=1e-5)


def test_equal_scores_choose_the_lower_ids(ops, upload):
    routing = Routing(scoring=Scoring.SIGMOID, num_experts=40, num_experts_per_token=3, num_groups=4, num_kept_groups=2)
    logits = np.zeros((2, 40), np.float32)
    logits[1, 35] = 1
    choice = ops.top_experts(upload(logits), routing=routing)
    assert ops.download(choice.ids).tolist() == [[0, 1, 2], [35, 0, 1]]


def test_groups_that_were_not_kept_are_left_out_whatever_their_biases(ops, upload):
    """A dropped expert is none, not one of score 0, which would beat those with negative biases."""
    routing = Routing(
        scoring=Scoring.SIGMOID,
        num_experts=8,
        num_experts_per_token=3,
        num_groups=2,
        num_kept_groups=1,
        group_score=GroupScore.TOP_TWO_SUM,
    )
    bias = np.array([0, 0, -5, -5, -3, -3, -3, -3], np.float32)
    choice = ops.top_experts(upload(np.zeros((1, 8), np.float32)), routing=routing, bias=upload(bias))
    assert ops.download(choice.ids).tolist() == [[0, 1, 2]]


def test_large_logits_stay_finite(ops, upload):
    for scoring in Scoring:
        routing = Routing(scoring=scoring, num_experts=4, num_experts_per_token=2)
        logits = np.array([[500.0, -500.0, 0.0, 30.0], [-500.0, -400.0, -450.0, -600.0]], np.float32)
        choice = ops.top_experts(upload(logits), routing=routing)
        assert ops.download(choice.ids)[0, 0] == 0
        assert np.isfinite(ops.download(choice.weights)).all()


@pytest.mark.parametrize("scoring", list(Scoring))
def test_nan_stays_within_its_token(ops, upload, scoring):
    routing = Routing(scoring=scoring, num_experts=5, num_experts_per_token=2, normalised=True)
    logits = np.random.default_rng(3).normal(size=(3, 5)).astype(np.float32)
    expected = ops.download(ops.top_experts(upload(logits), routing=routing).ids)
    logits[1] = np.nan
    choice = ops.top_experts(upload(logits), routing=routing)
    ids, weights = ops.download(choice.ids), ops.download(choice.weights)
    assert ids[[0, 2]].tolist() == expected[[0, 2]].tolist()
    assert ((ids >= 0) & (ids < 5)).all()
    assert np.isnan(weights[1]).all()
    assert np.isfinite(weights[[0, 2]]).all()


def test_table_names_the_experts_and_scores_weigh_them(ops, upload):
    rng = np.random.default_rng(11)
    routing = Routing(scoring=Scoring.SQRT_SOFTPLUS, num_experts=9, num_experts_per_token=3, normalised=True, scale=1.5)
    table = np.stack([rng.permutation(9)[:3] for _ in range(20)]).astype(np.int32)
    token_ids, logits = rng.integers(0, 20, 6).astype(np.int32), rng.normal(size=(6, 9)).astype(np.float32)
    choice = ops.table_experts(upload(logits), upload(token_ids), upload(table), routing=routing)
    np.testing.assert_array_equal(ops.download(choice.ids), table[token_ids])
    for token, weights in enumerate(ops.download(choice.weights)):
        scores = naive_scores(logits[token].astype(np.float64), routing.scoring)[table[token_ids[token]]]
        np.testing.assert_allclose(weights, 1.5 * scores / scores.sum(), rtol=1e-5)


@pytest.mark.parametrize(("num_experts", "columns"), [(6, 7), (64, 65), (256, 320)])
def test_shared_expert_is_every_tokens_last_one_weighed_by_its_own_sigmoid(ops, upload, num_experts, columns):
    """The others are as without it, whatever further columns hold."""
    rng = np.random.default_rng(num_experts)
    logits = rng.normal(0, 3, (9, columns)).astype(np.float32)
    logits[:, num_experts + 1 :] = np.inf
    logits[4, num_experts] = 90
    alone = Routing(
        scoring=Scoring.SOFTMAX, num_experts=num_experts, num_experts_per_token=5, normalised=True, scale=2.0
    )
    slots = upload(np.array([3, 5, 7, -1, 9, 11, 13, 15, 17], np.int64))
    given = upload(logits)
    choice = ops.top_experts(given, routing=replace(alone, shared_expert=True), cache_slots=slots)
    expected = ops.top_experts(upload(logits[:, :num_experts].copy()), routing=alone, cache_slots=slots)
    ids, weights = ops.download(choice.ids), ops.download(choice.weights)
    assert (ids.dtype, weights.dtype, choice.num_experts) == (np.int32, np.float32, num_experts + 1)
    np.testing.assert_array_equal(ids[:, :5], ops.download(expected.ids))
    np.testing.assert_array_equal(weights[:, :5], ops.download(expected.weights))
    assert ids[:, 5].tolist() == [-1 if token == 3 else num_experts for token in range(9)]
    gates = 1 / (1 + np.exp(-logits[:, num_experts].astype(np.float64)))
    gates[3] = 0
    np.testing.assert_allclose(weights[:, 5], gates, rtol=1e-6)


def test_padding_chooses_nobody(ops, upload):
    routing = Routing(scoring=Scoring.SOFTMAX, num_experts=6, num_experts_per_token=2)
    slots, logits = upload(np.array([4, -1, 9], np.int64)), upload(np.ones((3, 6), np.float32))
    table, token_ids = upload(np.array([[2, 3]], np.int32)), upload(np.zeros(3, np.int32))
    for choice in (
        ops.top_experts(logits, routing=routing, cache_slots=slots),
        ops.table_experts(logits, token_ids, table, routing=routing, cache_slots=slots),
    ):
        ids, weights = ops.download(choice.ids), ops.download(choice.weights)
        assert ids[1].tolist() == [-1, -1]
        assert weights[1].tolist() == [0, 0]
        assert (ids[[0, 2]] >= 0).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_groups": 3}, "8 experts cannot be cut into 3 equal groups"),
        ({"num_groups": 2, "num_kept_groups": 3}, "of 2 groups of experts, 3 cannot be kept"),
        ({"num_groups": 4, "num_kept_groups": 1}, "3 experts per token cannot be chosen from 1 groups of 2"),
        ({"num_experts_per_token": 9}, "9 experts per token"),
        (
            {"num_groups": 8, "num_kept_groups": 4, "group_score": GroupScore.TOP_TWO_SUM},
            "groups of one expert have no two",
        ),
    ],
)
def test_routing_that_contradicts_itself_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Routing(**({"scoring": Scoring.SOFTMAX, "num_experts": 8, "num_experts_per_token": 3} | changes))

"""Penalties, bias and token masks, observed through greedy choices."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openinfer_kernels import Bias, Penalties, TokenMask

SEEDS = st.integers(0, 2**32 - 1)


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def penalties(row: int, counts: list[int], seen: list[int], *, presence=0.0, frequency=0.0, repetition=1.0):
    return Penalties(
        rows=i32(row),
        presence=f32(presence),
        frequency=f32(frequency),
        repetition=f32(repetition),
        output_counts=np.array([counts], np.int32),
        prompt_seen=np.array([seen], np.bool_),
    )


def bias_of(changes: dict[int, dict[int, float]]) -> Bias:
    """Row -> token -> what is added; rows are padded with changes that do not count."""
    width = 1 + max(map(len, changes.values()))
    ids, values = np.zeros((len(changes), width), np.int32), np.full((len(changes), width), 1e6, np.float32)
    for index, row in enumerate(changes.values()):
        ids[index, : len(row)], values[index, : len(row)] = list(row), list(row.values())
    return Bias(rows=i32(*changes), counts=i32(*map(len, changes.values())), token_ids=ids, values=values)


def packed(allowed: list[list[int]], num_tokens: int) -> np.ndarray:
    """`[m, ceil(n / 32)]` uint32 with the bits of the allowed tokens."""
    bits = np.zeros((len(allowed), -(-num_tokens // 32)), np.uint32)
    for row, tokens in enumerate(allowed):
        for token in tokens:
            bits[row, token // 32] |= np.uint32(1 << token % 32)
    return bits


@pytest.fixture
def ranking(ops, upload, sampling):
    """All tokens of one row by how they rank after the changes: one winner after another is forbidden."""

    def rank(row, **changes):
        num_tokens, order = len(row), []
        given_bias = changes.pop("bias", None)
        while len(order) < num_tokens:
            banned = dict.fromkeys(order, -np.inf)
            if given_bias is not None:
                banned = given_bias | banned
            bias = bias_of({0: banned})
            batch = sampling(1, num_token_ids=num_tokens, temperature=0, bias=bias, **changes)
            order.append(int(ops.download(ops.sample(upload(f32(*row)[None]), upload(batch)))[0]))
        return order

    return rank


# Logits 4, 3, 2, -1, -2 of tokens a..e = 0..4.
ROW = [4.0, 3.0, 2.0, -1.0, -2.0]


def test_presence_is_subtracted_once_from_what_occurs_in_the_output(ranking):
    # a: 4 - 1.5 = 2.5, d: -1 - 1.5 = -2.5; the prompt alone (b) does not count.
    changed = penalties(0, [3, 0, 0, 1, 0], [0, 1, 0, 0, 0], presence=1.5)
    assert ranking(ROW, penalties=changed) == [1, 0, 2, 4, 3]


def test_frequency_is_subtracted_per_occurrence_in_the_output(ranking):
    # a: 4 - 4 * 0.5 = 2 (equal to c: the lower id wins), b: 3 - 1 * 0.5 = 2.5.
    assert ranking(ROW, penalties=penalties(0, [4, 1, 0, 0, 0], [0, 0, 1, 0, 0], frequency=0.5)) == [1, 0, 2, 3, 4]


def test_negative_frequency_prefers_what_occurred(ranking):
    assert ranking(ROW, penalties=penalties(0, [0, 0, 0, 0, 2], [0] * 5, frequency=-4.0)) == [4, 0, 1, 2, 3]


def test_repetition_divides_positive_and_multiplies_negative_logits_of_prompt_and_output(ranking):
    # a (prompt): 4 / 2 = 2 ties with c; b (output): 3 / 2 = 1.5; d (prompt): -1 * 2 = -2 ties with e.
    assert ranking(ROW, penalties=penalties(0, [0, 1, 0, 0, 0], [1, 0, 0, 1, 0], repetition=2.0)) == [0, 2, 1, 3, 4]


def test_repetition_comes_before_presence_and_frequency(ranking):
    # a: 4 / 2 - 2 * 0.5 - 0.25 = 0.75. Subtracting first would give (4 - 1.25) / 2 = 1.375.
    row = [4.0, 1.0, 0.5]
    changed = penalties(0, [2, 0, 0], [0, 0, 0], repetition=2.0, frequency=0.5, presence=0.25)
    assert ranking(row, penalties=changed) == [1, 0, 2]


def test_bias_comes_after_the_penalties(ranking):
    # a: 4 / 4 + 1.5 = 2.5 < b. Adding first would give 5.5 / 4 = 1.375, behind c.
    bias = {0: 1.5}
    changed = penalties(0, [0] * 5, [1, 0, 0, 0, 0], repetition=4.0)
    assert ranking(ROW, penalties=changed, bias=bias) == [1, 0, 2, 3, 4]


def test_mask_wins_over_bias(ops, upload, sampling):
    mask = TokenMask(rows=i32(0), bits=packed([[2, 4]], 5))
    bias = bias_of({0: {0: 100.0, 4: 9.0}})
    batch = sampling(1, num_token_ids=5, temperature=0, bias=bias, token_mask=mask)
    assert ops.download(ops.sample(upload(f32(*ROW)[None]), upload(batch))).tolist() == [4]


def test_changes_touch_only_the_rows_they_name(ops, upload, sampling):
    logits = np.repeat(f32(*ROW)[None], 4, axis=0)
    batch = sampling(
        4,
        num_token_ids=5,
        temperature=0,
        penalties=penalties(2, [1, 0, 0, 0, 0], [0] * 5, presence=2.0),
        bias=bias_of({3: {4: 50.0, 0: -np.inf}, -1: {1: 100.0}}),
        token_mask=TokenMask(rows=i32(1), bits=packed([[2, 3]], 5)),
    )
    device = upload(logits)
    assert ops.download(ops.sample(device, upload(batch))).tolist() == [0, 2, 1, 4]
    np.testing.assert_array_equal(ops.download(device), logits)


def test_mask_that_allows_nothing_is_minus_one_and_alone(ops, upload, sampling):
    mask = TokenMask(rows=i32(2, 0), bits=packed([[], [40]], 70))
    for temperature in (0.0, 1.0):
        batch = sampling(3, num_token_ids=70, temperature=temperature, token_mask=mask)
        tokens = ops.download(ops.sample(upload(np.zeros((3, 70), np.float32)), upload(batch)))
        assert tokens[[0, 2]].tolist() == [40, -1]
        assert tokens[1] >= 0


def test_bias_that_forbids_everything_is_minus_one(ops, upload, sampling):
    bias = bias_of({0: dict.fromkeys(range(5), -np.inf)})
    batch = sampling(1, num_token_ids=5, bias=bias)
    assert ops.download(ops.sample(upload(f32(*ROW)[None]), upload(batch))).tolist() == [-1]


def test_changes_may_name_padding_ids_which_stay_impossible(ops, upload, sampling):
    batch = sampling(
        1,
        num_token_ids=3,
        temperature=0,
        penalties=penalties(0, [1, 0, 0, 0, 1], [0, 0, 0, 1, 0], presence=0.5),
        bias=bias_of({0: {4: 100.0, 3: 100.0}}),
        token_mask=TokenMask(rows=i32(0), bits=packed([[1, 2, 3, 4]], 5)),
    )
    assert ops.download(ops.sample(upload(f32(*ROW)[None]), upload(batch))).tolist() == [1]


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, num_tokens=st.sampled_from([1, 31, 32, 33, 64, 100]))
def test_mask_allows_exactly_its_bits(ops, upload, sampling, seed, num_tokens):
    rng = np.random.default_rng(seed)
    num_rows = 60
    allowed = rng.permutation(num_tokens)[: rng.integers(1, num_tokens + 1)].tolist()
    mask = TokenMask(rows=np.arange(num_rows, dtype=np.int32), bits=packed([allowed] * num_rows, num_tokens))
    batch = sampling(num_rows, num_token_ids=num_tokens, token_mask=mask)
    tokens = ops.download(ops.sample(upload(np.zeros((num_rows, num_tokens), np.float32)), upload(batch)))
    assert set(tokens.tolist()) <= set(allowed)
    greedy = sampling(num_rows, num_token_ids=num_tokens, temperature=0, token_mask=mask)
    logits = rng.normal(size=(num_rows, num_tokens)).astype(np.float32)
    best = [max(sorted(allowed), key=row.__getitem__) for row in logits.tolist()]
    assert ops.download(ops.sample(upload(logits), upload(greedy))).tolist() == best


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, num_tokens=st.integers(1, 60))
def test_penalties_of_random_rows_equal_a_loop(ops, upload, sampling, seed, num_tokens):
    rng = np.random.default_rng(seed)
    num_rows, rows = 7, [5, 0, 3]
    logits = rng.normal(size=(num_rows, num_tokens)).astype(np.float32)
    counts = rng.poisson(0.7, size=(3, num_tokens)).astype(np.int32)
    seen = rng.random((3, num_tokens)) < 0.4
    presence, frequency = rng.uniform(-1, 1, size=(2, 3)).astype(np.float32)
    repetition = rng.uniform(0.5, 2, size=3).astype(np.float32)
    changed = Penalties(
        rows=i32(*rows),
        presence=presence,
        frequency=frequency,
        repetition=repetition,
        output_counts=counts,
        prompt_seen=seen,
    )
    batch = sampling(num_rows, num_token_ids=num_tokens, temperature=0, penalties=changed)
    tokens = ops.download(ops.sample(upload(logits), upload(batch))).tolist()
    expected = logits.astype(np.float64)
    for index, row in enumerate(rows):
        for token in range(num_tokens):
            value = float(logits[row, token])
            if counts[index, token] or seen[index, token]:
                value = value / repetition[index] if value > 0 else value * repetition[index]
            if counts[index, token]:
                value -= presence[index] + frequency[index] * counts[index, token]
            expected[row, token] = value
    for row, token in enumerate(tokens):
        assert expected[row, token] >= expected[row].max() - 1e-5

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

SEEDS = st.integers(0, 2**32 - 1)


def run(ops, upload, logits, token_ids, top):
    result = ops.logprobs(upload(logits), upload(np.array(token_ids, np.int32)), top=top)
    chosen, ranks, top_ids, values = map(ops.download, (result.chosen, result.ranks, result.top_ids, result.top))
    assert chosen.dtype == values.dtype == np.float32
    assert ranks.dtype == top_ids.dtype == np.int32
    assert top_ids.shape == values.shape == (len(logits), top)
    return chosen, ranks, top_ids, values


def naive_log_softmax(row: list[float]) -> list[float]:
    largest = max(row)
    log_sum = math.log(math.fsum(math.exp(x - largest) for x in row))
    return [x - largest - log_sum for x in row]


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, num_tokens=st.integers(1, 300), scale=st.sampled_from([0.0, 0.3, 3.0, 100.0]), data=st.data())
def test_logprobs_equal_float64(ops, upload, seed, num_tokens, scale, data):
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=(5, num_tokens)) * scale + 7).astype(np.float32)
    if data.draw(st.booleans()):
        logits = np.round(logits)
    token_ids = rng.integers(0, num_tokens, size=5).tolist()
    top = data.draw(st.integers(0, min(num_tokens, 20)))
    chosen, ranks, top_ids, values = run(ops, upload, logits, token_ids, top)
    for row, token in enumerate(token_ids):
        expected = naive_log_softmax(logits[row].tolist())
        assert chosen[row] == pytest.approx(expected[token], rel=1e-5, abs=1e-5)
        assert ranks[row] == 1 + sum(x > logits[row, token] for x in logits[row])
        best = sorted(range(num_tokens), key=lambda i: (-float(logits[row, i]), i))[:top]
        assert top_ids[row].tolist() == best
        np.testing.assert_allclose(values[row], [expected[i] for i in best], rtol=1e-5, atol=1e-5)


def test_logprobs_of_equal_logits_rank_first_and_come_by_id(ops, upload):
    chosen, ranks, top_ids, values = run(ops, upload, np.full((1, 8), 5.0, np.float32), [6], 3)
    assert chosen[0] == pytest.approx(-math.log(8), abs=1e-6)
    assert ranks.tolist() == [1]
    assert top_ids.tolist() == [[0, 1, 2]]
    np.testing.assert_allclose(values, -math.log(8), atol=1e-6)


def test_logprobs_over_the_vocabulary_of_qwen3_equal_float64(ops, upload):
    num_tokens, top = 151936, 1000
    logits = (np.random.default_rng(0).normal(size=(3, num_tokens)) * [[0.5], [4], [12]]).astype(np.float32)
    token_ids = [0, num_tokens - 1, 77777]
    chosen, ranks, top_ids, values = run(ops, upload, logits, token_ids, top)
    for row, token in enumerate(token_ids):
        exact = logits[row].astype(np.float64)
        expected = exact - exact.max() - math.log(np.exp(exact - exact.max()).sum())
        best = np.lexsort((np.arange(num_tokens), -exact))[:top]
        assert top_ids[row].tolist() == best.tolist()
        np.testing.assert_allclose(values[row], expected[best], rtol=1e-6, atol=2e-6)
        assert chosen[row] == pytest.approx(expected[token], rel=1e-6, abs=2e-6)
        assert ranks[row] == 1 + np.count_nonzero(exact > exact[token])


@pytest.mark.parametrize("top", [0, 1, 20])
@pytest.mark.parametrize("num_tokens", [2047, 2048, 2049, 30001, 40000])
def test_logprobs_of_many_equal_logits_take_the_lowest_ids(ops, upload, num_tokens, top):
    logits = np.zeros((3, num_tokens), np.float32)
    logits[1, 5::7] = 1.0
    logits[2, -1] = 2.0
    _, ranks, top_ids, values = run(ops, upload, logits, [3, 3, 3], top)
    assert ranks.tolist() == [1, 1 + len(range(5, num_tokens, 7)), 2]
    for row, exact in enumerate(logits.astype(np.float64)):
        best = np.lexsort((np.arange(num_tokens), -exact))[:top]
        assert top_ids[row].tolist() == best.tolist()
        np.testing.assert_allclose(values[row], exact[best] - math.log(np.exp(exact).sum()), atol=2e-6)


def test_logprobs_forbidden_token_is_minus_infinity(ops, upload):
    logits = np.array([[0.0, -np.inf, 0.0]], np.float32)
    chosen, ranks, top_ids, values = run(ops, upload, logits, [1], 3)
    assert chosen.tolist() == [-np.inf]
    assert ranks.tolist() == [3]
    assert top_ids.tolist() == [[0, 2, 1]]
    np.testing.assert_allclose(values[0], [-math.log(2), -math.log(2), -np.inf], atol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logprobs_row_that_sampling_failed_is_nan_with_rank_zero_and_alone(ops, upload, value):
    logits = np.random.default_rng(1).normal(size=(3, 40)).astype(np.float32)
    clean = run(ops, upload, logits, [4, 5, 6], 4)
    logits[1, 7:] = value
    logits[1, :7] = value if value < 0 else logits[1, :7]
    result = run(ops, upload, logits, [4, -1, 6], 4)
    assert np.isnan(result[0][1])
    assert result[1][1] == 0
    for got, expected in zip(result, clean, strict=True):
        np.testing.assert_array_equal(got[[0, 2]], expected[[0, 2]])


def test_logprobs_leave_the_logits_alone(ops, upload):
    logits = np.random.default_rng(2).normal(size=(2, 9)).astype(np.float32)
    device = upload(logits)
    ops.logprobs(device, upload(np.array([0, 1], np.int32)), top=2)
    np.testing.assert_array_equal(ops.download(device), logits)

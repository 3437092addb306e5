"""Which token a row gets: greedy choice, kept sets, the draw itself, and that a batch never changes a row."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openinfer_kernels.ops.sampling_columns import COLUMN_DTYPES

SEEDS = st.integers(0, 2**32 - 1)
MANY = 6000


def run(ops, upload, logits, batch):
    tokens = ops.download(ops.sample(upload(logits), upload(batch)))
    assert tokens.dtype == np.int32
    assert tokens.shape == (len(logits),)
    return tokens


def rows_of(batch, rows):
    """The same batch with these rows only; bias, penalties and masks are not carried."""
    columns = tuple(COLUMN_DTYPES)
    return dataclasses.replace(batch, **{name: getattr(batch, name)[rows] for name in columns})


def philox_word(seed: int, position: int) -> int:
    """The first word of Philox-4x32-10, in plain integers."""
    counter, key = [position & 0xFFFFFFFF, position >> 32, 0, 0], [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        left, right = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            right >> 32 ^ counter[1] ^ key[0],
            right & 0xFFFFFFFF,
            left >> 32 ^ counter[3] ^ key[1],
            left & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter[0]


# --- greedy -----------------------------------------------------------------------------------------------


def test_sample_temperature_zero_takes_the_largest(ops, upload, sampling):
    logits = np.random.default_rng(0).normal(size=(9, 301)).astype(np.float32)
    tokens = run(ops, upload, logits, sampling(9, num_token_ids=301, temperature=0))
    assert tokens.tolist() == [max(range(301), key=row.__getitem__) for row in logits.tolist()]


def test_sample_greedy_among_equals_takes_the_lowest_id(ops, upload, sampling):
    logits = np.array([[1, 3, 3, 2, 3], [0, 0, 0, 0, 0], [-0.0, 0.0, -1, -1, -1]], np.float32)
    assert run(ops, upload, logits, sampling(3, num_token_ids=5, temperature=0)).tolist() == [1, 0, 0]


def test_sample_top_k_one_is_the_greedy_choice_at_any_temperature(ops, upload, sampling):
    logits = np.random.default_rng(0).integers(0, 3, size=(200, 40)).astype(np.float32)
    logits[100:] *= 1e-20
    drawn = run(ops, upload, logits, sampling(200, num_token_ids=40, temperature=50.0, top_k=1))
    assert drawn.tolist() == run(ops, upload, logits, sampling(200, num_token_ids=40, temperature=0)).tolist()


@pytest.mark.parametrize("options", [{"temperature": 1e-6}, {"temperature": 1e-38}, {"top_p": 1e-7}, {"min_p": 1.0}])
def test_sample_nearly_greedy_settings_take_the_largest(ops, upload, sampling, options):
    logits = np.random.default_rng(1).normal(size=(50, 64)).astype(np.float32)
    assert run(ops, upload, logits, sampling(50, num_token_ids=64, **options)).tolist() == logits.argmax(1).tolist()


# --- what can never be sampled ----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_sample_padding_ids_never(ops, upload, sampling, options):
    logits = np.random.default_rng(2).normal(size=(500, 20)).astype(np.float32)
    logits[:, 13:] = 50.0
    logits[::2, 13:] = np.nan
    tokens = run(ops, upload, logits, sampling(500, num_token_ids=13, **options))
    assert tokens.min() >= 0
    assert tokens.max() < 13


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.99}])
def test_sample_impossible_tokens_never(ops, upload, sampling, options):
    logits = np.zeros((MANY, 9), np.float32)
    logits[:, [0, 4, 8]] = -np.inf
    logits[:, 5] = -200.0
    tokens = run(ops, upload, logits, sampling(MANY, num_token_ids=9, **options))
    assert set(tokens.tolist()) == {1, 2, 3, 6, 7}


@pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_sample_row_without_finite_maximum_is_minus_one_and_alone(ops, upload, sampling, options, value):
    logits = np.random.default_rng(3).normal(size=(6, 33)).astype(np.float32)
    clean = run(ops, upload, logits, sampling(6, num_token_ids=33, **options))
    logits[[1, 4]] = value
    tokens = run(ops, upload, logits, sampling(6, num_token_ids=33, **options))
    assert tokens[[1, 4]].tolist() == [-1, -1]
    assert tokens[[0, 2, 3, 5]].tolist() == clean[[0, 2, 3, 5]].tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sample_single_nan_among_numbers_is_minus_one(ops, upload, sampling, temperature):
    logits = np.zeros((1, 300), np.float32)
    logits[0, 271] = np.nan
    assert run(ops, upload, logits, sampling(1, num_token_ids=300, temperature=temperature)).tolist() == [-1]


def test_sample_no_rows(ops, upload, sampling):
    assert run(ops, upload, np.zeros((0, 5), np.float32), sampling(0, num_token_ids=5)).tolist() == []


def test_sample_leaves_the_logits_alone(ops, upload, sampling):
    logits = np.random.default_rng(4).normal(size=(4, 10)).astype(np.float32)
    device = upload(logits)
    ops.sample(device, upload(sampling(4, num_token_ids=9, top_k=[0, 3, 0, 3], top_p=[1, 1, 0.5, 0.5], min_p=0.1)))
    np.testing.assert_array_equal(ops.download(device), logits)


# --- the draw ---------------------------------------------------------------------------------------------


def test_sample_equal_logits_read_the_upper_bits_of_philox(ops, upload, sampling):
    rng = np.random.default_rng(5)
    seeds = rng.integers(0, 2**64, size=300, dtype=np.uint64)
    positions = rng.integers(0, 2**40, size=300)
    batch = sampling(300, num_token_ids=1024, seeds=seeds, positions=positions, temperature=0.7)
    tokens = run(ops, upload, np.full((300, 1024), -3.0, np.float32), batch)
    words = [philox_word(seed, position) for seed, position in zip(seeds.tolist(), positions.tolist(), strict=True)]
    assert tokens.tolist() == [word >> 22 for word in words]


CRITICAL_CHI_SQUARE = {9: 46.0, 39: 100.0}
"""Exceeded by chance once in more than a million times, by degrees of freedom."""


@pytest.mark.parametrize("varied", ["seeds", "positions"])
@pytest.mark.parametrize(
    ("num_tokens", "options"), [(10, {}), (40, {}), (10, {"temperature": 0.4}), (10, {"top_k": 10, "top_p": 0.9999999})]
)
def test_sample_frequencies_follow_the_softmax(ops, upload, sampling, varied, num_tokens, options):
    rng = np.random.default_rng(6)
    row = rng.uniform(-1, 1, size=num_tokens).astype(np.float32)
    draws = 20000
    batch = sampling(draws, num_token_ids=num_tokens, **{"seeds": 11, "positions": 5} | options)
    batch = dataclasses.replace(batch, **{varied: np.arange(draws).astype(getattr(batch, varied).dtype)})
    tokens = run(ops, upload, np.repeat(row[None], draws, axis=0), batch)
    weights = np.exp(row.astype(np.float64) / options.get("temperature", 1.0))
    expected = draws * weights / weights.sum()
    counts = np.bincount(tokens, minlength=num_tokens)
    assert ((counts - expected) ** 2 / expected).sum() < CRITICAL_CHI_SQUARE[num_tokens - 1]


def test_sample_successive_positions_of_one_seed_are_independent(ops, upload, sampling):
    draws = 40000
    batch = sampling(draws, num_token_ids=4, seeds=99, positions=np.arange(draws))
    tokens = run(ops, upload, np.zeros((draws, 4), np.float32), batch)
    pairs = np.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16)
    expected = (draws - 1) / 16
    assert ((pairs - expected) ** 2 / expected).sum() < 66


# --- kept sets --------------------------------------------------------------------------------------------


def observed(ops, upload, sampling, row, **options) -> set[int]:
    """All tokens that `MANY` draws from a row give."""
    batch = sampling(MANY, num_token_ids=len(row), **options)
    return set(run(ops, upload, np.repeat(row[None], MANY, axis=0), batch).tolist())


def naive_order(row: np.ndarray) -> list[int]:
    return sorted(range(len(row)), key=lambda i: (-float(row[i]), i))


@settings(max_examples=15, deadline=None)
@given(seed=SEEDS, num_tokens=st.integers(1, 30), data=st.data())
def test_sample_top_k_keeps_exactly_k(ops, upload, sampling, seed, num_tokens, data):
    row = np.random.default_rng(seed).integers(0, 6, size=num_tokens).astype(np.float32) / 5
    top_k = data.draw(st.integers(1, num_tokens + 3))
    assert observed(ops, upload, sampling, row, top_k=top_k) == set(naive_order(row)[:top_k])


@settings(max_examples=15, deadline=None)
@given(seed=SEEDS, num_tokens=st.integers(2, 30), data=st.data())
def test_sample_top_p_keeps_the_fewest_that_reach_it(ops, upload, sampling, seed, num_tokens, data):
    row = np.random.default_rng(seed).uniform(-1, 1, size=num_tokens).astype(np.float32)
    temperature = data.draw(st.sampled_from([0.8, 1.0, 3.0]))
    order = naive_order(row)
    weights = [math.exp(float(row[i]) / temperature) for i in order]
    kept = data.draw(st.integers(1, num_tokens))
    top_p = (sum(weights[:kept]) - 0.5 * weights[kept - 1]) / sum(weights)
    seen = observed(ops, upload, sampling, row, top_p=top_p, temperature=temperature)
    assert seen == set(order[:kept])


def test_sample_top_p_among_equals_keeps_the_lower_ids(ops, upload, sampling):
    row = np.zeros(8, np.float32)
    assert observed(ops, upload, sampling, row, top_p=0.55) == {0, 1, 2, 3, 4}
    assert observed(ops, upload, sampling, row, top_p=0.5) == {0, 1, 2, 3}


@settings(max_examples=15, deadline=None)
@given(seed=SEEDS, num_tokens=st.integers(2, 30), data=st.data())
def test_sample_min_p_drops_what_is_less_likely_than_its_share_of_the_best(
    ops, upload, sampling, seed, num_tokens, data
):
    row = np.random.default_rng(seed).uniform(-2, 2, size=num_tokens).astype(np.float32)
    shares = sorted((math.exp(float(x - row.max())) for x in row), reverse=True)
    kept = data.draw(st.integers(1, num_tokens))
    below = shares[kept] if kept < num_tokens else 0.0
    seen = observed(ops, upload, sampling, row, min_p=(shares[kept - 1] + below) / 2)
    assert seen == set(naive_order(row)[:kept])


def test_sample_top_p_is_renormalised_over_what_top_k_left(ops, upload, sampling):
    row = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    assert observed(ops, upload, sampling, row, top_p=0.6) == {0, 1}
    assert observed(ops, upload, sampling, row, top_k=2, top_p=0.6) == {0, 1}
    assert observed(ops, upload, sampling, row, top_k=2, top_p=0.55) == {0}
    assert observed(ops, upload, sampling, row, top_p=0.55) == {0, 1}


def test_sample_top_p_is_renormalised_over_what_min_p_left(ops, upload, sampling):
    row = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    assert observed(ops, upload, sampling, row, min_p=0.6, top_p=0.55) == {0}
    assert observed(ops, upload, sampling, row, min_p=0.6, top_p=0.6) == {0, 1}
    assert observed(ops, upload, sampling, row, min_p=0.6, top_k=3) == {0, 1}


def test_sample_min_p_is_taken_after_the_temperature(ops, upload, sampling):
    row = np.log(np.array([0.5, 0.25, 0.125], np.float32))
    assert observed(ops, upload, sampling, row, min_p=0.4) == {0, 1}
    assert observed(ops, upload, sampling, row, min_p=0.4, temperature=2.0) == {0, 1, 2}
    assert observed(ops, upload, sampling, row, min_p=0.4, temperature=0.5) == {0}


# --- everything together ----------------------------------------------------------------------------------


def naive_kept(row: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> list[float] | None:
    """Probabilities by id in float64 after the cuts, or None where a cut is too close to call."""
    order = naive_order(row)
    weights = {i: math.exp((float(row[i]) - float(row.max())) / temperature) for i in order}
    if any(abs(weights[i] - min_p) < 1e-5 for i in order[1:]):
        return None
    order = [i for i in order if weights[i] >= min_p]
    order = order[:top_k] if top_k else order
    total, running, kept = math.fsum(weights[i] for i in order), 0.0, []
    for i in order:
        if abs(running / total - top_p) < 1e-5:
            return None
        if running / total < top_p:
            kept.append(i)
            running += weights[i]
    return [weights[i] / running if i in kept else 0.0 for i in range(len(row))]


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, num_tokens=st.sampled_from([2, 7, 127, 128, 129, 300, 700]))
def test_sample_mixed_rows_invert_the_distribution_in_order_of_id(ops, upload, sampling, seed, num_tokens):
    rng = np.random.default_rng(seed)
    num_rows = 24
    logits = (rng.normal(size=(num_rows, num_tokens)) * rng.choice([0.1, 1, 5])).astype(np.float32)
    options = random_options(rng, num_rows, num_tokens)
    batch = sampling(num_rows, num_token_ids=num_tokens, **options)
    tokens = run(ops, upload, logits, batch).tolist()
    for row, token in enumerate(tokens):
        number = philox_word(int(options["seeds"][row]), int(options["positions"][row])) / 2**32
        if batch.temperature[row] == 0:
            assert token == naive_order(logits[row])[0]
            continue
        cuts = (float(getattr(batch, name)[row]) for name in ("temperature", "top_k", "top_p", "min_p"))
        temperature, top_k, top_p, min_p = cuts
        probabilities = naive_kept(logits[row], temperature, int(top_k), top_p, min_p)
        if probabilities is not None:
            assert probabilities[token] > 0
            below = math.fsum(probabilities[:token])
            assert below - 1e-5 <= number <= below + probabilities[token] + 1e-5


def random_options(rng, num_rows, num_tokens):
    return {
        "temperature": rng.choice([0.0, 0.3, 1.0, 2.5], size=num_rows),
        "top_k": rng.choice([0, 0, 1, 3, 20, num_tokens, 10**6], size=num_rows),
        "top_p": rng.choice([1.0, 1.0, 0.3, 0.95], size=num_rows),
        "min_p": rng.choice([0.0, 0.0, 0.02, 0.4], size=num_rows),
        "seeds": rng.integers(0, 2**64, size=num_rows, dtype=np.uint64),
        "positions": rng.integers(0, 2**34, size=num_rows),
    }


@pytest.mark.parametrize(("num_rows", "num_tokens"), [(40, 50), (40, 257), (12, 50000), (300, 3001)])
def test_sample_row_is_the_same_in_any_batch(ops, upload, sampling, num_rows, num_tokens):
    rng = np.random.default_rng(num_tokens)
    logits = (rng.normal(size=(num_rows, num_tokens + 3)) * 3).astype(np.float32)
    batch = sampling(num_rows, num_token_ids=num_tokens, **random_options(rng, num_rows, num_tokens))
    together = run(ops, upload, logits, batch)
    for row in range(0, num_rows, 1 + num_rows // 40):
        assert run(ops, upload, logits[[row]], rows_of(batch, [row])).tolist() == [together[row]]
    for _ in range(3):
        rows = rng.permutation(num_rows)[: rng.integers(1, num_rows)]
        np.testing.assert_array_equal(run(ops, upload, logits[rows], rows_of(batch, rows)), together[rows])


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 10.0])
def test_sample_whole_vocabulary_top_p_equals_a_full_sort(ops, upload, sampling, scale):
    rng = np.random.default_rng(8)
    num_tokens, num_rows = 30000, 20
    logits = (rng.normal(size=(num_rows, num_tokens)) * scale).astype(np.float32)
    batch = sampling(num_rows, num_token_ids=num_tokens, top_p=0.9)
    tokens = run(ops, upload, logits, batch)
    for row, token in enumerate(tokens.tolist()):
        order = np.lexsort((np.arange(num_tokens), -logits[row]))
        weights = np.exp(logits[row][order].astype(np.float64))
        kept = np.searchsorted(np.cumsum(weights), 0.9 * weights.sum()) + 1
        assert np.flatnonzero(order == token)[0] <= kept
        probabilities = np.zeros(num_tokens)
        probabilities[order[:kept]] = weights[:kept] / weights[:kept].sum()
        number = philox_word(row, 0) / 2**32
        assert probabilities[:token].sum() - 1e-4 <= number <= probabilities[: token + 1].sum() + 1e-4


@pytest.mark.parametrize("options", [{"top_k": 5}, {"top_k": 3000}, {"top_k": 3000, "top_p": 0.5}, {"top_p": 0.5}])
@pytest.mark.parametrize("num_tokens", [2048, 2049, 20000])
def test_sample_cuts_among_many_equals_keep_the_lowest_ids(ops, upload, sampling, num_tokens, options):
    num_rows = 200
    tokens = run(
        ops,
        upload,
        np.zeros((num_rows, num_tokens), np.float32),
        sampling(num_rows, num_token_ids=num_tokens, **options),
    )
    kept = min(options.get("top_k", num_tokens), num_tokens)
    kept = math.ceil(kept * options.get("top_p", 1.0))
    words = [philox_word(row, 0) for row in range(num_rows)]
    assert tokens.tolist() == [word * kept >> 32 for word in words]


@pytest.mark.parametrize("num_tokens", [2048, 30000])
def test_sample_deep_cuts_invert_the_distribution_in_order_of_id(ops, upload, sampling, num_tokens):
    rng = np.random.default_rng(9)
    num_rows = 40
    logits = (rng.normal(size=(num_rows, num_tokens)) * rng.choice([0.1, 1.0], size=(num_rows, 1))).astype(np.float32)
    options = {
        "temperature": rng.choice([0.7, 1.0, 3.0], size=num_rows),
        "top_k": rng.choice([0, 1024, 1025, 1500, num_tokens - 1], size=num_rows),
        "top_p": rng.choice([1.0, 0.5, 0.97], size=num_rows),
        "min_p": rng.choice([0.0, 0.01], size=num_rows),
        "positions": rng.integers(0, 2**34, size=num_rows),
    }
    batch = sampling(num_rows, num_token_ids=num_tokens, **options)
    for row, token in enumerate(run(ops, upload, logits, batch).tolist()):
        order = np.lexsort((np.arange(num_tokens), -logits[row]))
        weights = np.exp((logits[row][order] - logits[row].max()).astype(np.float64) / float(batch.temperature[row]))
        weights[weights < batch.min_p[row]] = 0
        weights[batch.top_k[row] or num_tokens :] = 0
        running = np.cumsum(weights)
        weights[int(running.searchsorted(float(batch.top_p[row]) * running[-1])) + 1 :] = 0
        probabilities = np.zeros(num_tokens)
        probabilities[order] = weights / weights.sum()
        number = philox_word(row, int(batch.positions[row])) / 2**32
        assert probabilities[:token].sum() - 1e-5 <= number <= probabilities[: token + 1].sum() + 1e-5

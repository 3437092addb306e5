"""One answer, however the engine gets there: random traffic through the real scheduler, step loop and runner."""

from pathlib import Path

import pytest

from openinfer_engine.testing import Traffic, check_drafts_in_traffic
from openinfer_gemma import Gemma

TABLES = {"gemma2": 2, "gemma3": 7}
"""Block tables of a sequence: a block holds two layers, or one."""


@pytest.fixture(scope="module", params=TABLES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def traffic(name: str, fixtures: Path) -> Traffic:
    return Traffic(Gemma.definition, fixtures / name, tolerance=1e-3)


def test_answers_alone_are_long_and_varied(traffic: Traffic) -> None:
    traffic.check_varied()


@pytest.mark.parametrize("max_step_tokens", [8, 70])
def test_chunked_prompts_give_the_same_answers(traffic: Traffic, max_step_tokens: int) -> None:
    traffic.serve(seed=max_step_tokens, prefix_cache=False, max_step_tokens=max_step_tokens)


@pytest.mark.parametrize("block_size_tokens", [1, 16])
def test_shared_prefixes_longer_than_windows_give_the_same_answers(traffic: Traffic, block_size_tokens: int) -> None:
    _, stats = traffic.serve(block_size_tokens=block_size_tokens, num_blocks=3200 // block_size_tokens)
    assert stats.cached_tokens > 60


def test_preempted_and_resumed_requests_give_the_same_answers(traffic: Traffic, name: str) -> None:
    _, stats = traffic.serve(num_blocks=8 + 5 * TABLES[name], prefix_cache=False)
    assert stats.preemptions >= 2


def test_ranks_together_give_the_same_answers(traffic: Traffic, name: str) -> None:
    """With everything else at once: chunks, shared prefixes and preemptions."""
    _, stats = traffic.serve(seed=1, tensor_parallel_size=2, max_step_tokens=24, num_blocks=14 + 5 * TABLES[name])
    assert stats.preemptions + stats.cached_tokens >= 2


def test_batch_invariant_operators_give_the_same_bits_alone_and_together(traffic: Traffic, name: str) -> None:
    traffic.check_batch_invariant(num_blocks=8 + 5 * TABLES[name])


def test_drafts_change_no_answer(name: str, fixtures: Path) -> None:
    """Of one drafter that is always right and one that is not; blocks behind windows are given back by true lengths."""
    options = {"num_blocks": 28 + 5 * TABLES[name], "max_step_tokens": 48}
    counts = check_drafts_in_traffic(Gemma.definition, fixtures / name, **options)
    assert all(stats.cached_tokens > 100 for stats in counts)

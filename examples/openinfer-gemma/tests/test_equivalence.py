"""One answer, however the engine gets there: random traffic through the real scheduler, step loop and runner."""

from pathlib import Path

import pytest

from openinfer_engine.testing import Traffic
from openinfer_gemma import Gemma


@pytest.fixture(scope="module", params=["gemma2", "gemma3"])
def traffic(request: pytest.FixtureRequest, fixtures: Path) -> Traffic:
    return Traffic(Gemma.definition, fixtures / request.param, tolerance=1e-3)


def test_answers_alone_are_long_and_varied(traffic: Traffic) -> None:
    traffic.check_varied()


@pytest.mark.parametrize("max_step_tokens", [8, 70])
def test_chunked_prompts_give_the_same_answers(traffic: Traffic, max_step_tokens: int) -> None:
    traffic.serve(seed=max_step_tokens, prefix_cache=False, max_step_tokens=max_step_tokens)


@pytest.mark.parametrize("block_size_tokens", [1, 16])
def test_shared_prefixes_longer_than_windows_give_the_same_answers(traffic: Traffic, block_size_tokens: int) -> None:
    _, stats = traffic.serve(block_size_tokens=block_size_tokens, num_blocks=3200 // block_size_tokens)
    assert stats.cached_tokens > 60


def test_preempted_and_resumed_requests_give_the_same_answers(traffic: Traffic) -> None:
    _, stats = traffic.serve(num_blocks=18, prefix_cache=False)
    assert stats.preemptions >= 2


def test_ranks_together_give_the_same_answers(traffic: Traffic) -> None:
    """With everything else at once: chunks, shared prefixes and preemptions."""
    _, stats = traffic.serve(seed=1, tensor_parallel_size=2, max_step_tokens=24, num_blocks=24)
    assert stats.preemptions + stats.cached_tokens >= 2


def test_batch_invariant_operators_give_the_same_bits_alone_and_together(traffic: Traffic) -> None:
    traffic.check_batch_invariant()

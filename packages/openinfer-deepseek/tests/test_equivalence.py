"""One answer, however the engine gets there: random traffic through the real scheduler, step loop and runner."""

from pathlib import Path

import pytest

from openinfer_deepseek.family import DeepseekV2Definition
from openinfer_engine.testing import Traffic


@pytest.fixture(scope="module")
def traffic(model_dir: Path) -> Traffic:
    return Traffic(DeepseekV2Definition(), model_dir, tolerance=1e-4)


def test_answers_alone_are_long_and_varied(traffic: Traffic) -> None:
    traffic.check_varied()


def test_whole_prompts_in_a_full_batch_give_the_same_answers(traffic: Traffic) -> None:
    traffic.serve(prefix_cache=False)


@pytest.mark.parametrize("max_step_tokens", [8, 70])
def test_chunked_prompts_give_the_same_answers(traffic: Traffic, max_step_tokens: int) -> None:
    _, stats = traffic.serve(seed=max_step_tokens, prefix_cache=False, max_step_tokens=max_step_tokens)
    assert stats.cached_tokens == 0
    assert stats.preemptions == 0


@pytest.mark.parametrize("block_size_tokens", [1, 16])
def test_cached_prefixes_give_the_same_answers(traffic: Traffic, block_size_tokens: int) -> None:
    answers, stats = traffic.serve(block_size_tokens=block_size_tokens, num_blocks=3200 // block_size_tokens)
    assert stats.cached_tokens > 100
    assert sum(answer.cached_tokens > 0 for answer in answers.values()) >= 3


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_preempted_and_resumed_requests_give_the_same_answers(traffic: Traffic, prefix_cache: bool) -> None:
    _, stats = traffic.serve(num_blocks=18, prefix_cache=prefix_cache)
    assert stats.preemptions >= 2


@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_together_give_the_same_answers(traffic: Traffic, ranks: int) -> None:
    """With everything else at once: chunks, a prefix cache and preemptions."""
    _, stats = traffic.serve(seed=1, tensor_parallel_size=ranks, max_step_tokens=24, num_blocks=18)
    assert stats.preemptions >= 1
    assert stats.cached_tokens >= 1


def test_batch_invariant_operators_give_the_same_bits_alone_and_together(traffic: Traffic) -> None:
    traffic.check_batch_invariant()


@pytest.mark.parametrize("ranks", [2, 8])
def test_data_parallel_ranks_give_the_same_answers(traffic: Traffic, ranks: int) -> None:
    """Each with requests and a pool of its own: chunks, cached prefixes, and ranks without rows when others end."""
    _, stats = traffic.serve(seed=1, data_parallel_size=ranks, max_step_tokens=24, num_blocks=18)
    assert stats.cached_tokens >= 1


def test_preempted_requests_resume_on_their_data_parallel_rank(traffic: Traffic) -> None:
    _, stats = traffic.serve(seed=2, data_parallel_size=2, num_blocks=18)
    assert stats.preemptions >= 2

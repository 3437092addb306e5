"""One answer, however the engine gets there: random traffic through the real scheduler, step loop and runner."""

from pathlib import Path
from typing import Any

import pytest

from openinfer_deepseek_v4.family import DeepseekV4Definition
from openinfer_engine.engine_plan import resolve
from openinfer_engine.options import EngineOptions
from openinfer_engine.testing import Traffic


@pytest.fixture(scope="module")
def traffic(model_dir: Path) -> Traffic:
    return Traffic(DeepseekV4Definition(), model_dir, tolerance=1e-3)


def test_answers_alone_are_long_and_varied(traffic: Traffic) -> None:
    traffic.check_varied()


def test_whole_prompts_in_a_full_batch_give_the_same_answers(traffic: Traffic) -> None:
    """State slots are reused: no sequence reads what the last one left there."""
    traffic.serve(prefix_cache=False)


@pytest.mark.parametrize("max_step_tokens", [8, 70])
def test_chunked_prompts_give_the_same_answers(traffic: Traffic, max_step_tokens: int) -> None:
    _, stats = traffic.serve(seed=max_step_tokens, prefix_cache=False, max_step_tokens=max_step_tokens)
    assert stats.preemptions == 0


@pytest.mark.parametrize("block_size_tokens", [1, 16])
def test_restored_states_of_a_prefix_give_the_same_answers(traffic: Traffic, block_size_tokens: int) -> None:
    num_blocks = 3200 // block_size_tokens
    answers, stats = traffic.serve(block_size_tokens=block_size_tokens, num_blocks=num_blocks)
    assert stats.cached_tokens > 60
    assert sum(answer.cached_tokens > 0 for answer in answers.values()) >= 2
    assert stats.state_snapshots > 5


def test_few_copies_of_states_are_evicted_and_the_answers_stay(model_dir: Path, traffic: Traffic) -> None:
    layout = resolve(DeepseekV4Definition(), model_dir, EngineOptions()).layouts[0]
    _, stats = traffic.serve(state_snapshot_bytes=2 * layout.slot_bytes)
    assert stats.state_snapshots <= 2
    assert stats.evicted_state_snapshots > 3


@pytest.mark.parametrize("without", [{"prefix_cache": False}, {"state_snapshot_bytes": 0}])
def test_without_copies_of_states_no_prefix_is_shared(traffic: Traffic, without: dict[str, Any]) -> None:
    _, stats = traffic.serve(**without)
    assert (stats.cached_tokens, stats.state_snapshots) == (0, 0)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_preempted_and_resumed_requests_give_the_same_answers(traffic: Traffic, prefix_cache: bool) -> None:
    _, stats = traffic.serve(num_blocks=18, prefix_cache=prefix_cache)
    assert stats.preemptions >= 2


def test_ranks_together_give_the_same_answers(traffic: Traffic) -> None:
    """With everything else at once: chunks, shared prefixes and preemptions."""
    _, stats = traffic.serve(seed=1, tensor_parallel_size=2, max_step_tokens=24, num_blocks=24)
    assert stats.preemptions + stats.cached_tokens >= 2
    traffic.serve(seed=2, tensor_parallel_size=2, prefix_cache=False, num_blocks=18)


def test_batch_invariant_operators_give_the_same_bits_alone_and_together(traffic: Traffic) -> None:
    traffic.check_batch_invariant()

"""V4's drafting block on a GPU: drafts change no token, and are right about as often as on a CPU.

The host waits for a step with drafts there, and computes what was accepted again where one was refused. Skipped, with
the reason, where there is no GPU.
"""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from v4_bigrams import CONFIG, make_mtp_model

from openinfer_core.errors import Refused
from openinfer_deepseek_v4.family import DeepseekV4Definition
from openinfer_engine import EngineOptions, build_loop, resolve
from openinfer_engine.options import DeviceKind
from openinfer_engine.testing import Answer, random_requests, run_at_once

SIZES: dict[str, Any] = {"num_blocks": 64, "max_num_seqs": 6, "max_model_tokens": 320}
SPECULATIVE = "deepseek-v4-mtp,k=3,adaptive=false"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mtp_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def share_on_cpu(model_dir: Path) -> float:
    return share_of(served(model_dir, DeviceKind.CPU, speculative=SPECULATIVE)[1][0])


def served(model_dir: Path, device: DeviceKind, *, rounds: int = 1, **options: Any) -> tuple[dict[int, Answer], Any]:
    """Answers of the last round, and the engine's counters after each; the longest goes beyond the window."""
    given = EngineOptions(device=device, **SIZES | options)
    try:
        made = build_loop(resolve(DeepseekV4Definition(), model_dir, given))
    except Refused as reason:
        pytest.skip(str(reason))
    sampling: dict[str, Any] = {"max_tokens": 40, "logprobs": 0}
    requests = random_requests(10, vocab_size=CONFIG["vocab_size"], max_prompt_tokens=150, **sampling)
    with closing(made) as loop:
        found = [(run_at_once(loop, requests), loop.stats()) for _ in range(rounds)]
        return found[-1][0], [stats for _, stats in found]


def share_of(stats: Any) -> float:
    assert stats.drafter_faults == 0
    return stats.spec_decode_num_accepted_tokens / stats.spec_decode_num_draft_tokens


def said(answers: dict[int, Answer]) -> dict[int, Any]:
    return {i: (answer.token_ids, [one.logprob for one in answer.logprobs]) for i, answer in answers.items()}


def test_the_fixture_is_drafted_for(share_on_cpu: float) -> None:
    """Else nothing on a GPU would show that its drafts are the CPU's."""
    assert 0.1 < share_on_cpu < 0.95


@pytest.mark.gpu
@pytest.mark.parametrize("capture", [True, False])
def test_the_block_is_right_as_often_as_on_a_cpu_and_changes_no_bit(
    model_dir: Path, share_on_cpu: float, capture: bool
) -> None:
    options: dict[str, Any] = {"cuda_graph": capture, "batch_invariant": True}
    plain, _ = served(model_dir, DeviceKind.CUDA, **options)
    drafted, stats = served(model_dir, DeviceKind.CUDA, speculative=SPECULATIVE, **options)

    assert said(drafted) == said(plain)
    assert abs(share_of(stats[0]) - share_on_cpu) < 0.2 * share_on_cpu


@pytest.mark.gpu
def test_cached_prefixes_are_drafted_after_as_computed_ones(model_dir: Path) -> None:
    """Copies of states have the block's window, and the streams before the next token."""
    _, (first, both) = served(model_dir, DeviceKind.CUDA, rounds=2, speculative=SPECULATIVE, prefix_cache=True)
    assert both.cached_tokens > first.cached_tokens
    accepted, drafted = (
        getattr(both, f"spec_decode_num_{name}_tokens") - getattr(first, f"spec_decode_num_{name}_tokens")
        for name in ("accepted", "draft")
    )
    assert abs(accepted / drafted - share_of(first)) < 0.1 * share_of(first)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2])
def test_ranks_draft_alike(model_dir: Path, share_on_cpu: float, ranks: int) -> None:
    options: dict[str, Any] = {"tensor_parallel_size": ranks, "batch_invariant": True}
    plain, _ = served(model_dir, DeviceKind.CUDA, **options)
    drafted, stats = served(model_dir, DeviceKind.CUDA, speculative=SPECULATIVE, **options)

    assert said(drafted) == said(plain)
    assert abs(share_of(stats[0]) - share_on_cpu) < 0.2 * share_on_cpu

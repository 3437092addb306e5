"""V3's drafting layer on a GPU: drafts change no token but at ties, and are right about as often as on a CPU.

Attention over latents has no batch-invariant kernel there, so that steps of other rows round differently. Skipped,
with the reason, where there is no GPU.
"""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from mtp_bigrams import CONFIG, make_mtp_model

from openinfer_core.errors import Refused
from openinfer_deepseek.family import DeepseekV3Definition
from openinfer_engine import EngineOptions, build_loop, resolve
from openinfer_engine.options import DeviceKind
from openinfer_engine.testing import Answer, random_requests, run_at_once

pytestmark = pytest.mark.gpu
SIZES: dict[str, Any] = {"num_blocks": 64, "max_num_seqs": 6, "max_model_tokens": 160}
SPECULATIVE = "deepseek-mtp,k=3,adaptive=false"
TIE_NATS = 0.5
"""How far two candidates' log-probabilities may be from each other where the one is sampled instead of the other: BF16
turns near ties of the router, and so experts."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mtp_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def share_on_cpu(model_dir: Path) -> float:
    return share_of(served(model_dir, DeviceKind.CPU, speculative=SPECULATIVE)[1][0])


def served(model_dir: Path, device: DeviceKind, *, rounds: int = 1, **options: Any) -> tuple[dict[int, Answer], Any]:
    """Greedy answers of the last round, and the engine's counters after each."""
    given = EngineOptions(device=device, **SIZES, **options)
    try:
        made = build_loop(resolve(DeepseekV3Definition(), model_dir, given))
    except Refused as reason:
        pytest.skip(str(reason))
    requests = random_requests(10, vocab_size=CONFIG["vocab_size"], max_prompt_tokens=40, logprobs=20)
    with closing(made) as loop:
        found = [(run_at_once(loop, requests), loop.stats()) for _ in range(rounds)]
        return found[-1][0], [stats for _, stats in found]


def share_of(stats: Any) -> float:
    assert stats.drafter_faults == 0
    return stats.spec_decode_num_accepted_tokens / stats.spec_decode_num_draft_tokens


def check_answers(found: dict[int, Answer], expected: dict[int, Answer]) -> None:
    for request_id, plain in expected.items():
        for place, (token, other) in enumerate(zip(plain.token_ids, found[request_id].token_ids, strict=False)):
            if token != other:
                scores = dict(zip(plain.logprobs[place].top_ids, plain.logprobs[place].top_logprobs, strict=True))
                assert plain.logprobs[place].logprob - scores.get(other, -100.0) < TIE_NATS, (request_id, place)
                break  # from here on they are answers to different texts


@pytest.mark.parametrize("capture", [True, False])
def test_the_layer_is_right_as_often_as_on_a_cpu_and_changes_no_token(
    model_dir: Path, share_on_cpu: float, capture: bool
) -> None:
    plain, _ = served(model_dir, DeviceKind.CUDA, cuda_graph=capture)
    drafted, stats = served(model_dir, DeviceKind.CUDA, cuda_graph=capture, speculative=SPECULATIVE)

    check_answers(drafted, plain)
    assert share_on_cpu > 0.05
    assert abs(share_of(stats[0]) - share_on_cpu) < 0.3 * share_on_cpu


def test_cached_prefixes_are_drafted_after_as_computed_ones(model_dir: Path) -> None:
    """Blocks have hidden states at their ends, and the layer's latents."""
    _, (first, both) = served(model_dir, DeviceKind.CUDA, rounds=2, speculative=SPECULATIVE, prefix_cache=True)
    assert both.cached_tokens > first.cached_tokens
    accepted, drafted = (
        getattr(both, f"spec_decode_num_{name}_tokens") - getattr(first, f"spec_decode_num_{name}_tokens")
        for name in ("accepted", "draft")
    )
    assert abs(accepted / drafted - share_of(first)) < 0.1 * share_of(first)

"""Drafts change how many tokens a step yields, and nothing that is answered: states are set back after refused ones."""

from pathlib import Path
from typing import Any

import pytest

from openinfer_deepseek_v4.family import DeepseekV4Definition
from openinfer_engine.testing import DraftKind, check_drafts, check_drafts_in_traffic


def test_answers_with_drafts_are_those_without(model_dir: Path) -> None:
    check_drafts(DeepseekV4Definition(), model_dir, seeds=[0])


def test_answers_of_ranks_with_drafts_are_those_without(model_dir: Path) -> None:
    check_drafts(DeepseekV4Definition(), model_dir, kinds=[DraftKind.HOSTILE], seeds=[2], tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("happens", "options"),
    [
        ("preemptions", {"max_step_tokens": 24, "num_blocks": 19}),
        ("tier_tokens", {"num_blocks": 19, "kv_tier": ["host=16MiB"]}),
        ("cached_tokens", {"num_blocks": 40, "tensor_parallel_size": 2}),
    ],
)
def test_answers_of_an_engine_with_drafts_are_those_without(
    model_dir: Path, happens: str, options: dict[str, Any]
) -> None:
    counts = check_drafts_in_traffic(DeepseekV4Definition(), model_dir, kinds=[DraftKind.HOSTILE], **options)
    assert sum(getattr(stats, happens) for stats in counts) > 0

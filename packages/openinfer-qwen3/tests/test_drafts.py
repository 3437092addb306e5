"""Drafts change how many tokens a step yields, and nothing that is answered."""

from pathlib import Path

from openinfer_engine.testing import check_drafts
from openinfer_qwen3.family import Qwen3Definition


def test_answers_with_drafts_are_those_without(model_dir: Path) -> None:
    check_drafts(Qwen3Definition(), model_dir)


def test_answers_of_ranks_with_drafts_are_those_without(fixtures: Path) -> None:
    check_drafts(Qwen3Definition(), fixtures / "tied", seeds=[2], tensor_parallel_size=2)

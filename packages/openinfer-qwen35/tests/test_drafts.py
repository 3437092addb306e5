"""Drafts change how many tokens a step yields, and nothing that is answered: states are set back after refused ones."""

from pathlib import Path

from openinfer_engine.testing import check_drafts
from openinfer_qwen35.family import Qwen35Definition


def test_answers_with_drafts_are_those_without(model_dir: Path) -> None:
    check_drafts(Qwen35Definition(), model_dir)


def test_answers_of_ranks_with_drafts_are_those_without(model_dir: Path) -> None:
    ranks = 3 if model_dir.name == "text_untied" else 2
    check_drafts(Qwen35Definition(), model_dir, seeds=[2], tensor_parallel_size=ranks)

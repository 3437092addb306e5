"""Drafts change how many tokens a step yields, and nothing that is answered: states are set back after refused ones."""

from pathlib import Path

from openinfer_deepseek_v4.family import DeepseekV4Definition
from openinfer_engine.testing import DraftKind, check_drafts


def test_answers_with_drafts_are_those_without(model_dir: Path) -> None:
    check_drafts(DeepseekV4Definition(), model_dir, seeds=[0])


def test_answers_of_ranks_with_drafts_are_those_without(model_dir: Path) -> None:
    check_drafts(DeepseekV4Definition(), model_dir, kinds=[DraftKind.HOSTILE], seeds=[2], tensor_parallel_size=2)

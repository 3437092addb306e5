"""Recorded logits with drafts on, and greedy answers over drafts against the model in float32."""

import shutil
from pathlib import Path

import pytest

from openinfer_engine.options import KvCacheDtype
from openinfer_engine.testing import check_greedy_drafts, check_recorded_drafts, record_golden
from openinfer_qwen3.family import Qwen3Definition

TOLERANCE = 1e-4


def test_rows_with_drafts_give_the_recorded_log_probabilities(model_dir: Path) -> None:
    check_recorded_drafts(Qwen3Definition(), model_dir, tolerance=TOLERANCE)


def test_rows_with_drafts_of_two_ranks_give_the_recorded_log_probabilities(fixtures: Path) -> None:
    check_recorded_drafts(Qwen3Definition(), fixtures / "tied", tolerance=TOLERANCE, tensor_parallel_size=2)


def test_greedy_answers_over_drafts_are_the_likeliest_tokens(model_dir: Path) -> None:
    check_greedy_drafts(Qwen3Definition(), model_dir, tolerance=TOLERANCE)


def test_models_that_no_reference_recorded_are_gated_by_the_float32_model(fixtures: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(fixtures / "untied_yarn", folder, ignore=shutil.ignore_patterns("logits.npz"))
    record_golden(Qwen3Definition(), folder, (70, 30, 7))
    found = check_recorded_drafts(Qwen3Definition(), folder, tolerance=TOLERANCE)
    assert found > 0.0  # spans are summed in another order than whole sequences


def test_kv_that_is_rounded_is_noticed(fixtures: Path) -> None:
    with pytest.raises(AssertionError, match="log-probabilities differ by"):
        check_recorded_drafts(
            Qwen3Definition(), fixtures / "tied", tolerance=TOLERANCE, kv_cache_dtype=KvCacheDtype.FP8
        )


def test_greedy_answers_of_kv_that_is_rounded_are_noticed(fixtures: Path) -> None:
    with pytest.raises(AssertionError, match="less likely"):
        check_greedy_drafts(Qwen3Definition(), fixtures / "tied", tolerance=TOLERANCE, kv_cache_dtype=KvCacheDtype.FP8)

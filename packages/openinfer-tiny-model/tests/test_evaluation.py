"""The figures recorded by `tools/tiny_model/evaluate.py` meet what the package promises."""

import json
from typing import Any

import pytest

from openinfer_tiny_model import model_dir


@pytest.fixture(scope="module")
def evaluation() -> dict[str, Any]:
    return json.loads((model_dir() / "evaluation.json").read_text(encoding="utf-8"))


def test_nine_of_ten_held_out_facts_are_answered(evaluation: dict[str, Any]) -> None:
    assert evaluation["facts"]["held_out_pairs"] >= 2000
    assert evaluation["facts"]["held_out_accuracy"] >= 0.9
    assert min(evaluation["facts"]["held_out_accuracy_by_form"].values()) >= 0.9


def test_capital_of_france_is_paris_in_completion_and_chat(evaluation: dict[str, Any]) -> None:
    assert evaluation["completions"]["The capital of France is"] == " Paris.<|endoftext|>"
    for answer in evaluation["chats"]["What is the capital of France?"].values():
        assert answer.endswith("Paris.<|im_end|>")


@pytest.mark.parametrize(
    ("split", "well_formed", "right_function"),
    [
        ("training", 0.95, 0.95),
        ("new_wording", 0.95, 0.9),
        ("invented_tool", 0.95, 0.85),
        ("unseen_tool", 0.75, 0.55),  # a toy: it often says that no function fits one whose words it never saw
        ("fresh_tool", 0.75, 0.55),
    ],
)
def test_fitting_function_is_called_as_often_as_the_readme_says(
    evaluation: dict[str, Any], split: str, well_formed: float, right_function: float
) -> None:
    assert evaluation["tool_calls"][split]["requests"] >= 300
    assert evaluation["tool_calls"][split]["well_formed"] >= well_formed
    assert evaluation["tool_calls"][split]["right_function"] >= right_function


def test_weather_questions_of_client_libraries_are_answered_with_a_call(evaluation: dict[str, Any]) -> None:
    asked = [case for case in evaluation["tool_examples"] if "weather" in case["question"]]

    assert len(asked) >= 8
    assert all(case["is_right"] for case in asked)


def test_loss_on_held_out_documents_is_recorded_for_every_kind(evaluation: dict[str, Any]) -> None:
    losses = evaluation["held_out_loss_nats_per_token"]

    assert set(losses) == {"facts", "sums", "stories", "chats", "tools"}
    assert all(0 < loss < 1 for loss in losses.values())


def test_training_record_says_how_it_was_trained() -> None:
    training = json.loads((model_dir() / "training.json").read_text(encoding="utf-8"))

    for stage in training["stages"]:
        assert stage["steps"] * stage["tokens_per_step"] > 0
        assert {"seed", "documents", "device", "peak_learning_rate"} <= set(stage)

"""What `--speculative` says, and what it refuses."""

import pytest

from openinfer_core import InvalidRequest
from openinfer_engine import EngineOptions
from openinfer_engine.speculation import Speculation


def test_a_setting_names_a_drafter_and_its_options() -> None:
    assert EngineOptions().speculation is None
    assert EngineOptions(speculative="off").speculation is None
    assert EngineOptions(speculative="auto").speculation == Speculation(name="auto", max_drafts=4, options={})
    assert EngineOptions(speculative="auto,adaptive=false").speculation == Speculation(
        name="auto", max_drafts=4, is_adaptive=False, options={}
    )
    found = EngineOptions(speculative="ngram, k=6 ,n_max=3").speculation
    assert found == Speculation(name="ngram", max_drafts=6, options={"n_max": "3"})


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("", "does not begin with auto, off or the name of a drafter"),
        ("k=4", "does not begin with auto, off or the name of a drafter"),
        ("ngram,4", "'4' is no option: NAME=VALUE, as in ngram,k=4"),
        ("ngram,k=", "'k=' is no option"),
        ("ngram,k=4,k=5", "k is given twice"),
        ("ngram,k=0", "k is 0; it must be between 1 and 64"),
        ("ngram,k=65", "k is 65; it must be between 1 and 64"),
        ("ngram,k=-1", "k is -1; it must be between 1 and 64"),
        ("ngram,k=٤", "it must be between 1 and 64"),
        ("ngram,adaptive=maybe", "adaptive is maybe; possible are true and false"),
        ("off,k=4", "off takes no options, and k was given"),
    ],
)
def test_a_setting_that_says_nothing_clear_is_refused(setting: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=f"speculative: .*{says}") as refusal:
        EngineOptions(speculative=setting)
    assert refusal.value.field == "speculative"

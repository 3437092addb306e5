"""Options of a scheduler's own: bounded, named once, and refused by a scheduler that does not know them."""

import pytest

from openinfer_core import InvalidRequest, Refused
from openinfer_core.scheduler_options import MAX_VALUE_CHARACTERS, parse_scheduler_options, refuse_unknown_options
from openinfer_core.scheduling import SchedulerConfig


def config_with(**options: str) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=1, block_size_tokens=1, max_num_seqs=1, max_step_tokens=1, max_model_tokens=1, options=options
    )


def test_parse_scheduler_options_splits_at_the_first_sign() -> None:
    options = parse_scheduler_options(["chunk=64", "rule=a=b", "empty="], field="scheduler_option")
    assert options == {"chunk": "64", "rule": "a=b", "empty": ""}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["chunk"], "'chunk' is not NAME=VALUE"),
        (["a=1", "a=2"], "the scheduler option 'a' is given twice"),
        (["=1"], "'' is no name of a scheduler option"),
        (["Chunk=1"], "'Chunk' is no name"),
        (["a" * 65 + "=1"], "is no name"),
        (["a=" + "x" * (MAX_VALUE_CHARACTERS + 1)], "must be at most 4096 printable characters"),
        (["a=x\ny"], "must be at most 4096 printable characters"),
        ([f"o{i}=1" for i in range(65)], "65 scheduler options; at most 64 are possible"),
    ],
)
def test_parse_scheduler_options_out_of_range_is_refused(settings: list[str], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        parse_scheduler_options(settings, field="scheduler_option")
    assert caught.value.field == "scheduler_option"


def test_config_checks_its_options() -> None:
    assert config_with(chunk="64").options == {"chunk": "64"}
    with pytest.raises(InvalidRequest, match="is no name of a scheduler option"):
        config_with(Chunk="64")


def test_unknown_options_are_refused_with_the_known_ones() -> None:
    refuse_unknown_options({"chunk": "1"}, known=("chunk", "age"))
    with pytest.raises(Refused, match=r"^the scheduler knows no option chnk, x; it has age, chunk$"):
        refuse_unknown_options({"x": "", "chnk": "1", "age": "2"}, known=("chunk", "age"))
    with pytest.raises(Refused, match=r"^the scheduler knows no option chunk; it has no options$"):
        refuse_unknown_options({"chunk": "1"}, known=())

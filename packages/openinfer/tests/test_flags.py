"""Flags made from Structs."""

import argparse

import msgspec
import pytest

from openinfer.commands.flag_parser import FlagParser
from openinfer.flags import add_flags, field_docstrings, read_flags
from openinfer_core import InvalidRequest, SamplingParams


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """For the tests."""

    count: int = 3
    """How many, at
    most."""
    size_bytes: int | None = None
    ratio: float = 0.5
    fast: bool = True
    names: tuple[str, ...] = ()
    weights: dict[str, float] = {}
    places: list[str] = []

    def __post_init__(self) -> None:
        if self.count < 0:
            raise InvalidRequest("count is negative", field="count")


class Off(msgspec.Struct):
    """For those of which the default is false."""

    count: int = 3
    fast: bool = False


def parse(*argv: str) -> Options:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, Options)
    return read_flags(parser.parse_args(argv), Options)


def test_defaults_stay_when_nothing_is_given() -> None:
    assert parse() == Options()


def test_help_shows_defaults_as_they_are_typed() -> None:
    class Shown(msgspec.Struct):
        cache_bytes: int = 3 << 30
        odd_bytes: int = 1000
        fast: bool = True
        key_file: str = ""

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, Shown)
    said = " ".join(parser.format_help().split())
    assert "(default: 3GiB)" in said
    assert "(default: 1000)" in said
    assert "(default: true)" in said
    assert "--key-file FILE" in said


def test_every_kind_of_value_is_converted() -> None:
    given = parse(
        "--count",
        "7",
        "--size-bytes=1.5GiB",
        "--ratio",
        "0.25",
        "--fast=false",
        "--names",
        "a,b",
        "--weights",
        "x=2,y=0.5",
        "--places",
        "a=1,b=2",
        "--places=c",
    )
    assert given == Options(
        count=7,
        size_bytes=3 * 2**29,
        ratio=0.25,
        fast=False,
        names=("a", "b"),
        weights={"x": 2.0, "y": 0.5},
        places=["a=1,b=2", "c"],
    )


@pytest.mark.parametrize(
    "argv",
    [("--count", "many"), ("--count=-1",), ("--fast", "perhaps"), ("--weights", "x"), ("--size-bytes", "3parsecs")],
)
def test_a_wrong_value_is_refused_by_the_flags_name(argv: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest, match=argv[0].split("=")[0]):
        parse(*argv)


def test_an_unknown_or_abbreviated_flag_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--counts", "--coun"):
        with pytest.raises(SystemExit):
            parse(flag, "3")
        assert "unrecognized arguments" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "fast", "count"),
    [
        (("--fast",), True, 3),
        (("--fast", "--count", "7"), True, 7),
        (("--count", "7", "--fast"), True, 7),
        (("--fast", "false", "--count", "7"), False, 7),
        (("--fast=false",), False, 3),
    ],
)
def test_a_flag_of_true_or_false_is_true_alone(argv: tuple[str, ...], fast: bool, count: int) -> None:
    parser = FlagParser()
    add_flags(parser, Off if fast else Options)
    found = read_flags(parser.parse_strictly(argv), Off if fast else Options)
    assert (found.fast, found.count) == (fast, count)


def test_help_is_the_fields_docstring() -> None:
    assert field_docstrings(Options)["count"] == "How many, at most."
    assert field_docstrings(SamplingParams)["temperature"] == "0 is greedy."

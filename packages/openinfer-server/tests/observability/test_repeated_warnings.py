"""Warnings that strangers cause again and again are a line a minute."""

import logging
import time

import pytest

from openinfer_server.observability.repeated_warnings import RepeatedWarnings


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def written(records, repeated) -> list[str]:
    return [record.getMessage() for record in records if repeated.filter(record)]


def record(message: str, level: int = logging.WARNING) -> logging.LogRecord:
    return logging.LogRecord("uvicorn.error", level, "", 0, message, None, None)


def test_warning_comes_once_a_minute_with_how_often(clock):
    repeated = RepeatedWarnings()
    assert written([record("no HTTP") for _ in range(1000)], repeated) == ["no HTTP"]
    clock[0] += 60.0
    assert written([record("no HTTP"), record("no HTTP")], repeated) == ["no HTTP (999 more since the last line)"]


def test_other_warnings_and_errors_pass(clock):
    repeated = RepeatedWarnings()
    records = [record("a"), record("b"), record("a"), record("a", logging.ERROR), record("a", logging.ERROR)]
    assert written(records, repeated) == ["a", "b", "a", "a"]


def test_messages_that_are_all_different_take_bounded_memory(clock):
    repeated = RepeatedWarnings()
    first = record("first")
    assert written([first, *(record(str(number)) for number in range(100))], repeated) == [
        "first",
        *map(str, range(100)),
    ]
    assert repeated.filter(first)  # it was forgotten

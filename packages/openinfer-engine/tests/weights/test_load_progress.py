"""The line of progress while weights load: rewritten on a terminal, absent from a log."""

import io
from itertools import count

import pytest

from openinfer_engine.weights.load_progress import LoadProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_sees_the_line_rewritten_and_the_total_at_the_end() -> None:
    terminal, seconds = Terminal(), count()
    with LoadProgress(4_000_000_000, stream=terminal, clock=lambda: float(next(seconds))) as progress:
        progress.advance(1_000_000_000)
    shown = terminal.getvalue().split("\r\x1b[2K")
    assert shown[1].startswith("openinfer: weights 1.0 of 4.0 GB, ")
    assert shown[2].startswith("openinfer: weights 4.0 of 4.0 GB, ")
    assert shown[2].endswith("GB/s\n")


def test_failed_load_does_not_claim_the_total() -> None:
    terminal, seconds = Terminal(), count()
    progress = LoadProgress(4_000_000_000, stream=terminal, clock=lambda: float(next(seconds)))

    def load() -> None:
        with progress:
            progress.advance(1_000_000_000)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        load()
    assert "4.0 of 4.0" not in terminal.getvalue()


def test_log_sees_nothing() -> None:
    log = io.StringIO()
    with LoadProgress(1, stream=log) as progress:
        progress.advance(1)
    assert log.getvalue() == ""

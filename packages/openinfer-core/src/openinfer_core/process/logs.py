"""The log of a process on standard error: a line per record, as text or as JSON, written by a thread of its own.

    2026-11-23T07:20:01.123Z INFO openinfer.server: request method=POST route=/v1/completions status=200 ...
    {"time":"2026-11-23T07:20:01.123Z","level":"INFO","logger":"openinfer.server","message":"request","method":"POST",...}

A record is formatted where it is made and then handed over, so a pipe that is read too slowly holds up no request and
no step. Beyond `MAX_LINES` waiting lines the next ones are dropped, and a line says how many. `OPENINFER_LOG_LEVEL` and
`OPENINFER_LOG_FORMAT` are for a process and those that it starts. A record's attribute `fields`, a mapping, becomes
`name=value` after the message, or members of the JSON object.
"""

import contextlib
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import msgspec

from openinfer_core.errors import Refused

LEVEL_VARIABLE = "OPENINFER_LOG_LEVEL"
FORMAT_VARIABLE = "OPENINFER_LOG_FORMAT"
MAX_LINES = 10_000
_FLUSH_S = 1.0
_QUOTED = frozenset(' "=\n\r\t')


class LogFormat(StrEnum):
    """How a record is written."""

    TEXT = "text"
    JSON = "json"


def set_up_logs(environ: Mapping[str, str]) -> None:
    """Logs to standard error, unless this process has handlers already; `Refused` for an unknown level or format."""
    level = environ.get(LEVEL_VARIABLE, "INFO")
    levels = logging.getLevelNamesMapping()
    if level.upper() not in levels:
        possible = ", ".join(sorted(levels, key=levels.__getitem__))
        raise Refused(f"{LEVEL_VARIABLE} is {level!r}; possible are {possible}")
    form = environ.get(FORMAT_VARIABLE, LogFormat.TEXT)
    if form not in tuple(LogFormat):
        raise Refused(f"{FORMAT_VARIABLE} is {form!r}; possible are {', '.join(LogFormat)}")
    root = logging.getLogger()
    if not root.handlers:
        handler = BoundedHandler(_write)
        handler.setFormatter(JsonFormatter() if form == LogFormat.JSON else TextFormatter())
        root.addHandler(handler)
        root.setLevel(levels[level.upper()])


def label_logs(label: str) -> None:
    """Puts what this process is, such as `rank 1`, into every line of its log."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, TextFormatter | JsonFormatter):
            handler.formatter.label = label


class BoundedHandler(logging.Handler):
    """Hands formatted lines to a thread that writes them; `dropped` counts those for which there was no room.

    Args:
        write: takes lines with their ends; may block.
        max_lines: how many may wait.
    """

    def __init__(self, write: Callable[[str], None], *, max_lines: int = MAX_LINES) -> None:
        super().__init__()
        self.dropped = 0
        self._write = write
        self._max_lines = max_lines
        self._lines: deque[str] = deque()
        self._unsaid = 0
        self._is_writing = False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="openinfer-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001 - a record with wrong arguments is logging's to report, and ends nothing
            self.handleError(record)
            return
        with self._changed:
            if len(self._lines) < self._max_lines:
                self._lines.append(line)
            else:
                self.dropped += 1
                self._unsaid += 1
            self._changed.notify_all()

    def flush(self) -> None:
        """Waits for what is queued, for a second at most; logging calls it at the end of the process."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lines and not self._is_writing, timeout=_FLUSH_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._lines)
                lines = list(self._lines)
                self._lines.clear()
                unsaid, self._unsaid = self._unsaid, 0
                self._is_writing = True
            if unsaid:
                lines.append(self.format(_of_dropped(unsaid)))
            with contextlib.suppress(OSError, ValueError):  # nothing is left to tell it to
                self._write("".join(f"{line}\n" for line in lines))


class TextFormatter(logging.Formatter):
    """`TIME LEVEL LOGGER: MESSAGE name=value ...`; the time is UTC."""

    def __init__(self) -> None:
        super().__init__()
        self.label = ""

    def format(self, record: logging.LogRecord) -> str:
        name = f"{record.name}, {self.label}" if self.label else record.name
        parts = [f"{_time_of(record)} {record.levelname} {name}: {record.getMessage()}"]
        parts += [f"{key}={_as_text(value)}" for key, value in _fields_of(record).items()]
        line = " ".join(parts)
        return line if record.exc_info is None else f"{line}\n{self.formatException(record.exc_info)}"


class JsonFormatter(logging.Formatter):
    """One JSON object per record."""

    def __init__(self) -> None:
        super().__init__()
        self.label = ""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time_of(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self.label:
            line["process"] = self.label
        line |= _fields_of(record)
        if record.exc_info is not None:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def _fields_of(record: logging.LogRecord) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = getattr(record, "fields", {})
    return fields


def _time_of(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _as_text(value: Any) -> str:
    text = str(value)
    return msgspec.json.encode(text).decode() if not text or _QUOTED.intersection(text) else text


def _of_dropped(number: int) -> logging.LogRecord:
    text = "%d lines of the log were dropped: standard error is read too slowly"
    return logging.LogRecord("openinfer.log", logging.WARNING, __file__, 0, text, (number,), None)


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()

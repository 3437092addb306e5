"""The log: its lines, and that no reader of it can hold up the process."""

import json
import logging
import re
import subprocess
import sys
import threading

import pytest

from openinfer_core import Refused
from openinfer_core.process.logs import BoundedHandler, JsonFormatter, TextFormatter, set_up_logs

WAIT_S = 30


def record(text: str = "hello %s", *args: object, **further: object) -> logging.LogRecord:
    made = logging.LogRecord("openinfer.server", logging.INFO, __file__, 1, text, args, None)
    made.__dict__.update(further)
    return made


def test_text_has_time_level_name_and_fields_on_one_line() -> None:
    line = TextFormatter().format(
        record("hello %s", "you", fields={"status": 200, "id": "a b", "empty": "", "nl": "x\ny"})
    )
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO openinfer\.server: hello you "
        r'status=200 id="a b" empty="" nl="x\\ny"',
        line,
    )


def test_json_has_fields_as_members_and_the_label_of_the_process() -> None:
    formatter = JsonFormatter()
    formatter.label = "rank 1"
    line = json.loads(formatter.format(record("hello", fields={"status": 200, "ttft_ms": 1.5})))
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "INFO",
        "logger": "openinfer.server",
        "message": "hello",
        "process": "rank 1",
        "status": 200,
        "ttft_ms": 1.5,
    }


def test_a_reader_that_stands_still_costs_lines_and_no_time_and_their_number_is_said() -> None:
    blocked, goes_on = threading.Event(), threading.Event()
    written: list[str] = []

    def write(text: str) -> None:
        blocked.set()
        assert goes_on.wait(WAIT_S)
        written.append(text)

    handler = BoundedHandler(write, max_lines=3)
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.emit(record("first"))
    assert blocked.wait(WAIT_S)
    for number in range(5):  # none of these waits: the writer stands still
        handler.emit(record("%s", number))
    assert handler.dropped == 2
    goes_on.set()
    handler.flush()
    dropped = "2 lines of the log were dropped: standard error is read too slowly"
    assert "".join(written) == f"first\n0\n1\n2\n{dropped}\n"


def test_a_broken_pipe_ends_nothing() -> None:
    def write(text: str) -> None:
        raise BrokenPipeError

    handler = BoundedHandler(write)
    for _ in range(3):
        handler.emit(record("x"))
        handler.flush()


def test_lines_of_a_process_that_ends_are_written_and_every_one_once() -> None:
    code = (
        "import logging, os; from openinfer_core.process.logs import label_logs, set_up_logs\n"
        "set_up_logs({'OPENINFER_LOG_FORMAT': 'json', 'OPENINFER_LOG_LEVEL': 'debug'}); label_logs('x')\n"
        "[logging.getLogger('a').debug('%d', number) for number in range(1000)]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert [json.loads(line)["message"] for line in done.stderr.splitlines()] == [str(number) for number in range(1000)]


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"OPENINFER_LOG_LEVEL": "loud"}, "OPENINFER_LOG_LEVEL is 'loud'; possible are NOTSET, DEBUG"),
        ({"OPENINFER_LOG_FORMAT": "xml"}, "OPENINFER_LOG_FORMAT is 'xml'; possible are text, json"),
    ],
)
def test_an_unknown_level_or_format_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(Refused, match=message):
        set_up_logs(environ)

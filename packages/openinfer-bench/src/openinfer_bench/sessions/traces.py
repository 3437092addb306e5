"""Files of recorded sessions: which format they have, and reading them."""

import gzip
from collections.abc import Iterator
from pathlib import Path

from openinfer_bench.sessions.session import Session
from openinfer_bench.sessions.tracelab import read_tracelab
from openinfer_bench.sessions.weka import read_weka
from openinfer_core import InvalidRequest


def read_sessions(path: Path) -> list[Session]:
    """The sessions of a file, or of all files of a folder by name.

    Weka's sessions are a file each (`.json`), or a line each (`.jsonl`); TraceLab's rounds are a line each. Either
    may be compressed (`.gz`).

    Raises:
        InvalidRequest: there is no such file, or it has neither format.
    """
    if path.is_dir():
        files = [file for file in sorted(path.iterdir()) if ".json" in file.suffixes or ".jsonl" in file.suffixes]
        return [session for file in files for session in read_sessions(file)]
    if not path.is_file():
        raise InvalidRequest(f"there is no trace {path}", field="trace")
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rb") as file:
        if ".jsonl" not in path.suffixes:
            return [read_weka(file.read())]
        lines: Iterator[bytes] = iter(file)
        first = next(lines, b"")
        if b'"round_index"' in first:
            return read_tracelab([first, *lines])
        return [read_weka(line) for line in (first, *lines) if line.strip()]

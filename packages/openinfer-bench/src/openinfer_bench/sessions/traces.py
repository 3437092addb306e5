"""Files of recorded sessions: which format they have, and reading them."""

import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path

from openinfer_bench.sessions.session import Session
from openinfer_bench.sessions.tracelab import read_tracelab
from openinfer_bench.sessions.weka import read_weka
from openinfer_core import InvalidRequest


def read_sessions(path: Path) -> list[Session]:
    """The sessions of a file, or of all files of a folder by name.

    Weka's sessions are a file each (`.json`), or a line each (`.jsonl`); TraceLab's rounds are a line each. Either
    may be compressed (`.gz`). Sessions that have a name in common are different ones all the same, and get names apart
    (`name#2`).

    Raises:
        InvalidRequest: there is no such file, or it cannot be read, has neither format, or has no session.
    """
    files = _files(path) if path.is_dir() else [path]
    taken: set[str] = set()
    sessions = [session for file in files for session in _read(file, taken)]
    if not sessions:
        raise InvalidRequest(f"there is no session in {path}", field="trace")
    return sessions


def _files(folder: Path) -> list[Path]:
    found: list[Path] = []
    for path in sorted(folder.iterdir()):
        if ".json" in path.suffixes or ".jsonl" in path.suffixes:
            found += _files(path) if path.is_dir() else [path]
    return found


def _read(path: Path, taken: set[str]) -> list[Session]:
    if not path.is_file():
        raise InvalidRequest(f"there is no trace {path}", field="trace")
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as file:
            lines = [file.read()] if ".jsonl" not in path.suffixes else file.readlines()
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}", field="trace") from None
    try:
        return [read_weka(lines[0], taken)] if ".jsonl" not in path.suffixes else _read_lines(lines, taken)
    except InvalidRequest as error:
        raise InvalidRequest(f"{path}: {error}", field="trace") from None


def _read_lines(lines: Sequence[bytes], taken: set[str]) -> list[Session]:
    if b'"round_index"' in next(filter(bytes.strip, lines), b""):
        return read_tracelab(lines, taken)
    sessions: list[Session] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                sessions.append(read_weka(line, taken))
            except InvalidRequest as error:
                raise InvalidRequest(f"line {number}: {error}", field="trace") from None
    return sessions

"""Checks: of values that come from users, models and other processes, and of our own books."""

import re
from collections.abc import Iterable

from openinfer_kv_cache.errors import IntegrityError, KvConfigError

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
MAX_TAG_CHARS = 512
MAX_COUNT = 2**31 - 1
MAX_LAYERS = 4096


def check_count(where: str, value: int, *, least: int = 1, most: int = MAX_COUNT) -> None:
    if not least <= value <= most:
        raise KvConfigError(f"{where} is {value}; it must be in {least} .. {most}")


def check_name(where: str, value: str) -> None:
    if not _NAME.fullmatch(value):
        raise KvConfigError(f"{where} is {value!r}; it must be a lower-case identifier of at most 64 characters")


def check_tag(where: str, value: str) -> None:
    if not (0 < len(value) <= MAX_TAG_CHARS and value.isascii() and value.isprintable()):
        raise KvConfigError(f"{where} is {value!r}; it must be 1 to {MAX_TAG_CHARS} printable ASCII characters")


def check_distinct(where: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise KvConfigError(f"{where} names {name!r} twice")
        seen.add(name)


def require(condition: bool, contradiction: str) -> None:  # noqa: FBT001 -- an assertion's condition
    if not condition:
        raise IntegrityError(contradiction)

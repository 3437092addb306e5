"""`Unwrapped`: arguments that a model put into an object of their own, `{"arguments": {…}}`, without it.

Only where the function has no parameter of that name. Arguments that do not begin so are handed on as they come, those
that do when they are whole.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from openinfer_server.parsers.syntax.typed_values import parts_of

WRAPPER = "arguments"
MAX_HELD = 2**20  # characters of arguments that are held; longer ones are handed on as they stand
_BEGINS = f'{{"{WRAPPER}":{{'
_OPENING = re.compile(rf'\s*\{{\s*"{WRAPPER}"\s*:\s*')
_CLOSING = re.compile(r"\s*\}\s*\Z")
_SPACES = re.compile(r"\s+")


def may_be_wrapped(schema: Mapping[str, Any]) -> bool:
    """Whether an object `arguments` cannot be what a function's schema asks for."""
    return not any(part is None or _has_property(part) for part in parts_of(schema, root=schema))


def _has_property(schema: Mapping[str, Any]) -> bool:
    described: object = schema.get("properties")
    return isinstance(described, Mapping) and WRAPPER in described


class Unwrapped:
    """Arguments of one call on their way to `emit`."""

    __slots__ = ("_emit", "_held", "_is_wrapped", "_num_held")

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._held: list[str] = []
        self._num_held = 0
        self._is_wrapped = False  # as far as its beginning tells

    def write(self, text: str) -> bool:
        """Takes more of them; whether that is all this has to do: nothing is held, and nothing will be."""
        self._held.append(text)
        self._num_held += len(text)
        if not self._is_wrapped:
            begin = _SPACES.sub("", "".join(self._held))
            self._is_wrapped = begin.startswith(_BEGINS)
            if not self._is_wrapped and not _BEGINS.startswith(begin):
                self._flush()
                return True
        if self._num_held > MAX_HELD:
            self._flush()
            return True
        return False

    def close(self) -> None:
        """They are whole, or cut: what is no whole wrapper stays as it was written."""
        text = "".join(self._held)
        opening, closing = _OPENING.match(text), _CLOSING.search(text)
        if opening is not None and closing is not None and _is_wrapper(text):
            self._held = [text[opening.end() : closing.start()].rstrip()]
        self._flush()

    def _flush(self) -> None:
        text = "".join(self._held)
        self._held.clear()
        if text:
            self._emit(text)


def _is_wrapper(text: str) -> bool:
    try:
        value: object = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return False
    match value:
        case {"arguments": inner, **others}:  # pyright: ignore[reportUnknownVariableType]
            return isinstance(inner, dict) and not others
        case _:
            return False

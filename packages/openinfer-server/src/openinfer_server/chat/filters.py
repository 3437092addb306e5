"""The filters of chat templates: those that carry origins, and those that lose them."""

import functools
import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import jinja2
from jinja2.exceptions import FilterArgumentError
from jinja2.filters import do_title, make_attrgetter
from markupsafe import Markup

from openinfer_server.chat.bounds import check_numbers, check_width
from openinfer_server.text.marked_text import (
    LostMarkup,
    MarkedText,
    holds_marks,
    joined,
    lost,
    percent_formatted,
    text_of,
)

PADDING_FILTERS = ("batch", "center", "indent", "round", "slice")
HANDING_FILTERS = frozenset(  # that hand on what they are given, or make numbers of it
    (
        *("abs", "attr", "batch", "count", "d", "default", "dictsort", "first", "float", "groupby", "int", "items"),
        *("last", "length", "list", "map", "max", "min", "random", "reject", "rejectattr", "reverse", "round"),
        *("select", "selectattr", "slice", "sort", "sum", "unique", "wordcount"),
    )
)


def bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that pads no text and no list beyond all measure."""
    first = 2 if hasattr(function, "jinja_pass_arg") else 1  # after the environment, and what is padded

    @functools.wraps(function)
    def apply(*args: Any, **kwargs: Any) -> Any:
        check_numbers(args[first:], kwargs)
        return function(*args, **kwargs)

    return apply


def losing(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that says so where origins are lost in it."""

    @functools.wraps(function)
    def apply(*args: Any, **kwargs: Any) -> Any:
        return lost(function(*args, **kwargs), args, kwargs)

    return apply


@jinja2.pass_environment
def _join(environment: jinja2.Environment, value: Iterable[object], d: object = "", attribute: Any = None) -> str:
    items = value if attribute is None else map(make_attrgetter(environment, attribute), value)
    return joined((text_of(d),)).join(map(text_of, items))


def _format(value: object, *args: object, **kwargs: object) -> str:
    if args and kwargs:
        raise FilterArgumentError("can't handle positional and keyword arguments at the same time")
    check_width(str(value))
    if isinstance(value, Markup):
        return cast("str", lost(value % (kwargs or args), value, args, kwargs))
    return percent_formatted(text_of(value), kwargs or args)


def _string(value: object) -> str:
    return value if isinstance(value, Markup) else text_of(value)  # `Markup` stays so, and escapes what is added to it


def _trim(value: object, chars: str | None = None) -> str:
    return _string(value).strip(chars)


def _replace(value: object, old: object, new: object, count: int | None = None) -> str:
    text = joined((text_of(value),))
    return text.replace(str(old), text_of(new), -1 if count is None else count)


def _title(value: object) -> str:
    text = text_of(value)
    result = do_title(text)
    if isinstance(text, MarkedText) and len(result) == len(text):
        return MarkedText(result, text.origins)
    return cast("str", lost(result, text))


def _upper(value: object) -> str:
    return _string(value).upper()


def _lower(value: object) -> str:
    return _string(value).lower()


def _capitalize(value: object) -> str:
    return _string(value).capitalize()


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates pass it by position
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    check_numbers((indent,), {})
    # jinja2's own filter escapes for HTML, which models have never seen
    write = functools.partial(json.dumps, ensure_ascii=ensure_ascii, indent=indent, separators=separators)
    if not holds_marks(value):
        return write(value, sort_keys=sort_keys)
    stand_ins = _StandIns()
    text = write(stand_ins.put(_in_order(value) if sort_keys else value))
    return stand_ins.replaced(text, lambda part: write(part)[1:-1])


CARRYING_FILTERS: Mapping[str, Callable[..., Any]] = {
    "capitalize": _capitalize,
    "format": _format,
    "join": _join,
    "lower": _lower,
    "replace": _replace,
    "string": _string,
    "title": _title,
    "tojson": _to_json,
    "trim": _trim,
    "upper": _upper,
}


class _StandIns:
    """Random names in place of texts with marks, while JSON is written around them."""

    def __init__(self) -> None:
        self._secret = secrets.token_hex(16)
        self._texts: list[MarkedText] = []

    def put(self, value: Any) -> Any:
        """A copy of a value with names in it."""
        match value:
            case MarkedText():
                self._texts.append(value)
                return f"{self._secret}{len(self._texts) - 1}."
            case LostMarkup():
                return self.put(text_of(value))
            case Mapping():
                items = cast("Mapping[Any, Any]", value).items()
                return {self.put(key): self.put(item) for key, item in items}
            case list() | tuple():
                return [self.put(item) for item in cast("Sequence[Any]", value)]
            case _:
                return value

    def replaced(self, text: str, write: Callable[[str], str]) -> MarkedText:
        """The text with the names' own texts, each stretch of one origin as `write` has it."""
        parts = re.split(rf"{self._secret}(\d+)\.", text)
        parts[1::2] = [self._written(self._texts[int(index)], write) for index in parts[1::2]]
        return joined(parts)

    def _written(self, text: MarkedText, write: Callable[[str], str]) -> MarkedText:
        written = ((write(part.plain), part.origins[:1]) for part in text.stretches())
        return joined(MarkedText(json_text, origin * len(json_text)) for json_text, origin in written)


def _in_order(value: Any) -> Any:
    """The value with the keys of every object sorted."""
    if isinstance(value, dict):
        return {key: _in_order(item) for key, item in sorted(cast("dict[Any, Any]", value).items())}
    if isinstance(value, list | tuple):
        return [_in_order(item) for item in cast("Sequence[Any]", value)]
    return value

"""The filters of chat templates: those that carry origins, those that lose them, and what bounds both."""

import functools
import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

import jinja2
from jinja2.exceptions import FilterArgumentError
from jinja2.filters import do_title, make_attrgetter
from markupsafe import Markup

from openinfer_server.chat.bounds import (
    CONTAINERS,
    PADDING_FILTERS,
    Bounds,
    check_numbers,
    filtered_size,
    grown_size,
    length_or_width,
)
from openinfer_server.text.marked_text import (
    LostMarkup,
    MarkedText,
    holds_marks,
    joined,
    lost,
    percent_formatted,
    text_of,
)

_HANDING = frozenset(  # that hand on what they are given, or make numbers of it
    (
        *("abs", "attr", "batch", "count", "d", "default", "dictsort", "first", "float", "groupby", "int", "items"),
        *("last", "length", "list", "map", "max", "min", "random", "reject", "rejectattr", "reverse", "round"),
        *("select", "selectattr", "slice", "sort", "sum", "unique", "wordcount"),
    )
)


class _Bounded(Protocol):
    """The environment of a template."""

    bounds: Bounds


def _bounds_of(environment: jinja2.Environment) -> Bounds:
    return cast("_Bounded", environment).bounds


def template_filters(given: Mapping[str, Callable[..., Any]], bounds: Bounds) -> dict[str, Callable[..., Any]]:
    """Jinja's filters as templates have them here.

    Args:
        given: Jinja's own.
        bounds: of what they make.
    """
    own = dict(given)
    own.update({name: _padding(own[name]) for name in PADDING_FILTERS})
    losing = {name: _losing(each) for name, each in own.items() if name not in {*_HANDING, *_CARRYING, *_CHECKING}}
    own.update({name: _checked(each, bounds, name=name) for name, each in losing.items()})
    writing = {**_CARRYING, "sum": own["sum"]}  # of lists it makes one list
    own.update({name: _checked(each, bounds) for name, each in writing.items()})
    own.update(_CHECKING)
    return own


def _first_argument(function: Callable[..., Any]) -> int:
    """Its place: some filters are handed the environment before it."""
    return int(hasattr(function, "jinja_pass_arg"))


def _padding(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that pads no text and no list beyond all measure."""
    first = _first_argument(function) + 1  # after what is padded

    @functools.wraps(function)
    def apply(*args: Any, **kwargs: Any) -> Any:
        check_numbers(args[first:], kwargs)
        return function(*args, **kwargs)

    return apply


def _checked(function: Callable[..., Any], bounds: Bounds, *, name: str | None = None) -> Callable[..., Any]:
    """A filter that writes no list beyond the bound.

    Args:
        function: the filter.
        bounds: of what is written.
        name: if it may write its arguments many times.
    """
    first = _first_argument(function)

    @functools.wraps(function)
    def apply(*args: Any, **kwargs: Any) -> Any:
        for each in args[first:]:
            if isinstance(each, CONTAINERS):
                bounds.check_written(cast("object", each))
        if name is not None and len(args) > first:
            bounds.check_size(filtered_size(name, args[first], args[first + 1 :], kwargs))
        return function(*args, **kwargs)

    return apply


def _losing(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that says so where origins are lost in it."""

    @functools.wraps(function)
    def apply(*args: Any, **kwargs: Any) -> Any:
        return lost(function(*args, **kwargs), args, kwargs)

    return apply


@jinja2.pass_environment
def _join(environment: jinja2.Environment, value: Iterable[object], d: object = "", attribute: Any = None) -> str:
    items = value if attribute is None else map(make_attrgetter(environment, attribute), value)
    bounds = _bounds_of(environment)
    between, texts = joined((bounds.text_of(d),)), list(map(bounds.text_of, items))
    bounds.check_size(grown_size(between, "join", (texts,), {}))
    return between.join(texts)


@jinja2.pass_environment
def _format(environment: jinja2.Environment, value: object, *args: object, **kwargs: object) -> str:
    if args and kwargs:
        raise FilterArgumentError("can't handle positional and keyword arguments at the same time")
    bounds = _bounds_of(environment)
    pattern = value if isinstance(value, Markup) else bounds.text_of(value)
    bounds.check_percent(pattern, kwargs or args)
    if isinstance(pattern, Markup):
        return cast("str", lost(pattern % (kwargs or args), pattern, args, kwargs))
    return percent_formatted(pattern, kwargs or args)


def _string(value: object) -> str:
    return value if isinstance(value, Markup) else text_of(value)  # `Markup` stays so, and escapes what is added to it


def _trim(value: object, chars: str | None = None) -> str:
    return _string(value).strip(chars)


@jinja2.pass_environment
def _replace(environment: jinja2.Environment, value: object, old: object, new: object, count: int | None = None) -> str:
    bounds = _bounds_of(environment)
    text = joined((bounds.text_of(value),))
    changes = bounds.text_of(old), bounds.text_of(new), -1 if count is None else count
    bounds.check_size(grown_size(text, "replace", changes, {}))
    return text.replace(*changes)


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


@jinja2.pass_environment
def _to_json(  # noqa: PLR0917 - as below
    environment: jinja2.Environment,
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates pass it by position
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    _bounds_of(environment).check_written(value, indent=length_or_width(indent))
    # jinja2's own filter escapes for HTML, which models have never seen
    write = functools.partial(json.dumps, ensure_ascii=ensure_ascii, indent=indent, separators=separators)
    if not holds_marks(value):
        return write(value, sort_keys=sort_keys)
    stand_ins = _StandIns()
    text = write(stand_ins.put(_in_order(value) if sort_keys else value))
    return stand_ins.replaced(text, lambda part: write(part)[1:-1])


_CARRYING: Mapping[str, Callable[..., Any]] = {
    "capitalize": _capitalize,
    "lower": _lower,
    "string": _string,
    "title": _title,
    "trim": _trim,
    "upper": _upper,
}
_CHECKING: Mapping[str, Callable[..., Any]] = {
    "format": _format,
    "join": _join,
    "replace": _replace,
    "tojson": _to_json,
}
"""These carry origins, too, and look at the bounds themselves."""


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

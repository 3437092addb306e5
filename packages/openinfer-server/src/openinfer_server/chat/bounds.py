"""What bounds a rendering, besides its clock: how long a text or list becomes is told before it is made.

A template of 20 characters can ask for more than there is memory: `a.replace('x', a)`, `a | join(a)`, a list that holds
itself twice, thirty times over.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from openinfer_server.text.marked_text import MarkedText, text_of

MAX_REPEATED_LENGTH = 2**20  # longest string or list that a product with a number, or padding, may give
GROWING = frozenset(("expandtabs", "join", "replace", "translate"))
"""Methods of texts whose results can be longer than what they are given, by a factor."""
PADDING_METHODS = frozenset(("center", "expandtabs", "ljust", "rjust", "to_bytes", "zfill"))
PADDING_FILTERS = ("batch", "center", "indent", "round", "slice")
CONTAINERS = (list, tuple, dict, set, frozenset)
TEXTS = (str, MarkedText)
_FEW_CHARACTERS = 8  # that may be put between any two others: `wordwrap` ends lines by `\n`, `truncate` by `...`
_WIDTH = re.compile(r"%[^a-zA-Z%]*(?:\*|\d{5})")  # a width or precision of five digits, or one that is an argument
_FIELD_WIDTH = re.compile(r"\d{5}|\{")  # the same in a field of `format`
_NAMED_CONVERSION = re.compile(r"%\((\w+)\)")


class RenderingRefused(Exception):
    """The template refused these messages, failed on them or exceeded a bound; the message is for the client."""


class Bounds:
    """Of the renderings of one template; what is refused raises `RenderingRefused`.

    Args:
        max_characters: of a text.
    """

    def __init__(self, max_characters: int) -> None:
        self.max_characters = max_characters

    def check_size(self, size: int) -> None:
        """Of a text that would have so many characters."""
        if size > self.max_characters:
            raise RenderingRefused(f"the chat template makes a text of more than {self.max_characters} characters")

    def check_written(self, value: object, *, indent: int = 0) -> None:
        """Of a value that is written as text, or as JSON with such an indent."""
        self.check_size(size_of(value, self.max_characters, indent=indent))

    def text_of(self, value: object) -> str:
        """`text_of`, of a value whose text is not too long."""
        if type(value) in TEXTS:
            return cast("str", value)
        self.check_written(value)
        return text_of(value)

    def check_percent(self, pattern: str, values: object) -> None:
        """Of `pattern % values`."""
        if _WIDTH.search(pattern):
            raise _too_wide()
        written = [values]
        if isinstance(values, Mapping):
            named = cast("Mapping[str, object]", values)
            written = [named[name] for name in _NAMED_CONVERSION.findall(pattern)]
        self.check_size(len(pattern) + sum(size_of(each, self.max_characters) for each in written))

    def check_fields(self, pattern: str, specs: Iterable[str | None], values: Iterable[object]) -> None:
        """Of `pattern.format(...)`, by the specs of its fields and their values."""
        if any(spec and _FIELD_WIDTH.search(spec) for spec in specs):
            raise _too_wide()
        self.check_size(len(pattern) + sum(size_of(each, self.max_characters) for each in values))

    def check_growth(
        self, owner: str, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Of what a text's method gives; returns its arguments, those of a `join` as lists."""
        if method in GROWING:
            if method == "join":
                args = tuple(list(cast("Iterable[object]", each)) for each in args)
            self.check_size(grown_size(owner, method, args, kwargs))
        return args


def check_numbers(args: Iterable[object], kwargs: Mapping[str, object]) -> None:
    """Of what pads by them; raises `RenderingRefused`."""
    if any(isinstance(each, int) and each > MAX_REPEATED_LENGTH for each in (*args, *kwargs.values())):
        raise _too_wide()


def check_power(base: object, exponent: object) -> None:
    """Raises `RenderingRefused`: the number is too long."""
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > MAX_REPEATED_LENGTH:
        raise RenderingRefused("the chat template makes a number beyond all measure")


def length_of(value: object) -> int:
    """Of a text or list; of all else 0."""
    return len(cast("Sequence[object]", value)) if isinstance(value, str | list | tuple) else 0


def filtered_size(name: str, value: object, args: Sequence[object], kwargs: Mapping[str, object]) -> int:
    """Characters that a filter may give which writes its own arguments into a text, some of them many times.

    Args:
        name: of the filter.
        value: what it is applied to.
        args: positional, after that one.
        kwargs: by name.
    """
    given = (*args, *kwargs.values())
    if name == "indent":
        lines = value.count("\n") + 1 if isinstance(value, str) else 1
        return length_of(value) + lines * max(map(length_or_width, given), default=0)
    each_time = sum(map(length_of, given))
    return length_of(value) * (1 + each_time) if each_time > _FEW_CHARACTERS else 0


def length_or_width(value: object) -> int:
    """As `length_of`, and of a number itself."""
    return max(0, value) if isinstance(value, int) else length_of(value)


def size_of(value: object, most: int, *, indent: int = 0) -> int:
    """At least about how many characters a value has as text, or some number above `most`.

    What is named several times counts as often: it is written as often.

    Args:
        value: a text, or anything else that a template has.
        most: where counting ends.
        indent: characters before each item, for each container that it is in.
    """
    size = 0
    waiting: list[tuple[object, int]] = [(value, 0)]
    while waiting and size <= most:
        each, depth = waiting.pop()
        size += 2 + depth * indent
        if isinstance(each, str):
            size += len(each)
        elif isinstance(each, Mapping):
            items = cast("Mapping[object, object]", each)
            waiting.extend((key, 0) for key in items)
            waiting.extend((item, depth + 1) for item in items.values())
        elif isinstance(each, list | tuple | set | frozenset):
            waiting.extend((item, depth + 1) for item in cast("Iterable[object]", each))
    return size


def grown_size(text: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Characters of what one of `GROWING` gives; of wrong arguments any number, for the method refuses them.

    Args:
        text: whose method it is.
        method: its name.
        args: positional; the items of a `join` are a list.
        kwargs: by name.
    """
    match method, args:
        case "join", (list(),):
            return _joined_size(text, cast("list[object]", args[0]))
        case "replace", (str() as old, str() as new, *counts):
            found = text.count(old)
            times = min(found, counts[0]) if counts and isinstance(counts[0], int) and counts[0] >= 0 else found
            return len(text) + times * max(0, len(new) - len(old))
        case "translate", (Mapping(),):
            items = cast("Mapping[object, object]", args[0]).values()
            return len(text) * max((len(each) for each in items if isinstance(each, str)), default=1)
        case "expandtabs", _:
            tab = next(iter((*args, *kwargs.values())), 8)
            return len(text) + text.count("\t") * (tab if isinstance(tab, int) else 0)
        case _:
            return 0


def _joined_size(between: str, items: Sequence[object]) -> int:
    texts = sum(len(each) for each in items if isinstance(each, str))
    return texts + len(between) * max(0, len(items) - 1)


def _too_wide() -> RenderingRefused:
    return RenderingRefused("the chat template pads a text beyond all measure")

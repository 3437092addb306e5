"""How a format's calls are written, as parts of a Lark grammar, for requests whose calls are constrained.

The dialect is llguidance's: `%json {…}` is JSON of a schema, `<[7]>` the token with id 7.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import msgspec

from openinfer_core.sampling import MAX_GRAMMAR_LENGTH

_ANY = r"(.|\n)*"
_SPECIAL = re.compile(r"([.*+?^${}()|\[\]\\/])")
JsonSchema: TypeAlias = Mapping[str, Any] | bool

# Keywords that llguidance does not know are passed over: for functions whose schema need not be kept to the letter.
LENIENT = {"x-guidance": {"lenient": True}}


@dataclass(frozen=True, slots=True)
class CallableFunction:
    """A function on offer."""

    name: str
    schema: Mapping[str, Any]  # of its parameters
    strict: bool  # whether arguments must follow the schema to the letter


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """The calls of one answer.

    Attributes:
        calls: one call of each function, as Lark.
        before: what stands before the first call, as Lark; may be empty.
        between: what stands between two.
        after: what stands after the last.
        triggers: texts that would begin a call; free text before the calls has none of them.
        rules: further rules and terminals that these refer to; `start`, `call…`, `answer` and `FREE` are taken.
    """

    calls: Sequence[str]
    before: str = ""
    between: str = ""
    after: str = ""
    triggers: tuple[str, ...]
    rules: Sequence[str] = ()


class Unconstrainable(Exception):
    """A strict schema has something that the format's calls cannot be held to; the message says what."""


@runtime_checkable
class CallWriter(Protocol):
    """What a tool parser offers in addition if its format's calls can be constrained."""

    @classmethod
    def call_syntax(cls, functions: Sequence[CallableFunction], lark: "LarkTexts") -> CallSyntax:
        """How calls of these functions are written.

        Raises:
            Unconstrainable: not so that a strict schema is followed.
        """
        ...


class LarkTexts:
    """Texts and values as Lark.

    Args:
        token_id: id of a token of the vocabulary by its text; None if there is none.
        markers: texts that are written as one token where the vocabulary has one.
    """

    def __init__(self, token_id: Callable[[str], int | None], markers: Sequence[str]) -> None:
        found = {marker: token_id(marker) for marker in markers}
        self._ids = {marker: number for marker, number in found.items() if number is not None}
        self._length = 0

    def count(self, function: CallableFunction, rule: str) -> None:
        """Adds a part of a function's rules to what all functions have together.

        Raises:
            Unconstrainable: that is more than a grammar may have.
        """
        self._length += len(rule)
        if self._length > MAX_GRAMMAR_LENGTH:
            raise Unconstrainable(
                f"{function.name}: its parameters and those of functions before it, each with the definitions that it "
                f"refers to, take more than {MAX_GRAMMAR_LENGTH} characters"
            )

    def text(self, text: str) -> str:
        """A text, in which markers are tokens; nothing for an empty one."""
        places = [(text.find(marker), marker) for marker in self._ids if marker in text]
        if not places:
            return quoted(text) if text else ""
        place, marker = min(places, key=lambda found: (found[0], -len(found[1])))
        parts = (self.text(text[:place]), f"<[{self._ids[marker]}]>", self.text(text[place + len(marker) :]))
        return " ".join(part for part in parts if part)

    def arguments(self, function: CallableFunction) -> str:
        schema = {"type": "object", **function.schema}
        if not function.schema:
            schema["additionalProperties"] = False
        return json_value(schema if function.strict else {**LENIENT, **schema})

    def free_value(self, end: str, forbidden: Sequence[str]) -> tuple[str, list[str]]:
        """Any text and a text that ends it: Lark, and the rules that it refers to.

        Args:
            end: what ends it.
            forbidden: what the text has none of.
        """
        places = [(end.find(marker), marker) for marker in self._ids if marker in end]
        if not places:
            last = _pattern(end)
            without = [f"~/{_ANY}{_pattern(text)}{_ANY}{last}/" for text in forbidden]
            return "value", ["value[lazy]: VALUE", " & ".join([f"VALUE: /{_ANY}{last}/", *without])]
        place, _ = min(places)
        without = [f"~/{_ANY}{_pattern(text)}{_ANY}/" for text in forbidden]
        return f"VALUE {self.text(end[place:])}", [" & ".join([f"VALUE: /{_ANY}{_pattern(end[:place])}/", *without])]

    @staticmethod
    def name_of(function: CallableFunction) -> str:
        """A function's name as the inside of a JSON string."""
        return msgspec.json.encode(function.name).decode()[1:-1]


def _pattern(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", text).replace("\n", "\\n")


def free_of(texts: Sequence[str]) -> str:
    """A regular expression, as Lark, of every text that has none of these inside it."""
    return " & ".join([f"/{_ANY}/", *(f"~/{_ANY}{_pattern(text)}{_ANY}/" for text in texts)])


def quoted(text: str) -> str:
    """A text as a Lark string, whose escapes are those of JSON."""
    return msgspec.json.encode(text).decode()


def json_value(schema: JsonSchema) -> str:
    return f"%json {msgspec.json.encode(schema).decode()}"

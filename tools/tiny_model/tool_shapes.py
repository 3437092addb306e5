"""The shape of a function that the toy model may be shown, and short ways to write one down."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

Draw = Callable[[Random], Any]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument: its key in requests, the names a schema may give it, its JSON schema and its values."""

    key: str
    names: tuple[str, ...]
    schema: dict[str, Any]
    description: str
    draw: Draw
    is_required: bool = True


@dataclass(frozen=True, slots=True)
class ToolKind:
    """What one function does, in all its spellings. Kinds of one `group` never stand in one list of tools."""

    group: str
    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    requests: tuple[str, ...]
    fixed: dict[str, Any] | None = None

    @property
    def training_requests(self) -> tuple[str, ...]:
        """The wordings that training may use."""
        return self.requests[:-1] if len(self.requests) > 2 else self.requests

    @property
    def held_out_requests(self) -> tuple[str, ...]:
        """The wordings that it may not."""
        return self.requests[-1:] if len(self.requests) > 2 else ()


def one_of(values: tuple[Any, ...] | list[Any]) -> Draw:
    return lambda rng: rng.choice(values)


def integer(low: int, high: int) -> Draw:
    return lambda rng: rng.randint(low, high)


def string(key: str, names: str, description: str, draw: Draw, *, is_required: bool = True) -> Parameter:
    return Parameter(key, tuple(names.split()), {"type": "string"}, description, draw, is_required)


def number(key: str, names: str, description: str, draw: Draw, kind: str = "integer") -> Parameter:
    return Parameter(key, tuple(names.split()), {"type": kind}, description, draw)


def enum(key: str, names: str, description: str, values: tuple[str, ...], *, is_required: bool = True) -> Parameter:
    schema = {"type": "string", "enum": list(values)}
    return Parameter(key, tuple(names.split()), schema, description, one_of(values), is_required)

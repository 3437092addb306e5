"""The contract of parsers: entry points of `openinfer.tool_parsers` and `openinfer.reasoning_parsers`.

A parser belongs to one answer. It takes the answer's text in pieces, as tokens come, and says at once what has become
certain; what it says in all must not depend on the pieces. `openinfer_server.testing.parsers` checks that.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from openinfer_server.parsers.deltas import Delta


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """What parsers know a model by."""

    family: str
    """As the engine names it: `qwen3`."""
    template: str
    """Source of the chat template; empty if there is none."""


@dataclass(frozen=True, slots=True)
class ParserContext:
    """What a parser may know of its request."""

    prompt: str
    """The rendered chat: a template may have opened the reasoning."""
    tools: Mapping[str, Mapping[str, Any]]
    """Name of each function on offer -> JSON Schema of its parameters."""
    new_call_id: Callable[[], str]
    """Makes the id of a call whose format has none."""


@runtime_checkable
class OutputTextParser(Protocol):
    """What both kinds have in common. Class attributes are read before any instance is made.

    Attributes:
        visible_tokens: special tokens of the vocabulary that must reach `feed` by name; others never show.
    """

    visible_tokens: ClassVar[tuple[str, ...]]

    @classmethod
    def claims(cls, traits: ModelTraits) -> bool:
        """Whether a model writes this format; `auto` takes the one parser that says so."""
        ...

    def __init__(self, context: ParserContext) -> None: ...

    def feed(self, text: str) -> list[Delta]:
        """Takes the next piece, which may be empty; returns what became certain."""
        ...

    def finish(self) -> list[Delta]:
        """The text has ended, perhaps in the middle of a call: returns what was held. Called once, last."""
        ...


@runtime_checkable
class ToolParser(OutputTextParser, Protocol):
    """Finds tool calls in the text after the reasoning. Says everything but `ReasoningDelta`.

    A parser that is a `CallWriter`, too, has its format's calls constrained where a request asks for that.
    """


@runtime_checkable
class ReasoningParser(OutputTextParser, Protocol):
    """Tells reasoning from answer. Says `ReasoningDelta` and `ContentDelta`.

    A parser may also have `tags: ClassVar[tuple[str, str]]`, what opens and what closes its reasoning: then the answer
    after it can be constrained.

    Attributes:
        closing_text: what the model would write to end its reasoning; written in its place when the budget is used up.
    """

    closing_text: ClassVar[str]

    @property
    def reasoning(self) -> bool:
        """Whether what comes next is reasoning, as far as was fed."""
        ...

    @property
    def done(self) -> bool:
        """Whether all further text is content and nothing is held: neither `feed` nor `finish` is called again."""
        ...

"""Which parsers serve a model: by name, or by what its chat template shows (`auto`)."""

import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from openinfer_core.plugins import Lister, Plugin, find_plugin, installed, list_plugins
from openinfer_server.errors import UnusableParser
from openinfer_server.parsers.continued import ContinuedParser
from openinfer_server.parsers.contract import (
    ModelTraits,
    OutputTextParser,
    ParserContext,
    ReasoningParser,
    ToolParser,
)
from openinfer_server.parsers.deltas import Delta
from openinfer_server.parsers.output import OutputParser, fault_boundary
from openinfer_server.parsers.reasoning_calls import begin_tokens_of

P = TypeVar("P", bound=OutputParser)

TOOL_PARSERS = "openinfer.tool_parsers"
REASONING_PARSERS = "openinfer.reasoning_parsers"
AUTO = "auto"
NONE = "none"


@dataclass(frozen=True, slots=True)
class Chosen:
    """A parser class and the entry point it came from."""

    plugin: Plugin
    parser: type[OutputTextParser]

    @property
    def origin(self) -> str:
        """`hermes (openinfer-server 0.1.0)`."""
        return f"{self.plugin.name} ({self.plugin.origin})"


@dataclass(frozen=True, slots=True)
class ModelParsers:
    """The parsers of one model; None where there is none."""

    tools: Chosen | None = None
    reasoning: Chosen | None = None

    @property
    def parts(self) -> dict[str, str]:
        """What `openinfer plan` shows."""
        return {
            "tool_parser": NONE if self.tools is None else self.tools.origin,
            "reasoning_parser": NONE if self.reasoning is None else self.reasoning.origin,
        }

    @property
    def visible_tokens(self) -> frozenset[str]:
        """Special tokens that the parsers must see."""
        return frozenset(
            token for chosen in (self.tools, self.reasoning) if chosen for token in chosen.parser.visible_tokens
        )

    @property
    def begin_tokens(self) -> frozenset[str]:
        """Tokens that begin a call also inside the reasoning; none where there is no reasoning to begin in."""
        if self.tools is None or self.reasoning is None:
            return frozenset()
        return frozenset(begin_tokens_of(self.tools.parser))

    @property
    def markers(self) -> frozenset[str]:
        """All that the parsers look for by name, or write."""
        chosen = [each.parser for each in (self.tools, self.reasoning) if each is not None]
        tags = [tag for parser in chosen for tag in getattr(parser, "tags", ())]
        closing = [getattr(parser, "closing_text", "") for parser in chosen]
        return self.visible_tokens.union(*(begin_tokens_of(parser) for parser in chosen), tags, closing)

    def check(self) -> None:
        """Makes each parser once; raises `UnusableParser` for one that cannot be made, or takes no text."""
        context = ParserContext("", {"example": {"type": "object"}}, new_call_id)
        for chosen in (self.reasoning, self.tools):
            if chosen is None:
                continue
            try:
                parser = chosen.parser(context)
                deltas: list[object] = [*parser.feed("text"), *parser.finish()]
            except Exception as error:
                raise UnusableParser(
                    f"the parser {chosen.origin} fails on a text: {type(error).__name__}: {error}"
                ) from error
            if odd := [delta for delta in deltas if not isinstance(delta, Delta)]:
                raise UnusableParser(f"the parser {chosen.origin} says {odd[0]!r} of a text, which is no delta")

    def open(self, prompt: str, tools: Mapping[str, Mapping[str, Any]], *, begun: str = "") -> OutputParser:
        """The parsers of one answer.

        Args:
            prompt: the rendered chat, up to where the answer begins.
            tools: functions on offer.
            begun: the answer's beginning, which the client has written.

        Raises:
            ParserFault: a parser cannot be made.
            CallBegun: `begun` has a call.
        """
        context = ParserContext(prompt, tools, new_call_id)
        kinds = (
            None if self.reasoning is None else cast("type[ReasoningParser]", self.reasoning.parser),
            None if self.tools is None or not tools else cast("type[ToolParser]", self.tools.parser),
        )
        if not begun:
            return answer_parser(context, *kinds)
        parser = _made(ContinuedParser, context, *kinds)
        parser.begin(begun, probe=answer_parser(context, *kinds))
        return parser

    @property
    def reasoning_tags(self) -> tuple[str, str] | None:
        """What opens and what closes reasoning, as far as its parser says."""
        return None if self.reasoning is None else getattr(self.reasoning.parser, "tags", None)


def answer_parser(
    context: ParserContext, reasoning: type[ReasoningParser] | None, tools: type[ToolParser] | None
) -> OutputParser:
    """The parsers of one answer.

    Raises:
        ParserFault: a parser cannot be made.
    """
    return _made(OutputParser, context, reasoning, tools)


def _made(
    kind: type[P], context: ParserContext, reasoning: type[ReasoningParser] | None, tools: type[ToolParser] | None
) -> P:
    first = None if reasoning is None else fault_boundary("reasoning", reasoning, partial(reasoning, context))
    if tools is None:
        return kind(first)
    make = partial(tools, context)
    return kind(first, fault_boundary("tool", tools, make), another=make, offered=context.tools)


def choose_parsers(
    traits: ModelTraits, *, tool_parser: str = AUTO, reasoning_parser: str = AUTO, lister: Lister = installed
) -> ModelParsers:
    """The parsers of a model.

    Args:
        traits: of the model.
        tool_parser: a name in `openinfer.tool_parsers`, `auto` or `none`.
        reasoning_parser: the same in `openinfer.reasoning_parsers`.
        lister: where plug-ins are listed.

    Raises:
        UnusableParser: more than one parser claims the model, or one is not of the contract.
        PluginError: the name is unknown or ambiguous, or a parser fails to load.
    """
    return ModelParsers(
        tools=_choose(TOOL_PARSERS, tool_parser, traits, lister),
        reasoning=_choose(REASONING_PARSERS, reasoning_parser, traits, lister),
    )


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _choose(group: str, name: str, traits: ModelTraits, lister: Lister) -> Chosen | None:
    if name == NONE:
        return None
    if name != AUTO:
        return _with_texts(_load(find_plugin(group, name, lister=lister)))
    claiming = [chosen for chosen in map(_load, list_plugins(group, lister=lister)) if _claims(chosen, traits)]
    if len(claiming) > 1:
        names = ", ".join(chosen.origin for chosen in claiming)
        flag = "--" + group.removeprefix("openinfer.").replace("_", "-").removesuffix("s")
        raise UnusableParser(f"more than one of {group} claims this model: {names}; name one with {flag}")
    return _with_texts(claiming[0]) if claiming else None


def _with_texts(chosen: Chosen) -> Chosen:
    for name in ("visible_tokens", "tags", "closing_text"):
        said: object = getattr(chosen.parser, name, "")
        texts = cast("Collection[object]", said) if isinstance(said, Collection) else [said]
        if not all(isinstance(text, str) for text in texts):
            raise UnusableParser(f"the parser {chosen.origin} is none: its {name} is no text")
    return chosen


def _claims(chosen: Chosen, traits: ModelTraits) -> bool:
    try:
        return chosen.parser.claims(traits)
    except Exception as error:
        raise UnusableParser(
            f"the parser {chosen.origin} fails when it is asked about the model: {type(error).__name__}: {error}"
        ) from error


def _load(plugin: Plugin) -> Chosen:
    found = plugin.load()
    wanted = ("visible_tokens", "claims", "feed", "finish")
    wanted += ("closing_text",) if plugin.group == REASONING_PARSERS else ()
    missing = [name for name in wanted if not hasattr(found, name)]
    if missing or not isinstance(found, type):
        lacks = f"lacks {', '.join(missing)}" if missing else "is no class"
        raise UnusableParser(f"{plugin.name!r} of {plugin.group} ({plugin.origin}) is no parser: it {lacks}")
    return Chosen(plugin, found)

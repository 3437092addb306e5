"""Grammars of answers with tool calls: calls that must come, arguments that must follow their schema.

required            calls
auto, strict        free text without a call, then calls or nothing
auto, with a format calls, or what the format asks for
"""

import re
from collections.abc import Sequence

from openinfer_core.sampling import Grammar, GrammarKind
from openinfer_server.api_errors import refused
from openinfer_server.parsers.call_syntax import (
    CallableFunction,
    CallSyntax,
    CallWriter,
    JsonSchema,
    LarkTexts,
    json_value,
)
from openinfer_server.service import Service
from openinfer_server.tool_offer import ToolOffer

_SPECIAL = re.compile(r"([.*+?^${}()|\[\]\\/])")


def required_calls(service: Service, offer: ToolOffer, field: str) -> Grammar:
    """One call at least, and nothing else.

    Raises:
        ApiError: 400; the format's calls cannot be constrained.
    """
    return _grammar("start: calls", _syntax(service, offer, field), offer)


def strict_calls(service: Service, offer: ToolOffer) -> Grammar:
    """Text, then calls or none.

    Raises:
        ApiError: 400; as before.
    """
    syntax = _syntax(service, offer, "tools")
    forbidden = [f"~/(.|\\n)*{_escape(trigger)}(.|\\n)*/" for trigger in syntax.triggers]
    free = " & ".join([r"FREE: /(.|\n)*/", *forbidden])
    return _grammar("start: FREE calls?", syntax, offer, free)


def calls_or_json(service: Service, offer: ToolOffer, schema: JsonSchema, field: str) -> Grammar:
    """Calls, or JSON of a schema.

    Raises:
        ApiError: 400; as before.
    """
    return _grammar("start: calls | answer", _syntax(service, offer, field), offer, f"answer: {json_value(schema)}")


def _syntax(service: Service, offer: ToolOffer, field: str) -> CallSyntax:
    chosen = service.parsers.tools
    if chosen is None or not isinstance(chosen.parser, CallWriter):
        name = "none" if chosen is None else chosen.plugin.name
        raise refused(field, f"calls in the format of the tool parser {name} cannot be constrained; auto can be")
    functions = [
        CallableFunction(function.name, function.parameters or {}, bool(function.strict))
        for function in offer.functions
    ]
    lark = LarkTexts(service.tokenizer.token_id, chosen.parser.visible_tokens)
    return chosen.parser.call_syntax(functions, lark)


def _grammar(start: str, syntax: CallSyntax, offer: ToolOffer, *rules: str) -> Grammar:
    further = f"({syntax.between} call)*" if offer.parallel else ""
    calls = " ".join(part for part in ("calls:", syntax.before, "call", further, syntax.after) if part)
    names = [f"call_{index}" for index in range(len(syntax.calls))]
    each = [f"{name}: {call}" for name, call in zip(names, syntax.calls, strict=True)]
    return Grammar(kind=GrammarKind.LARK, text=_lines([start, calls, f"call: {' | '.join(names)}", *each, *rules]))


def _lines(rules: Sequence[str]) -> str:
    return "\n".join(rules)


def _escape(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", text)

"""Grammars of answers with tool calls: calls that must come, arguments that must follow their schema.

required              calls
auto, strict          free text without a call, then calls or nothing
auto, with a format   calls, or what the format asks for
"""

from openinfer_core.sampling import Grammar, GrammarKind
from openinfer_server.http.api_errors import refused
from openinfer_server.parsers.syntax.call_syntax import (
    CallableFunction,
    CallSyntax,
    CallWriter,
    JsonSchema,
    LarkTexts,
    Unconstrainable,
    free_of,
    json_value,
)
from openinfer_server.service import Service
from openinfer_server.tools.available import AvailableTools


def required_calls(service: Service, available: AvailableTools, field: str) -> Grammar:
    """One call at least, and nothing else."""
    return calls_grammar(_syntax(service, available, field), parallel=available.parallel)


def strict_calls(service: Service, available: AvailableTools) -> Grammar:
    """Text, then calls or none."""
    return strict_grammar(_syntax(service, available, "tools"), parallel=available.parallel)


def calls_or_json(service: Service, available: AvailableTools, schema: JsonSchema, field: str) -> Grammar:
    """Calls, or JSON of a schema."""
    syntax = _syntax(service, available, field)
    return _grammar("start: calls | answer", syntax, f"answer: {json_value(schema)}", parallel=available.parallel)


def calls_grammar(syntax: CallSyntax, *, parallel: bool) -> Grammar:
    return _grammar("start: calls", syntax, parallel=parallel)


def strict_grammar(syntax: CallSyntax, *, parallel: bool) -> Grammar:
    """Text in which no call begins, then calls or nothing."""
    return _grammar("start: FREE calls?", syntax, f"FREE: {free_of(syntax.triggers)}", parallel=parallel)


def _syntax(service: Service, available: AvailableTools, field: str) -> CallSyntax:
    chosen = service.parsers.tools
    if chosen is None or not isinstance(chosen.parser, CallWriter):
        name = "none" if chosen is None else chosen.plugin.name
        raise refused(field, f"calls in the format of the tool parser {name} cannot be constrained; auto can be")
    functions = [
        CallableFunction(function.name, function.parameters or {}, bool(function.strict))
        for function in available.functions
    ]
    lark = LarkTexts(service.tokenizer.token_id, chosen.parser.visible_tokens)
    try:
        return chosen.parser.call_syntax(functions, lark)
    except Unconstrainable as error:
        raise refused(field, f"strict cannot be kept in this model's format of calls for {error}") from error


def _grammar(start: str, syntax: CallSyntax, *rules: str, parallel: bool) -> Grammar:
    further = f"({syntax.between} call)*" if parallel else ""
    calls = " ".join(part for part in ("calls:", syntax.before, "call", further, syntax.after) if part)
    names = [f"call_{index}" for index in range(len(syntax.calls))]
    each = [f"{name}: {call}" for name, call in zip(names, syntax.calls, strict=True)]
    lines = [start, calls, f"call: {' | '.join(names)}", *each, *syntax.rules, *rules]
    return Grammar(kind=GrammarKind.LARK, text="\n".join(lines))

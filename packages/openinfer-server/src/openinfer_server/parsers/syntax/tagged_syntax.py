"""Calls whose parameters stand between tags, as Lark: strings as plain text, everything else as JSON."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from openinfer_server.parsers.syntax.call_syntax import (
    LENIENT,
    CallableFunction,
    LarkTexts,
    Unconstrainable,
    json_value,
    quoted,
)
from openinfer_server.parsers.syntax.definitions import Definitions
from openinfer_server.parsers.syntax.typed_values import TEXT, types_of

# Keywords that say nothing about which strings are possible.
_PLAIN = frozenset({"type", "title", "description", "default", "examples", "deprecated"})
# Keywords of an object that its parameters one by one cannot follow.
_COMBINING = ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "patternProperties", "dependentRequired", "minProperties")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterTags:
    """How a format writes a parameter.

    Attributes:
        begin: text before the value, of a name and whether the value is plain text.
        end: text after the value.
        free: Lark of any plain text and `end` after it.
    """

    begin: Callable[[str, bool], str]
    end: str
    free: str


def parameters(function: CallableFunction, lark: LarkTexts, tags: ParameterTags) -> str:
    """All parameters of a call: required ones and perhaps the others, in the schema's order.

    Raises:
        Unconstrainable: the schema is strict and has what tags cannot be held to, or all is too long together.
    """
    schema = function.schema
    if function.strict:
        found = [word for word in _COMBINING if word in schema]
        if found:
            raise Unconstrainable(f"{function.name}: {found[0]} of its parameters as a whole")
    described = cast("Mapping[str, Any]", schema.get("properties") or {})
    required = cast("Sequence[str]", schema.get("required") or ())
    names = [*described, *(name for name in required if name not in described)]
    definitions, rules = Definitions(schema), list[str]()
    for name in names:
        rule = _parameter(function, name, lark, tags, definitions)
        lark.count(function, rule)  # before more of them are written: each may repeat the same definitions
        rules.append(rule if name in required else f"({rule})?")
    return " ".join(rules)


def _parameter(
    function: CallableFunction, name: str, lark: LarkTexts, tags: ParameterTags, definitions: Definitions
) -> str:
    is_text = types_of(function.schema, name) == TEXT
    own = cast("Mapping[str, Any]", function.schema.get("properties") or {}).get(name, True)
    value = (
        _text(function, name, own, lark, tags)
        if is_text
        else f"{_json(function, own, definitions)} {lark.text(tags.end)}"
    )
    return f"{lark.text(tags.begin(name, is_text))} {value}"


def _text(function: CallableFunction, name: str, own: Any, lark: LarkTexts, tags: ParameterTags) -> str:
    choices = [own["const"]] if "const" in own else own.get("enum")
    if isinstance(choices, list):
        texts = " | ".join(quoted(text) for text in cast("list[object]", choices) if isinstance(text, str))
        return f"({texts}) {lark.text(tags.end)}"
    further = sorted(set(own) - _PLAIN)
    if function.strict and further:
        raise Unconstrainable(f"{function.name}: {further[0]} of the string {name}")
    return tags.free


def _json(function: CallableFunction, own: Any, definitions: Definitions) -> str:
    if isinstance(own, bool):
        return json_value(own)
    return json_value({**({} if function.strict else LENIENT), **definitions.used_by(own), **own})

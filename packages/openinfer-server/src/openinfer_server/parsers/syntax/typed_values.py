"""Values that a model writes as plain text, as JSON of the type the function's schema asks for.

Nothing is evaluated: a value is the JSON it is, `true` and `null` in Python's spelling, or a string.
"""

from collections.abc import Iterator, Mapping
from typing import Any, cast

import msgspec

# How many references and alternatives of one parameter are followed; the types of the others are not known.
MAX_SCHEMAS = 256
ANYTHING = frozenset({"string", "number", "boolean", "null", "array", "object"})
TEXT = frozenset({"string"})


# What Python calls JSON's types, as schemas that were made of its annotations by hand do.
_PYTHONS = {
    "integer": "number",
    "int": "number",
    "float": "number",
    "str": "string",
    "bool": "boolean",
    "dict": "object",
    "list": "array",
    "tuple": "array",
    "None": "null",
}


def types_of(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """JSON types that a parameter may have; any if its schema does not say."""
    found: set[str] = set()
    for part in parts_of(_get(schema.get("properties"), name), root=schema):
        if part is None:
            return ANYTHING
        found.update(_own_types(part))
    return frozenset(found) or ANYTHING


def parts_of(schema: object, *, root: Mapping[str, Any]) -> Iterator[Mapping[str, Any] | None]:
    """A schema, and those that it refers to or combines; None and no more where they are too many.

    Args:
        schema: anything; what is no object has no parts.
        root: what its references are looked up in.
    """
    waiting: list[object] = [schema]
    seen: set[int] = set()
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping) and id(cast("object", part)) not in seen:
            if len(seen) == MAX_SCHEMAS:
                yield None
                return
            seen.add(id(cast("object", part)))
            described = cast("Mapping[str, Any]", part)
            yield described
            waiting += _alternatives(described, root)


def as_json(text: str, types: frozenset[str]) -> str:
    """JSON of a value of one of these types; a string if it is of none."""
    stripped = text.strip()
    kind = _kind(stripped)
    if kind in types:
        return stripped
    if "boolean" in types and stripped.lower() in {"true", "false"}:
        return stripped.lower()
    if "null" in types and stripped in {"None", "NULL", "Null"}:
        return "null"
    return msgspec.json.encode(text).decode()


def _kind(text: str) -> str | None:
    """JSON type of a text that is JSON."""
    try:
        value: object = msgspec.json.decode(text.encode("utf-8", "replace"))
    except (msgspec.MsgspecError, RecursionError):
        return None
    return _kind_of(value)


def _kind_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def _own_types(schema: Mapping[str, Any]) -> Iterator[str]:
    """What a schema says about types itself."""
    declared = schema.get("type")
    for name in cast("list[object]", declared) if isinstance(declared, list) else [declared]:
        if isinstance(name, str):
            yield _PYTHONS.get(name, name)
    if "const" in schema:
        yield _kind_of(schema["const"])
    if declared is None and isinstance(schema.get("enum"), list):
        yield from map(_kind_of, schema["enum"])


def _alternatives(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[object]:
    for word in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(word), list):
            yield from schema[word]
    yield _referenced(schema.get("$ref"), root)


def _referenced(reference: object, root: Mapping[str, Any]) -> object:
    """What `#/$defs/Name` stands for, if it is there."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: object = root
    for step in reference[2:].split("/"):
        found = _get(found, step)
    return found


def _get(value: object, name: str) -> object:
    return cast("Mapping[str, object]", value).get(name) if isinstance(value, Mapping) else None

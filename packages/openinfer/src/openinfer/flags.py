"""Command-line flags made from option Structs: one flag per field, so that neither can forget the other.

`max_num_seqs: int` becomes `--max-num-seqs N`. Values are converted by msgspec and range-checked by the Struct
itself. A field ending in `_bytes` takes `64MiB`; a mapping takes `a=1,b=2`; a tuple takes `a,b`; a bool takes `true`
or `false` (`FlagParser` lets it stand alone, which is true); a list takes one value, and its flag may be repeated.
"""

import argparse
import ast
import inspect
import itertools
import textwrap
import types
from collections.abc import Mapping
from enum import Enum, EnumType
from typing import Any, TypeVar, cast, get_args, get_origin

import msgspec

from openinfer_core import InvalidRequest

Options = TypeVar("Options", bound=msgspec.Struct)

TRUE_OR_FALSE = "true|false"
_METAVARS = {
    "int": "N",
    "float": "X",
    "bool": TRUE_OR_FALSE,
    "str": "NAME",
    "dict": "NAME=X,...",
    "tuple": "A,B,...",
    "list": "VALUE",
}
_BYTE_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def add_flags(
    parser: argparse.ArgumentParser, struct: type[msgspec.Struct], *, skip: frozenset[str] = frozenset()
) -> None:
    """Adds a flag for each field of a Struct, with the field's docstring as its help."""
    group = parser.add_argument_group(f"{struct.__module__.split('.')[0].removeprefix('openinfer_')} options")
    described = field_docstrings(struct)
    for field in msgspec.structs.fields(struct):
        if field.name in skip:
            continue
        group.add_argument(
            flag_of(field.name),
            dest=f"{struct.__name__}.{field.name}",
            metavar="FILE" if field.name.endswith("_file") else _metavar(field.type),
            action="append" if _is_list(field) else "store",
            default=argparse.SUPPRESS,
            help=(described.get(field.name, "") + _default(field)).replace("%", "%%"),
        )


def read_flags(
    namespace: argparse.Namespace, struct: type[Options], *, preset: Mapping[str, Any] | None = None
) -> Options:
    """The Struct that the flags describe.

    Args:
        namespace: what the parser found.
        struct: one that `add_flags` was called with.
        preset: values of fields without a flag.

    Raises:
        InvalidRequest: a value cannot be converted or is out of range; the message names the flag.
    """
    given = given_flags(namespace, struct)
    try:
        return struct(**{**(preset or {}), **given})
    except InvalidRequest as error:
        raise InvalidRequest(f"{flag_of(error.field or '')}: {error}", field=error.field) from error


def given_flags(namespace: argparse.Namespace, struct: type[msgspec.Struct]) -> dict[str, Any]:
    """The fields of a Struct whose flags were given; raises `InvalidRequest` for a value that cannot be converted."""
    given: dict[str, Any] = {}
    for field in msgspec.structs.fields(struct):
        text = getattr(namespace, f"{struct.__name__}.{field.name}", None)
        if text is not None:
            given[field.name] = _convert(field, text)
    return given


def flag_of(field_name: str) -> str:
    """`max_num_seqs` -> `--max-num-seqs`."""
    return "--" + field_name.replace("_", "-")


def field_docstrings(struct: type) -> dict[str, str]:
    """The string under each field of a class and its bases, on one line; empty if the source is not there."""
    found: dict[str, str] = {}
    for cls in reversed(struct.__mro__):
        if cls.__module__.startswith("openinfer") or "." in cls.__module__:
            found.update(_docstrings_of(cls))
    return found


def _docstrings_of(cls: type) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):  # a frozen application carries no sources
        return {}
    body = getattr(tree.body[0], "body", [])
    found: dict[str, str] = {}
    for statement, after in itertools.pairwise(body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = _string_of(after)
            if text is not None:
                found[statement.target.id] = " ".join(text.split())
    return found


def _string_of(statement: ast.AST) -> str | None:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        value = statement.value.value
        return value if isinstance(value, str) else None
    return None


def _convert(field: msgspec.structs.FieldInfo, text: Any) -> Any:
    """Of a list `text` is one, too, since its flag is repeated."""
    flag = flag_of(field.name)
    if _is_list(field):
        return text
    try:
        return msgspec.convert(_parse(field, text), field.type, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        raise InvalidRequest(f"{flag} {text!r}: {error}", field=field.name) from error


def _parse(field: msgspec.structs.FieldInfo, text: str) -> Any:
    kinds = [get_origin(kind) or kind for kind in _alternatives(field.type)]
    if dict in kinds:
        return dict(_pair(item) for item in text.split(",") if item)
    if tuple in kinds:
        return [item for item in text.split(",") if item]
    if field.name.endswith("_bytes"):
        return _bytes(text)
    return text


def _is_list(field: msgspec.structs.FieldInfo) -> bool:
    return get_origin(field.type) is list


def _pair(item: str) -> tuple[str, str]:
    name, equals, value = item.partition("=")
    if not equals:
        raise ValueError(f"{item!r} is not of the form name=value")
    return name, value


def _bytes(text: str) -> str | int:
    for unit, size in _BYTE_UNITS.items():
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * size)
    return text


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if isinstance(annotation, types.UnionType):
        return tuple(kind for kind in get_args(annotation) if kind is not types.NoneType)
    return (annotation,)


def _metavar(annotation: Any) -> str:
    kind = _alternatives(annotation)[0]
    if isinstance(kind, EnumType):
        return "|".join(str(member.value) for member in cast("type[Enum]", kind))
    return _METAVARS.get(getattr(get_origin(kind) or kind, "__name__", ""), "VALUE")


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default is msgspec.NODEFAULT or field.default in (None, "", ()):
        return ""  # what an empty value means, the field's own text says
    return f" (default: {_as_typed(field)})"


def _as_typed(field: msgspec.structs.FieldInfo) -> str:
    """A default as the user would give it: `true`, `64MiB`."""
    if isinstance(field.default, bool):
        return str(field.default).lower()
    if field.name.endswith("_bytes") and field.default:
        unit, size = next(((u, s) for u, s in reversed(_BYTE_UNITS.items()) if field.default % s == 0), ("", 1))
        return f"{field.default // size}{unit}"
    return str(field.default)

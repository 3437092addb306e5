"""What a module says of itself, read from its source: neither it nor a package around it is imported."""

import ast
import sys
import threading
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

NAME = "OPENINFER_CONTRACT"
# CPython 3.11 counts the depth of what it parses in one place for all threads of a process, and ranks that are threads
# load their drafter at once: "SystemError: AST constructor recursion depth mismatch" ended such a start now and then.
_ONE_AT_A_TIME = threading.Lock()


def declared_contract(module: str) -> int:
    """The number that a module assigns to `OPENINFER_CONTRACT` at its top level; 0 if it assigns none.

    Raises:
        ModuleNotFoundError: there is no such module.
        SyntaxError: its source cannot be parsed.
        ValueError: it has no source that can be read, or what it assigns is not one plain number.
    """
    return _contract_in(_source_of(_find(module)), module)


def _contract_in(source: str, module: str) -> int:
    with _ONE_AT_A_TIME:
        tree = ast.parse(source)
    assigned = [value for statement in tree.body for value in _assigned(statement)]
    if not assigned:
        return 0
    match assigned:
        case [ast.Constant(value=int() as number)] if not isinstance(number, bool):
            return number
        case _:
            raise ValueError(f"{module} must say {NAME} once, as a plain number: {NAME} = 1")


def _assigned(statement: ast.stmt) -> list[ast.expr]:
    """What a statement assigns to the name; an import under that name counts as what is no number."""
    match statement:
        case ast.Assign(targets=targets, value=value):
            names = [node for target in targets for node in ast.walk(target)]
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            names = [target]
        case ast.ImportFrom(names=aliases) if any(NAME in (alias.asname, alias.name) for alias in aliases):
            return [ast.Name(NAME)]
        case _:
            return []
    return [value for node in names if isinstance(node, ast.Name) and node.id == NAME]


def _source_of(spec: ModuleSpec) -> str:
    # Loaders of archives have sources that are no files; pytest's loader of test modules has files and no `get_source`.
    get_source = getattr(spec.loader, "get_source", None)
    if get_source is not None:
        source = get_source(spec.name)
    elif spec.has_location and str(spec.origin).endswith(".py"):
        from importlib.util import decode_source

        source = decode_source(Path(str(spec.origin)).read_bytes())
    else:
        source = None
    if source is None:
        raise ValueError(
            f"{spec.name} ({spec.origin or 'a namespace package'}) has no Python source to read {NAME} from; "
            "the entry point must name a module with a .py file"
        )
    return str(source)


def _find(module: str) -> ModuleSpec:
    """The module's spec, found from the outermost package inwards; `importlib.util.find_spec` would import these."""
    names = module.split(".")
    spec = _spec_of(names[0], None)
    for depth in range(2, len(names) + 1):
        spec = _spec_of(".".join(names[:depth]), spec.submodule_search_locations or ())
    return spec


def _spec_of(name: str, path: Iterable[str] | None) -> ModuleSpec:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    spec = spec or (_found_at_top(name) if path is None else _found_in(name, list(path)))
    if spec is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return spec


def _found_at_top(name: str) -> ModuleSpec | None:
    # All finders are asked, as an import would: those of editable installs are among them.
    return next((spec for finder in sys.meta_path if (spec := finder.find_spec(name, None))), None)


def _found_in(name: str, path: Sequence[str]) -> ModuleSpec | None:
    # Not through `PathFinder`: for a namespace package in another one it wants the outer one imported.
    from pkgutil import get_importer

    namespace: list[str] = []
    for entry in path:
        finder = get_importer(entry)
        spec = None if finder is None else finder.find_spec(name)
        if spec is not None and spec.loader is not None:
            return spec
        namespace += (spec and spec.submodule_search_locations) or ()
    if not namespace:
        return None
    found = ModuleSpec(name, None, is_package=True)
    found.submodule_search_locations = namespace
    return found

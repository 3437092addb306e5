"""Record what vLLM asks of a KV connector and what it sends as KV events, from its sources, without running them.

    pip download vllm==0.33.0 --no-deps -d wheels && unzip wheels/vllm-0.33.0-*.whl 'vllm/*.py' -d vllm-0.33.0
    python tools/vllm/record_interface.py 0.25.0=vllm-0.25.0 0.33.0=vllm-0.33.0

Only names, parameters, fields and their order are written: facts that our tests hold our connector and events against.
"""

import ast
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CONNECTOR_RECORD = ROOT / "packages/openinfer-kv-offload/tests/fixtures/vllm_connector.json"
EVENTS_RECORD = ROOT / "packages/openinfer-engine/tests/fixtures/vllm_kv_events.json"
CONNECTOR_SOURCE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
EVENTS_SOURCE = "vllm/distributed/kv_events.py"


def main() -> None:
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    connector = {version: read_connector(Path(folder)) for version, folder in given.items()}
    events = {version: read_events(Path(folder)) for version, folder in given.items()}
    write(CONNECTOR_RECORD, {"source": CONNECTOR_SOURCE, "versions": connector})
    write(EVENTS_RECORD, {"source": EVENTS_SOURCE, "versions": events})


def write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


# What a connector is given and gives back, by where it is defined; not every release has all of it.
GIVEN = {
    CONNECTOR_SOURCE: ("KVConnectorTransferResults",),
    "vllm/config/kv_transfer.py": ("KVTransferConfig",),
    "vllm/v1/core/kv_cache_manager.py": ("KVCacheBlocks",),
    "vllm/v1/core/sched/output.py": ("SchedulerOutput", "NewRequestData", "CachedRequestData"),
    "vllm/v1/kv_cache_interface.py": ("KVCacheConfig", "KVCacheGroupSpec", "KVCacheSpec", "SlidingWindowSpec"),
    "vllm/v1/outputs.py": ("KVConnectorOutput",),
    "vllm/v1/request.py": ("Request",),
}


def read_connector(folder: Path) -> dict[str, Any]:
    base = find_class(folder / CONNECTOR_SOURCE, "KVConnectorBase_V1")
    methods = [node for node in base.body if isinstance(node, ast.FunctionDef)]
    found = {name: classes_of(folder / path).get(name) for path, names in GIVEN.items() for name in names}
    given = {name: read_names(node) for name, node in found.items() if node is not None}
    return {"methods": {node.name: read_method(node) for node in methods}, "given": given}


def read_names(node: ast.ClassDef) -> list[str]:
    """Public fields and methods of a class, and what its `__init__` sets."""
    names = {each.target.id for each in node.body if is_field(each)}
    for method in [each for each in node.body if isinstance(each, ast.FunctionDef)]:
        names.add(method.name)
        if method.name == "__init__":
            names |= {each.attr for each in ast.walk(method) if is_set_on_self(each)}
    return sorted(name for name in names if not name.startswith("_"))


def is_set_on_self(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def read_method(node: ast.FunctionDef) -> dict[str, Any]:
    decorators = {ast.unparse(each) for each in node.decorator_list}
    kinds = {"property", "classmethod", "staticmethod"} & decorators
    return {
        "kind": kinds.pop() if kinds else "method",
        "abstract": "abstractmethod" in decorators,
        "parameters": [each.arg for each in node.args.args],
        "defaults": len(node.args.defaults),
        "keywords": node.args.kwarg is not None,
    }


def read_events(folder: Path) -> dict[str, Any]:
    names = ("EventBatch", "KVCacheEvent", "BlockStored", "BlockRemoved", "AllBlocksCleared")
    classes = {name: find_class(folder / EVENTS_SOURCE, name) for name in names}
    return {
        name: {
            "options": {each.arg: ast.literal_eval(each.value) for each in node.keywords if each.arg},
            "fields": [each.target.id for each in node.body if is_field(each)],
            "required": [each.target.id for each in node.body if is_field(each) and each.value is None],
        }
        for name, node in classes.items()
    }


def is_field(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)


def find_class(path: Path, name: str) -> ast.ClassDef:
    return classes_of(path)[name]


def classes_of(path: Path) -> dict[str, ast.ClassDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


if __name__ == "__main__":
    main()

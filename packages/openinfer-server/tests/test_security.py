"""What SECURITY.md says that the code does not do is not in the code."""

import ast
import asyncio
import json
from importlib.util import find_spec
from pathlib import Path

import openinfer_core
import openinfer_server
from openinfer_core.process.local import InProcessEngine
from openinfer_server import Route, RouteDoc, ServerOptions, Tokenizer, build_app
from openinfer_server.testing import ParrotLoop

FORBIDDEN_CALLS = {"eval", "exec", "__import__", "compile"}
FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "torch"}
CLIENTS = {"http", "urllib.request", "requests", "httpx", "aiohttp", "urllib3", "ftplib"}


def sources():
    """Every module of the packages that are installed here and belong to us."""
    names = ("core", "engine", "kernels", "kv_cache", "qwen3", "server")
    for name in names:
        spec = find_spec(f"openinfer_{name}")
        if spec is not None and spec.origin is not None:
            yield from Path(spec.origin).parent.rglob("*.py")


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_nothing_unpickles_or_evaluates():
    seen = 0
    for path in sources():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        seen += 1
        assert not {name.partition(".")[0] for name in imported(tree)} & FORBIDDEN_MODULES, path
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in FORBIDDEN_CALLS, (path, node.lineno)
            if isinstance(node, ast.keyword):
                assert node.arg not in ("allow_pickle", "trust_remote_code"), path
    assert seen > 100


def test_server_has_no_client():
    for package in (openinfer_server, openinfer_core):
        for path in Path(package.__file__).parent.rglob("*.py"):
            if "testing" not in path.parts:
                names = set(imported(ast.parse(path.read_text(encoding="utf-8"))))
                assert not (names | {name.rpartition(".")[0] for name in names}) & (CLIENTS - {"http"}), path
                assert "http.client" not in names, path


def test_fault_is_not_shown(info, tokenizer, caplog):
    """An exception's text may have addresses, paths or another user's data."""
    messages = []

    async def fail(http_request):
        raise RuntimeError("secret at 0x7f3a")

    async def get():
        engine = InProcessEngine(ParrotLoop(info))
        doc = RouteDoc(summary="Fails.", tag="Test")
        route = Route(method="GET", path="/fail", handler=fail, doc=doc)
        app = build_app(
            engine, Tokenizer(tokenizer, num_token_ids=0), None, ServerOptions(), endpoints=[lambda _: [route]]
        )

        async def send(message):
            messages.append(message)

        await app({"type": "http", "method": "GET", "path": "/fail", "headers": []}, None, send)
        await app.stop()
        await engine.close()

    asyncio.run(get())
    head, body = messages
    request_id = dict(head["headers"])[b"x-request-id"].decode()
    assert head["status"] == 500
    assert b"secret" not in body["body"]
    assert json.loads(body["body"])["error"]["code"] == "internal_error"
    assert "secret" in caplog.text
    assert request_id in caplog.text


def test_request_id_cannot_forge_a_line_of_the_log(shared):
    import urllib.request

    for given, kept in (("mine-1:a.b", True), ("a b", False), ("é", False), ("x" * 129, False), ("", False)):
        request = urllib.request.Request(f"{shared.url}/health", headers={"x-request-id": given})
        with urllib.request.urlopen(request) as response:
            assert (response.headers["x-request-id"] == given) is kept

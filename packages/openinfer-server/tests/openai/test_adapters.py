"""Adapters over HTTP: as models of every API, of tenants, loaded and unloaded by operators; the engine is a parrot."""

import contextlib
import http.client
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from openinfer_core import EngineCapability, Failed, FailureKind, GenerateRequest, Refused, TokenEvent
from openinfer_core.control import ControlCommand, LoadAdapter, UnloadAdapter
from openinfer_core.engine import AdapterStats, EngineInfo, EngineStats, adapter_part
from openinfer_server import ServerOptions
from openinfer_server.app import build_app
from openinfer_server.errors import ServerError
from openinfer_server.testing import ParrotLoop

KEYS = {"ops": "operators-key-0123456789", "gold": "gold-key-0123456789abc", "silver": "silver-key-0123456789abc"}
PROMPTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "the stone", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}},
    "/tokenize": {"prompt": "the stone"},
}


class Adapting(ParrotLoop):
    """Keeps what it is told to load, notes what requests name, and knows no names of its own accord."""

    def __init__(self, info: EngineInfo) -> None:
        can = (*info.capabilities, EngineCapability.LOAD_ADAPTER)
        super().__init__(msgspec.structs.replace(info, max_adapters=2, capabilities=can))
        self.adapters: dict[str, LoadAdapter] = {}
        self.named: list[str | None] = []
        self.forgets = False  # between the question which adapters there are and the request

    def submit(self, request: GenerateRequest) -> list[TokenEvent]:
        self.named.append(request.lora)
        if request.lora is not None and (self.forgets or request.lora not in self.adapters):
            return [Failed(request.request_id, FailureKind.NOT_FOUND, "gone by now")]
        return super().submit(request)

    def control(self, command: ControlCommand) -> list[TokenEvent]:
        match command:
            case LoadAdapter() if command.name in self.adapters and not command.in_place:
                raise Refused("it is loaded")
            case LoadAdapter():
                self.adapters[command.name] = command
            case UnloadAdapter() if self.forgets:
                raise Refused("it was unloaded meanwhile")
            case UnloadAdapter():
                del self.adapters[command.name]
            case _:
                return super().control(command)
        return []

    def stats(self) -> EngineStats:
        told = tuple(
            AdapterStats(name=name, digest="00", path=each.path, rank=8, tenants=each.tenants, running=1)
            for name, each in sorted(self.adapters.items())
        )
        return msgspec.structs.replace(super().stats(), adapters=told)


@pytest.fixture
def loop(info: EngineInfo) -> Adapting:
    return Adapting(info)


@pytest.fixture
def ask(start: Any, loop: Adapting, tmp_path: Any) -> Callable[..., tuple[int, Any]]:
    tables = [
        f'[[keys]]\ntenant = "{tenant}"\nlevel = "{"admin" if tenant == "ops" else "user"}"\nkey = "{key}"\n'
        for tenant, key in KEYS.items()
    ]
    (tmp_path / "keys.toml").write_text("".join(tables))
    server = start(loop, ServerOptions(port=0, model_name=["bird"], api_keys_file=str(tmp_path / "keys.toml")))

    def asked(tenant: str, path: str, body: Any = None) -> tuple[int, Any]:
        headers = {"content-type": "application/json", "x-api-key": KEYS[tenant]}
        with contextlib.closing(http.client.HTTPConnection(*server.address, timeout=30)) as connection:
            given = (None if body is None else json.dumps(body), headers)
            connection.request("GET" if body is None else "POST", path, *given)
            response = connection.getresponse()
            data = response.read()
            is_json = "json" in (response.getheader("content-type") or "")
            return response.status, json.loads(data) if is_json else data.decode()

    return asked


def load(ask: Any, name: str = "tuned", **fields: Any) -> tuple[int, Any]:
    return ask("ops", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": "folder", **fields})


@pytest.mark.parametrize("path", PROMPTS)
def test_adapter_is_a_model_of_every_api(ask: Any, loop: Adapting, path: str) -> None:
    body = {**PROMPTS[path], "model": "tuned"}
    status, answer = ask("gold", path, body)
    assert (status, answer["error"].get("code", "model_not_found")) == (404, "model_not_found")
    assert load(ask)[0] == 200
    assert ask("gold", path, body)[0] == 200
    assert ask("gold", path, {**body, "model": "bird"})[0] == 200
    if path != "/tokenize":
        assert loop.named == ["tuned", None]


def test_streamed_request_whose_adapter_goes_meanwhile_is_answered_404(ask: Any, loop: Adapting) -> None:
    load(ask)
    loop.forgets = True
    body = {**PROMPTS["/v1/chat/completions"], "model": "tuned", "stream": True}
    status, answer = ask("gold", "/v1/chat/completions", body)
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (404, "model_not_found", "model")


def test_models_have_adapters_with_their_parent(ask: Any) -> None:
    load(ask)
    listed = ask("gold", "/v1/models")[1]["data"]
    assert [(each["id"], each["parent"]) for each in listed] == [("bird", None), ("tuned", "bird")]
    assert ask("gold", "/v1/models/tuned")[1]["parent"] == "bird"
    assert "folder" not in json.dumps(listed)


def test_adapter_of_a_tenant_is_seen_and_used_by_it_alone(ask: Any) -> None:
    assert load(ask, tenants=["gold"])[0] == 200
    body = {**PROMPTS["/v1/completions"], "model": "tuned"}
    assert ask("gold", "/v1/completions", body)[0] == 200
    for path, given in (("/v1/completions", body), ("/v1/models/tuned", None)):
        status, answer = ask("silver", path, given)
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert "tuned" not in answer["error"]["message"].partition("this is")[2]
    assert [each["id"] for each in ask("silver", "/v1/models")[1]["data"]] == ["bird"]


def test_operators_load_and_unload(ask: Any, loop: Adapting) -> None:
    assert load(ask)[0] == 200
    assert loop.adapters["tuned"] == LoadAdapter("tuned", "folder")
    status, answer = load(ask)
    assert (status, answer["error"]["code"]) == (400, "lora_not_loaded")
    assert load(ask, load_inplace=True)[0] == 200
    assert load(ask, load_inplace=None, tenants=None, name="other")[0] == 200
    unload = {"lora_name": "tuned", "lora_int_id": 3}
    assert ask("ops", "/v1/unload_lora_adapter", unload)[0] == 200
    assert ask("ops", "/v1/unload_lora_adapter", unload)[0] == 404
    assert ask("gold", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b"})[0] == 403


def test_unload_that_another_one_came_before_is_404(ask: Any, loop: Adapting) -> None:
    load(ask)
    loop.forgets = True
    status, answer = ask("ops", "/v1/unload_lora_adapter", {"lora_name": "tuned"})
    assert (status, answer["error"]["code"]) == (404, "lora_not_found")


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_name": ""},
        {"lora_name": "x" * 513},
        {"lora_path": ""},
        {"lora_path": "x" * 4097},
        {"tenants": []},
        {"tenants": [""]},
        {"tenants": ["x"] * 257},
        {"lora_name": "bird"},
        {"lora_name": 3},
        {"further": 1},
    ],
)
def test_wrong_fields_are_refused_before_the_engine_hears_of_them(ask: Any, loop: Adapting, fields: Any) -> None:
    body = {"lora_name": "tuned", "lora_path": "folder", **fields}
    assert ask("ops", "/v1/load_lora_adapter", body)[0] == 400
    assert not loop.adapters


def test_metrics_have_the_labels_that_routers_read(ask: Any) -> None:
    for name in ("b", "a"):
        load(ask, name)
    page = ask("ops", "/metrics")[1]
    labels = 'max_lora="2",running_lora_adapters="a,b",waiting_lora_adapters=""'
    assert f"openinfer_lora_requests_info{{{labels}}} " in page
    assert "openinfer_lora_adapters 2" in page


def test_metrics_name_adapters_of_tenants_to_operators_alone(ask: Any) -> None:
    """The page needs no key."""
    load(ask, "open")
    load(ask, "secret", tenants=["gold"])
    assert 'running_lora_adapters="open,secret"' in ask("ops", "/metrics")[1]
    for tenant in ("gold", "silver"):
        page = ask(tenant, "/metrics")[1]
        assert 'running_lora_adapters="open"' in page
        assert "openinfer_lora_adapters 1" in page
        assert "secret" not in page


def test_adapter_with_the_models_name_ends_the_start(info: EngineInfo) -> None:
    handle: Any = SimpleNamespace(info=msgspec.structs.replace(info, composition={adapter_part("bird"): "rank 8"}))
    tokenizer: Any = None  # nothing is read before names are compared
    with pytest.raises(ServerError, match="names both the model that is served and an adapter"):
        build_app(handle, tokenizer, None, ServerOptions(port=0, model_name=["bird"]))

"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, with vLLM's names, for operators.

The engine reads the folder, on its own machine and below `--lora-root` alone. Adapters are its state: when a call is
answered, every API worker serves what it has changed.
"""

import asyncio
from typing import Any

import msgspec

from openinfer_core.control import LoadAdapter, UnloadAdapter
from openinfer_core.errors import EngineClosed, Refused
from openinfer_server.http.access import Level
from openinfer_server.http.api_errors import ApiError, busy, invalid, shutting_down
from openinfer_server.http.request import HttpRequest
from openinfer_server.http.routes import Handler, Route, RouteDoc
from openinfer_server.request.fields import Int64
from openinfer_server.service import Service

LOAD_TIMEOUT_S = 300.0
"""For reading an adapter; the engine goes on with it."""
_MAX_NAME_LENGTH = 512
_MAX_PATH_LENGTH = 4096
_MAX_TENANTS = 256


class LoadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/load_lora_adapter`."""

    lora_name: str
    lora_path: str  # a folder in PEFT's layout, below --lora-root on the engine's machine
    load_inplace: bool | None = None  # whether it may replace another of that name; what came before keeps the old one
    tenants: list[str] | None = None  # who may see and use it; by default all


class UnloadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/unload_lora_adapter`."""

    lora_name: str
    lora_int_id: Int64 | None = None  # vLLM's, without effect


_load_decoder = msgspec.json.Decoder(LoadAdapterRequest)
_unload_decoder = msgspec.json.Decoder(UnloadAdapterRequest)


def adapter_routes(service: Service) -> list[Route]:
    async def load(http_request: HttpRequest) -> None:
        request = await http_request.read_json(_load_decoder)
        _check(request)
        _require_adapters(service)
        if request.lora_name in service.model_names:
            raise invalid("lora_name", f"{request.lora_name[:200]!r} is the name of a model that is served here")
        command = LoadAdapter(
            request.lora_name, request.lora_path, bool(request.load_inplace), tuple(request.tenants or ())
        )
        await _obey(service, command, refused=400, code="lora_not_loaded")
        await http_request.send(200, msgspec.json.encode(f"Success: LoRA adapter {request.lora_name!r} is loaded"))

    async def unload(http_request: HttpRequest) -> None:
        request = await http_request.read_json(_unload_decoder)
        names = [adapter.name for adapter in await service.adapters(None)]
        if request.lora_name not in names:
            message = f"no LoRA adapter {request.lora_name[:200]!r} is loaded"
            raise ApiError(404, message, param="lora_name", code="lora_not_found")
        await _obey(service, UnloadAdapter(request.lora_name), refused=404, code="lora_not_found")
        await http_request.send(200, msgspec.json.encode(f"Success: LoRA adapter {request.lora_name!r} is unloaded"))

    def route(name: str, handler: Handler, summary: str, body: Any) -> Route:
        doc = RouteDoc(summary=summary, tag="Adapters", body=body, response=str, errors=(404, 408, 413, 415, 503))
        return Route(method="POST", path=f"/v1/{name}_lora_adapter", handler=handler, level=Level.ADMIN, doc=doc)

    return [
        route("load", load, "Loads a LoRA adapter, which clients then ask for as a model.", LoadAdapterRequest),
        route("unload", unload, "Unloads one; requests that wait for it end with 404.", UnloadAdapterRequest),
    ]


def _check(request: LoadAdapterRequest) -> None:
    if not 1 <= len(request.lora_name) <= _MAX_NAME_LENGTH:
        raise invalid("lora_name", f"lora_name must have 1 to {_MAX_NAME_LENGTH} characters")
    if not 1 <= len(request.lora_path) <= _MAX_PATH_LENGTH:
        raise invalid("lora_path", f"lora_path must have 1 to {_MAX_PATH_LENGTH} characters")
    if (tenants := request.tenants) is None:
        return
    # None named is no way to say all: a list that came out empty would open the adapter to everyone.
    if not 1 <= len(tenants) <= _MAX_TENANTS or not all(1 <= len(each) <= _MAX_NAME_LENGTH for each in tenants):
        raise invalid("tenants", f"tenants must be 1 to {_MAX_TENANTS} names; leave it out for all")


def _require_adapters(service: Service) -> None:
    if not service.info.max_adapters:
        message = (
            f"this server serves no LoRA adapters: start it with --lora or --lora-root, if the family "
            f"{service.info.family} has them, or merge the adapter into the checkpoint"
        )
        raise ApiError(400, message, code="lora_not_supported")


async def _obey(service: Service, command: LoadAdapter | UnloadAdapter, *, refused: int, code: str) -> None:
    try:
        async with asyncio.timeout(LOAD_TIMEOUT_S):
            await service.link.handle.control(command)
    except Refused as error:
        raise ApiError(refused, str(error), code=code) from error
    except EngineClosed as error:
        raise shutting_down(service.link.ended_because) from error
    except TimeoutError as error:
        raise busy("the engine does not answer") from error

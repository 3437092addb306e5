"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, with vLLM's names: refused, no family serves adapters yet."""

from typing import Any

import msgspec

from openinfer_server.http.access import Level
from openinfer_server.http.api_errors import ApiError, invalid
from openinfer_server.http.request import HttpRequest
from openinfer_server.http.routes import Handler, Route, RouteDoc
from openinfer_server.service import Service


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/load_lora_adapter`."""

    lora_name: str
    lora_path: str  # a folder in PEFT's layout, on the server's disk


class UnloadAdapter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/unload_lora_adapter`."""

    lora_name: str


_load_decoder = msgspec.json.Decoder(LoadAdapter)
_unload_decoder = msgspec.json.Decoder(UnloadAdapter)


def adapter_routes(service: Service) -> list[Route]:
    async def load(http_request: HttpRequest) -> None:
        request = await http_request.read_json(_load_decoder)
        if not request.lora_name or not request.lora_path:
            raise invalid("lora_name", "lora_name and lora_path must not be empty")
        why = f"the family {service.info.family} serves no LoRA adapters"
        raise ApiError(400, f"{why}; merge the adapter into the checkpoint and serve that", code="lora_not_supported")

    async def unload(http_request: HttpRequest) -> None:
        request = await http_request.read_json(_unload_decoder)
        message = f"no LoRA adapter {request.lora_name[:200]!r} is loaded"
        raise ApiError(404, message, param="lora_name", code="lora_not_found")

    def route(name: str, handler: Handler, summary: str, body: Any) -> Route:
        doc = RouteDoc(summary=summary, tag="Adapters", body=body, media_type=b"", errors=(404, 408, 413, 415))
        return Route(method="POST", path=f"/v1/{name}_lora_adapter", handler=handler, level=Level.ADMIN, doc=doc)

    return [
        route("load", load, "Loads a LoRA adapter; refused while no family serves them.", LoadAdapter),
        route("unload", unload, "Unloads one.", UnloadAdapter),
    ]

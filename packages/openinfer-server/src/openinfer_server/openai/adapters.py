"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, with vLLM's names: no engine serves adapters yet."""

import msgspec

from openinfer_server.http.access import Level
from openinfer_server.http.api_errors import ApiError, invalid
from openinfer_server.http.request import HttpRequest
from openinfer_server.http.routes import Route, RouteDoc
from openinfer_server.service import Service

ERRORS = (404, 408, 413, 415)


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/load_lora_adapter`."""

    lora_name: str
    lora_path: str
    """A folder in PEFT's layout, on the server's disk."""


class UnloadAdapter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/unload_lora_adapter`."""

    lora_name: str


_load_decoder = msgspec.json.Decoder(LoadAdapter)
_unload_decoder = msgspec.json.Decoder(UnloadAdapter)


class Adapters:
    """The routes' handlers."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def load(self, http_request: HttpRequest) -> None:
        """Refuses: no family serves adapters yet."""
        request = await http_request.read_json(_load_decoder)
        if not request.lora_name or not request.lora_path:
            raise invalid("lora_name", "lora_name and lora_path must not be empty")
        family = self._service.info.family
        message = f"the family {family} serves no LoRA adapters; merge the adapter into the checkpoint and serve that"
        raise ApiError(400, message, code="lora_not_supported")

    async def unload(self, http_request: HttpRequest) -> None:
        """404: none can be loaded."""
        request = await http_request.read_json(_unload_decoder)
        message = f"no LoRA adapter {request.lora_name[:200]!r} is loaded"
        raise ApiError(404, message, param="lora_name", code="lora_not_found")


def adapter_routes(service: Service) -> list[Route]:
    """The adapters' routes."""
    adapters = Adapters(service)
    return [
        Route(
            method="POST",
            path="/v1/load_lora_adapter",
            handler=adapters.load,
            level=Level.ADMIN,
            doc=RouteDoc(
                summary="Loads a LoRA adapter; refused while no family serves them.",
                tag="Adapters",
                body=LoadAdapter,
                media_type=b"",
                errors=ERRORS,
            ),
        ),
        Route(
            method="POST",
            path="/v1/unload_lora_adapter",
            handler=adapters.unload,
            level=Level.ADMIN,
            doc=RouteDoc(summary="Unloads one.", tag="Adapters", body=UnloadAdapter, media_type=b"", errors=ERRORS),
        ),
    ]

"""The routes that describe the one model, under each of the names it is served by."""

from datetime import UTC, datetime

import msgspec

from openinfer_ollama.objects import (
    ApiVersion,
    Details,
    ListedModel,
    Running,
    RunningModel,
    Shown,
    Tags,
    timestamp,
)
from openinfer_ollama.types import ShowRequest
from openinfer_server import HttpRequest, Service

# The release of Ollama whose API these routes follow; clients ask for it to know what they may send.
OLLAMA_VERSION = "0.12.6"
FOREVER = "9999-12-31T23:59:59Z"
LATEST = ":latest"

_show_decoder = msgspec.json.Decoder(ShowRequest)


async def served_name(service: Service, name: str, owner: str) -> str:
    """The served name that a client means, or an adapter's: `qwen3` and `qwen3:latest` are one.

    Raises:
        ApiError: 404; the model is not served here.
    """
    for meant in (name, name.removesuffix(LATEST), name + LATEST):
        if meant in service.model_names:
            return meant
    return await service.find_model(name.removesuffix(LATEST), owner)


class Models:
    """The routes' handlers."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def tags(self, http_request: HttpRequest) -> None:
        models = [
            ListedModel(name=name, model=name, modified_at=self._started, size=self._size, details=self._details)
            for name in self._service.model_names
        ]
        await http_request.send(200, msgspec.json.encode(Tags(models=models)))

    async def running(self, http_request: HttpRequest) -> None:
        models = [
            RunningModel(
                name=name,
                model=name,
                size=self._size,
                size_vram=self._size,
                details=self._details,
                expires_at=FOREVER,
                context_length=self._service.info.max_model_tokens,
            )
            for name in self._service.model_names
        ]
        await http_request.send(200, msgspec.json.encode(Running(models=models)))

    async def show(self, http_request: HttpRequest) -> None:
        request = await http_request.read_json(_show_decoder)
        service, info = self._service, self._service.info
        await served_name(service, request.model, http_request.owner)
        defaults = service.sampling_defaults.values
        architecture = info.family
        shown = Shown(
            parameters="\n".join(f"{_PARAMETERS.get(name, name)} {value:g}" for name, value in defaults.items()),
            template="" if service.template is None else service.template.source,
            details=self._details,
            model_info={
                "general.architecture": architecture,
                "general.basename": info.model,
                f"{architecture}.context_length": info.max_model_tokens,
                f"{architecture}.vocab_size": info.num_token_ids,
            },
            capabilities=self._capabilities,
            modified_at=self._started,
        )
        await http_request.send(200, msgspec.json.encode(shown))

    async def version(self, http_request: HttpRequest) -> None:
        await http_request.send(200, msgspec.json.encode(ApiVersion(version=OLLAMA_VERSION)))

    @property
    def _capabilities(self) -> list[str]:
        service = self._service
        told = {"tools": service.calls_tools, "thinking": service.tells_reasoning and service.has_chat_template}
        return ["completion", *(name for name, has in told.items() if has)]

    @property
    def _details(self) -> Details:
        family = self._service.info.family
        return Details(family=family, families=[family])

    @property
    def _size(self) -> int:
        return self._service.info.memory_bytes.get("weights", 0)

    @property
    def _started(self) -> str:
        return timestamp(datetime.fromtimestamp(self._service.started, UTC))


_PARAMETERS = {"repetition_penalty": "repeat_penalty"}  # ours -> the Modelfile's

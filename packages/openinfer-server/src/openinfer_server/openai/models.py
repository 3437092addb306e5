"""`/v1/models`: the names the server answers to, for OpenAI's clients and for Anthropic's."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Literal

import msgspec

from openinfer_server.http.api_errors import invalid, refused
from openinfer_server.http.request import HttpRequest
from openinfer_server.http.routes import Route, RouteDoc
from openinfer_server.openai.objects import Model, ModelList
from openinfer_server.request.fields import between
from openinfer_server.service import Service

DEFAULT_LIMIT = 20  # Anthropic's default of `limit`
MAX_LIMIT = 1000


class AnthropicModel(msgspec.Struct, frozen=True, kw_only=True):
    """A name the server answers to, in Anthropic's shape."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str  # when this server started: models have no date of their own here
    lifecycle: Literal["active"] = "active"
    capabilities: None = None
    deprecated_at: None = None
    retires_at: None = None
    line: None = None
    max_input_tokens: int
    max_tokens: int


class AnthropicModelList(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `/v1/models` in Anthropic's shape."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


class ModelQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Query of `/v1/models`; OpenAI's clients send none. Others (`beta`, `api-version`) say how the client speaks."""

    after_id: str | None = None
    before_id: str | None = None
    limit: Annotated[int, between(1, MAX_LIMIT)] | None = None
    lifecycle: list[str] | None = None
    workspace_id: str | None = None


class Models:
    """The routes' handlers."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def list(self, http_request: HttpRequest) -> None:
        query = http_request.read_query(ModelQuery)
        if query.workspace_id is not None:
            raise refused("workspace_id", "this server has no workspaces")
        parents = await self._parents(http_request)
        names = [*self._service.model_names, *parents]
        page, has_more = _page(names, query, default=DEFAULT_LIMIT if http_request.for_anthropic else len(names))
        if http_request.for_anthropic:
            models = [self._anthropic_model(name) for name in page]
            ends = (page[0], page[-1]) if page else (None, None)
            body = AnthropicModelList(data=models, has_more=has_more, first_id=ends[0], last_id=ends[1])
            await http_request.send(200, msgspec.json.encode(body))
        else:
            listed = ModelList(data=[self._model(name, parents.get(name)) for name in page])
            await http_request.send(200, msgspec.json.encode(listed))

    async def retrieve(self, http_request: HttpRequest) -> None:
        name = await self._service.find_model(http_request.parameters["model"], http_request.owner)
        parent = None if name in self._service.model_names else self._service.model_names[0]
        model = self._anthropic_model(name) if http_request.for_anthropic else self._model(name, parent)
        await http_request.send(200, msgspec.json.encode(model))

    async def _parents(self, http_request: HttpRequest) -> dict[str, str]:
        """Adapters that the client may use -> the model that they change."""
        adapters = await self._service.adapters(http_request.owner)
        return {adapter.name: self._service.model_names[0] for adapter in adapters}

    def _model(self, name: str, parent: str | None) -> Model:
        service = self._service
        return Model(
            id=name,
            created=service.started,
            root=service.info.model,
            parent=parent,
            max_model_len=service.info.max_model_tokens,
            sampling_defaults=dict(service.sampling_defaults.values),
        )

    def _anthropic_model(self, name: str) -> AnthropicModel:
        tokens = self._service.info.max_model_tokens
        created_at = datetime.fromtimestamp(self._service.started, UTC).isoformat().replace("+00:00", "Z")
        return AnthropicModel(
            id=name, display_name=name, created_at=created_at, max_input_tokens=tokens, max_tokens=tokens
        )


def _page(names: Sequence[str], query: ModelQuery, *, default: int) -> tuple[Sequence[str], bool]:
    limit = default if query.limit is None else query.limit
    if query.limit is not None and not 1 <= limit <= MAX_LIMIT:
        raise invalid("limit", f"limit is {limit}; it must be between 1 and {MAX_LIMIT}")
    if query.lifecycle is not None and "active" not in query.lifecycle:
        return (), False
    begin, end = 0, len(names)
    if query.after_id is not None:
        begin = _index(names, query.after_id, "after_id") + 1
    if query.before_id is not None:
        end = _index(names, query.before_id, "before_id")
        begin = max(begin, end - limit)
    page = names[begin:end]
    return page[:limit], len(page) > limit


def _index(names: Sequence[str], name: str, field: str) -> int:
    if name not in names:
        raise invalid(field, f"{field} names no model of this server")
    return list(names).index(name)


def model_routes(service: Service) -> list[Route]:
    models = Models(service)
    return [
        Route(
            method="GET",
            path="/v1/models",
            handler=models.list,
            doc=RouteDoc(
                summary="Lists the names the server answers to.",
                tag="Models",
                query=ModelQuery,
                response=(ModelList, AnthropicModelList),
            ),
        ),
        Route(
            method="GET",
            path="/v1/models/{model:path}",
            handler=models.retrieve,
            doc=RouteDoc(
                summary="Describes one of them.", tag="Models", response=(Model, AnthropicModel), errors=(404,)
            ),
        ),
    ]

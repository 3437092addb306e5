"""Routes for operators that stop an engine for a while: pause, sleep, and new weights. vLLM's names where it has them.

Each is one command to the engine (`openinfer_core.control`), answered when that has obeyed: all API workers of a server
share one engine, so what is answered here holds for every one of them.
"""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Literal

import msgspec

from openinfer_core.control import (
    CAPABILITY_OF,
    COMMAND_TIMEOUT_S,
    ControlCommand,
    InFlight,
    Pause,
    Resume,
    Sleep,
    UpdateWeights,
    Wake,
    checked_command,
)
from openinfer_core.engine import EngineState
from openinfer_core.errors import EngineClosed, InvalidRequest, Refused
from openinfer_server.http.access import Level
from openinfer_server.http.api_errors import ApiError, busy, shutting_down
from openinfer_server.http.request import HttpRequest
from openinfer_server.http.routes import Route, RouteDoc
from openinfer_server.service import Service

# What becomes of requests in flight; `keep` by default.
Mode = Literal["keep", "abort"]


class PauseQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Query of `POST /pause`."""

    mode: Mode = "keep"  # requests in flight go on after `/resume`, or end


class SleepQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Query of `POST /sleep`."""

    # 1: the same weights come back; 2: they are read again, if they are in a folder
    level: Literal[1, 2] = 1
    mode: Mode = "keep"  # requests in flight go on after `/wake_up`, or end


class NoQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Query of a route where there is nothing to choose."""


class WeightUpdate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /update_weights`."""

    path: str  # a folder of safetensors below `--weights-root`, on the server's machine
    content_hash: str | None = None  # of every byte of the weights, 32 to 128 hexadecimal digits
    mode: Mode = "keep"  # requests in flight go on with the new weights, or end
    drafter_path: str | None = None  # a folder below the same root, of a drafter that has a folder of its own


class CommandDone(msgspec.Struct, frozen=True):
    """Response of a command."""

    status: str  # `done`
    state: EngineState  # that the engine is in now
    weights_version: str  # what KV is told apart by


class IsSleeping(msgspec.Struct, frozen=True):
    """Response of `/is_sleeping`."""

    is_sleeping: bool


class IsPaused(msgspec.Struct, frozen=True):
    """Response of `/is_paused`."""

    is_paused: bool


_update_decoder = msgspec.json.Decoder(WeightUpdate)


class EngineCommands:
    """The routes' handlers."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def pause(self, http_request: HttpRequest) -> None:
        """No step runs until `/resume`; requests that come meanwhile wait."""
        query = http_request.read_query(PauseQuery)
        await self._answer(http_request, Pause(InFlight(query.mode)))

    async def resume(self, http_request: HttpRequest) -> None:
        http_request.read_query(NoQuery)
        await self._answer(http_request, Resume())

    async def sleep(self, http_request: HttpRequest) -> None:
        """Gives the memory of weights and KV back; requests that come meanwhile are answered with 503."""
        query = http_request.read_query(SleepQuery)
        await self._answer(http_request, Sleep(keeps_weights=query.level == 1, requests=InFlight(query.mode)))

    async def wake_up(self, http_request: HttpRequest) -> None:
        http_request.read_query(NoQuery)
        await self._answer(http_request, Wake())

    async def update_weights(self, http_request: HttpRequest) -> None:
        """Replaces all weights by those of a folder, between two steps."""
        update = await http_request.read_json(_update_decoder)
        command = UpdateWeights(
            path=update.path,
            content_hash=update.content_hash,
            requests=InFlight(update.mode),
            drafter_path=update.drafter_path,
        )
        try:
            checked_command(command)
        except InvalidRequest as error:
            raise ApiError(400, f"path, content_hash or drafter_path: {error}", code="invalid_value") from error
        await self._answer(http_request, command)

    async def is_sleeping(self, http_request: HttpRequest) -> None:
        state = (await self._stats())[0]
        await http_request.send(200, msgspec.json.encode(IsSleeping(state is EngineState.ASLEEP)))

    async def is_paused(self, http_request: HttpRequest) -> None:
        state = (await self._stats())[0]
        await http_request.send(200, msgspec.json.encode(IsPaused(state is EngineState.PAUSED)))

    async def _answer(self, http_request: HttpRequest, command: ControlCommand) -> None:
        try:
            await self._ask(self._service.link.handle.control(command))
        except Refused as error:
            raise await self._refused(command, error) from error
        state, version = await self._stats()
        await http_request.send(200, msgspec.json.encode(CommandDone("done", state, version)))

    async def _refused(self, command: ControlCommand, error: Refused) -> ApiError:
        """400 for what can never be, 503 where nothing is served because of it, 409 for what the state forbids."""
        if CAPABILITY_OF[type(command)] not in self._service.info.capabilities:
            return ApiError(400, str(error), code="not_supported")
        state, _ = await self._stats()
        if state is EngineState.WITHOUT_WEIGHTS or isinstance(command, Wake):
            return busy(str(error))
        if state is EngineState.ASLEEP or isinstance(command, Sleep):
            return ApiError(409, str(error), code="conflict")
        return ApiError(400, str(error), code="invalid_value")

    async def _stats(self) -> tuple[EngineState, str]:
        stats = await self._ask(self._service.link.stats())
        if stats is None:
            raise shutting_down(self._service.link.ended_because)
        return stats.state, stats.weights_version

    async def _ask(self, question: Coroutine[Any, Any, Any]) -> Any:
        try:
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                return await question
        except EngineClosed as error:
            raise shutting_down(self._service.link.ended_because) from error
        except TimeoutError as error:
            raise busy("the engine does not answer yet; it goes on with the command") from error


def engine_command_routes(service: Service) -> list[Route]:
    commands = EngineCommands(service)

    def route(
        method: str,
        path: str,
        handler: Callable[[HttpRequest], Coroutine[Any, Any, None]],
        summary: str,
        *,
        level: Level = Level.ADMIN,
        errors: tuple[int, ...] = (409, 503),
        response: type = CommandDone,
        body: Any = None,
        query: type | None = None,
    ) -> Route:
        about = RouteDoc(summary=summary, tag="Engine", errors=errors, response=response, body=body, query=query)
        return Route(method=method, path=path, handler=handler, level=level, doc=about)

    post = partial(route, "POST")
    ask: dict[str, Any] = {"level": Level.USER, "errors": (503,)}
    return [
        post("/pause", commands.pause, "Stops all requests for a while.", query=PauseQuery),
        post("/resume", commands.resume, "Goes on after a pause.", query=NoQuery),
        post("/sleep", commands.sleep, "Gives the memory of weights and KV back.", query=SleepQuery),
        post("/wake_up", commands.wake_up, "Takes it again.", query=NoQuery),
        post(
            "/update_weights",
            commands.update_weights,
            "Replaces all weights.",
            body=WeightUpdate,
            errors=(408, 409, 413, 415, 503),
        ),
        route("GET", "/is_sleeping", commands.is_sleeping, "Whether it has given it back.", response=IsSleeping, **ask),
        route("GET", "/is_paused", commands.is_paused, "Whether it is paused.", response=IsPaused, **ask),
    ]

"""What operators have Dynamo ask of an engine (`POST /engine/control/NAME`): a sleep, a pause, an empty cache.

Names are those that Dynamo's worker knows: before `sleep` and `pause_generation` it takes itself out of discovery, and
comes back after `wake_up` and `resume_generation`. A sleep's `level` is vLLM's: 1 keeps the weights, 2 does not.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from openinfer_core import EngineCapability, EngineHandle, InvalidRequest
from openinfer_core.control import ControlCommand, FlushCache, InFlight, Pause, Resume, Sleep, Wake


class _Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An empty object."""


class _PauseBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    requests: InFlight = InFlight.KEEP


class _SleepBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    level: Literal[1, 2] = 1
    requests: InFlight = InFlight.KEEP


def _sleep(body: Any) -> Sleep:
    return Sleep(keeps_weights=body.level == 1, requests=body.requests)


_COMMANDS: Mapping[str, tuple[type[msgspec.Struct], Callable[[Any], ControlCommand]]] = {
    "clear_cache": (_Nothing, lambda _: FlushCache()),
    "pause_generation": (_PauseBody, lambda body: Pause(body.requests)),
    "resume_generation": (_Nothing, lambda _: Resume()),
    "sleep": (_SleepBody, _sleep),
    "wake_up": (_Nothing, lambda _: Wake()),
}
_NEEDED: Mapping[str, EngineCapability] = {
    "clear_cache": EngineCapability.FLUSH_CACHE,
    "pause_generation": EngineCapability.PAUSE,
    "resume_generation": EngineCapability.PAUSE,
    "sleep": EngineCapability.SLEEP,
    "wake_up": EngineCapability.SLEEP,
}


def controls_of(capabilities: tuple[EngineCapability, ...] | None) -> set[str]:
    """Names of what an engine with these can be asked; all of them while that is not known."""
    if capabilities is None:
        return set(_COMMANDS)
    return {name for name in _COMMANDS if _NEEDED[name] in capabilities}


async def obey(handle: EngineHandle, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Has the engine obey, and returns once it has.

    Raises:
        InvalidRequest: there is no such control, or its body has other fields.
        Refused: the engine cannot, or not now.
        EngineClosed: it has ended.
    """
    if name not in _COMMANDS:
        raise InvalidRequest(f"there is no control {name[:64]!r}; there are {', '.join(_COMMANDS)}", field="control")
    fields, make = _COMMANDS[name]
    try:
        asked = msgspec.convert(dict(body), fields)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{name}: {error}", field="body") from error
    await handle.control(make(asked))
    return {"status": "ok"}


def told(message: str) -> dict[str, Any]:
    """What Dynamo answers where an engine does not obey, in the form of its own."""
    return {"status": "error", "message": message}

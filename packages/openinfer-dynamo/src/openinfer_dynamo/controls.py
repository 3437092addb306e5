"""What operators have Dynamo ask of an engine (`POST /engine/control/NAME`): a sleep, a pause, an empty cache.

Dynamo has no names of its own for these; a body says what the fields of `openinfer_core.control` are called here.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from openinfer_core import EngineCapability, EngineHandle, InvalidRequest, Refused
from openinfer_core.control import CAPABILITY_OF, ControlCommand, FlushCache, InFlight, Pause, Resume, Sleep, Wake


class _Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An empty object."""


class _PauseBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    requests: InFlight = InFlight.KEEP


class _SleepBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keeps_weights: bool = True
    requests: InFlight = InFlight.KEEP


_COMMANDS: Mapping[str, tuple[type[msgspec.Struct], type[ControlCommand]]] = {
    "flush_cache": (_Nothing, FlushCache),
    "pause": (_PauseBody, Pause),
    "resume": (_Nothing, Resume),
    "sleep": (_SleepBody, Sleep),
    "wake": (_Nothing, Wake),
}


def controls_of(capabilities: tuple[EngineCapability, ...] | None) -> set[str]:
    """Names of what an engine with these can be asked; all of them while that is not known."""
    if capabilities is None:
        return set(_COMMANDS)
    return {name for name, (_, command) in _COMMANDS.items() if CAPABILITY_OF[command] in capabilities}


async def obey(handle: EngineHandle, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Has the engine obey, and returns once it has.

    Raises:
        InvalidRequest: there is no such control, or its body has other fields.
        Refused: the engine cannot, or not now.
        EngineClosed: it has ended.
    """
    if name not in _COMMANDS:
        raise InvalidRequest(f"there is no control {name[:64]!r}; there are {', '.join(_COMMANDS)}", field="control")
    fields, command = _COMMANDS[name]
    try:
        asked = msgspec.convert(dict(body), fields)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{name}: {error}", field="body") from error
    await handle.control(command(**msgspec.structs.asdict(asked)))
    return {"status": "ok"}


def told(error: InvalidRequest | Refused) -> dict[str, Any]:
    """What Dynamo answers where an engine does not obey, in the form of its own."""
    return {"status": "error", "message": str(error)}

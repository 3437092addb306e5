"""Commands to an engine beside requests: what changes it while it runs.

An engine obeys those that `EngineInfo.capabilities` names, in the order in which they come among its requests, and
refuses every other one by name.
"""

from collections.abc import Mapping
from typing import Annotated, TypeAlias

import msgspec

from openinfer_core.engine import EngineCapability
from openinfer_core.errors import Refused

MAX_PATH_LENGTH = 4096
"""Bound of a path, in characters."""
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
_Path = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_PATH_LENGTH)]


class FlushCache(msgspec.Struct, frozen=True, array_like=True, tag="flush_cache"):
    """No request that comes later finds KV that was computed before in the engine's own memory.

    Requests that run keep theirs. KV tiers keep what they hold.
    """


class LoadAdapter(msgspec.Struct, frozen=True, array_like=True, tag="load_adapter"):
    """Brings an adapter to the device; under a name that is in use, requests that come later get the new one."""

    name: _Name
    path: _Path
    """A folder on the engine's machine."""


class UnloadAdapter(msgspec.Struct, frozen=True, array_like=True, tag="unload_adapter"):
    """Frees the slot of an adapter when its last request has ended."""

    name: _Name


class Sleep(msgspec.Struct, frozen=True, array_like=True, tag="sleep"):
    """Gives the device's memory back; no request is served before `Wake`."""

    keeps_weights: bool = True
    """In host memory; otherwise they are read again."""


class Wake(msgspec.Struct, frozen=True, array_like=True, tag="wake"):
    """Ends a sleep."""


class UpdateWeights(msgspec.Struct, frozen=True, array_like=True, tag="update_weights"):
    """Reads the weights anew, and voids what was computed with the old ones."""

    path: _Path
    """A folder on the engine's machine with a checkpoint of the same shapes."""


ControlCommand: TypeAlias = FlushCache | LoadAdapter | UnloadAdapter | Sleep | Wake | UpdateWeights

CAPABILITY_OF: Mapping[type[msgspec.Struct], EngineCapability] = {
    FlushCache: EngineCapability.FLUSH_CACHE,
    LoadAdapter: EngineCapability.LOAD_ADAPTER,
    UnloadAdapter: EngineCapability.LOAD_ADAPTER,
    Sleep: EngineCapability.SLEEP,
    Wake: EngineCapability.SLEEP,
    UpdateWeights: EngineCapability.UPDATE_WEIGHTS,
}
"""What an engine must be able to do to obey a command."""


def refusal_of(command: ControlCommand, capabilities: tuple[EngineCapability, ...]) -> Refused:
    """What an engine with these capabilities answers to a command that needs another one."""
    known = ", ".join(capabilities) or "none"
    return Refused(f"this engine cannot do {CAPABILITY_OF[type(command)]}; its capabilities are: {known}")

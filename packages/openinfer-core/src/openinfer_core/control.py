"""Commands to an engine beside requests: what changes it while it runs.

An engine obeys those that `EngineInfo.capabilities` names, in the order in which they come among its requests, and
refuses every other one by name.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, TypeAlias

import msgspec

from openinfer_core.engine import EngineCapability
from openinfer_core.errors import InvalidRequest, Refused

COMMAND_TIMEOUT_S = 900.0
"""That a command may take, such as to read the weights of the largest models from slow disks; it goes on after it."""
MAX_PATH_LENGTH = 4096
"""Bound of a path, in characters."""
MAX_SEGMENTS = 1024
MAX_DEVICE_TENSORS = 1 << 17
IPC_HANDLE_BYTES = 64
"""`sizeof(cudaIpcMemHandle_t)`."""
_SegmentName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}\Z")]
_TensorName = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
_Dtype = Annotated[str, msgspec.Meta(min_length=1, max_length=16)]
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**48)]
_Shape = Annotated[tuple[_Size, ...], msgspec.Meta(max_length=32)]
_Handle = Annotated[bytes, msgspec.Meta(min_length=IPC_HANDLE_BYTES, max_length=IPC_HANDLE_BYTES)]
_ContentHash = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32,128}\Z")]  # `$` takes a newline, too
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
_Path = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_PATH_LENGTH)]


class FlushCache(msgspec.Struct, frozen=True, array_like=True, tag="flush_cache"):
    """No request that comes later finds KV that was computed before in the engine's own memory.

    Requests that run keep theirs. KV tiers keep what they hold.
    """


class LoadStep(StrEnum):
    """What an engine does of a load. Several engines load together: all hold it first, and name it once all do."""

    WHOLE = "whole"
    HOLD = "hold"
    """Reads it, and keeps it on all ranks; no name changes. What is kept for the name already is dropped."""
    NAME = "name"
    """Gives what is kept the name, and reads nothing. Refused if nothing is kept for it."""
    DROP = "drop"
    """Drops what is kept for the name; nothing to do if nothing is."""


class LoadAdapter(msgspec.Struct, frozen=True, array_like=True, tag="load_adapter"):
    """Brings an adapter to the device; under a name that is in use, requests that come later get the new one."""

    name: _Name
    path: _Path
    """A folder on the engine's machine."""
    in_place: bool = False
    """Whether it may stand in the place of another of that name; requests that came before keep the old one."""
    tenants: tuple[_Name, ...] = ()
    """Who may see and use it; none named: all."""
    step: LoadStep = LoadStep.WHOLE


class UnloadAdapter(msgspec.Struct, frozen=True, array_like=True, tag="unload_adapter"):
    """Requests that wait for it end with `NOT_FOUND`; its slot is free when those that run have ended."""

    name: _Name


class InFlight(StrEnum):
    """What becomes of the requests in flight when an engine stops to serve."""

    KEEP = "keep"
    """They stop, and go on afterwards. After an update or a sleep, what they had computed is computed anew, with the
    weights that are there then; tokens that they have stay."""
    ABORT = "abort"
    """They end with `Finished(ABORT)` and the tokens that they have."""


class Pause(msgspec.Struct, frozen=True, array_like=True, tag="pause"):
    """No step runs before `Resume`; requests that come meanwhile wait in the queue. Nothing to do if it is paused."""

    requests: InFlight = InFlight.KEEP


class Resume(msgspec.Struct, frozen=True, array_like=True, tag="resume"):
    """Ends a pause; nothing to do without one. A sleep goes on."""


class Sleep(msgspec.Struct, frozen=True, array_like=True, tag="sleep"):
    """Gives the memory of weights and KV back; requests that come before `Wake` fail with `UNAVAILABLE`.

    The prefix cache is empty afterwards; KV tiers keep what they hold. If it is asleep, requests end where that is
    asked, and nothing else is done.
    """

    keeps_weights: bool = True
    """Their files are held open, so that the same weights come back though the folder is removed; refused if they have
    changed, or are in no file. Weights of a GPU are copied to the host instead, wherever they came from. Otherwise they
    are read again from where they came from, whatever is there then, and where that is no folder, `Wake` leaves the
    engine without weights."""
    requests: InFlight = InFlight.KEEP


class Wake(msgspec.Struct, frozen=True, array_like=True, tag="wake"):
    """Ends a sleep; nothing to do without one. Refused if the weights cannot be read, or others hold the memory of the
    GPU: then it is asleep still.
    """


class DeviceTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor in another process's memory of a GPU: its bytes in the order of C, little endian."""

    name: _TensorName
    dtype: _Dtype
    """As the safetensors format calls it: `BF16`, `F32`, …"""
    shape: _Shape
    handle: _Handle
    """Of the allocation that it lies in: the bytes of a `cudaIpcMemHandle_t`. Several tensors may lie in one."""
    offset_bytes: _Size = 0
    """From the allocation's first byte."""


class UpdateWeights(msgspec.Struct, frozen=True, array_like=True, tag="update_weights"):
    """Replaces all weights between two steps, and voids what was computed with the old ones.

    Names, shapes and dtypes are checked on all ranks first; a refusal has changed nothing, and requests in flight go
    on. A failure after that leaves the engine without weights: requests fail with `UNAVAILABLE` until a complete
    update.

    Raises:
        ValueError: not exactly one of `path`, `segments` and `tensors` is given, or something is named twice.
    """

    path: _Path | None = None
    """A folder on the engine's machine with a checkpoint of the same shapes, below the root that the engine allows."""
    segments: Annotated[tuple[_SegmentName, ...], msgspec.Meta(max_length=MAX_SEGMENTS)] = ()
    """Shared memory on the engine's machine, by name, each the bytes of a safetensors file:
    `openinfer_core.shared_weights`."""
    content_hash: _ContentHash | None = None
    """A hash of every byte of the new weights, in hexadecimal: KV is told apart by it, also in tiers and after a
    restart. Without one the engine draws a number that it never uses again."""
    requests: InFlight = InFlight.KEEP
    tensors: Annotated[tuple[DeviceTensor, ...], msgspec.Meta(max_length=MAX_DEVICE_TENSORS)] = ()
    """In memory of the engine's GPU, by CUDA IPC handles; of an engine on a GPU alone. It must not be freed or written
    to until the command is answered, and what wrote it must have ended."""
    drafter_path: _Path | None = None
    """A folder below the same root with new weights of a drafter that has a folder of its own. Without one such a
    drafter is read from the folder that it had."""

    def __post_init__(self) -> None:
        if (self.path is not None) + bool(self.segments) + bool(self.tensors) != 1:
            raise ValueError("an update comes from a path, from segments or from tensors; give one of the three")
        if len(set(self.segments)) != len(self.segments):
            raise ValueError("a segment is named twice")
        if len({tensor.name for tensor in self.tensors}) != len(self.tensors):
            raise ValueError("a tensor is named twice")


ControlCommand: TypeAlias = FlushCache | LoadAdapter | UnloadAdapter | Pause | Resume | Sleep | Wake | UpdateWeights

_decoder = msgspec.msgpack.Decoder(ControlCommand)


def checked_command(command: ControlCommand) -> ControlCommand:
    """The command as another process would decode it: a Struct checks what it is made of nowhere else.

    Raises:
        InvalidRequest: a value is out of range, or of another type.
    """
    try:
        return _decoder.decode(msgspec.msgpack.encode(command))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"{type(command).__name__}: {error}") from error


CAPABILITY_OF: Mapping[type[msgspec.Struct], EngineCapability] = {
    FlushCache: EngineCapability.FLUSH_CACHE,
    LoadAdapter: EngineCapability.LOAD_ADAPTER,
    UnloadAdapter: EngineCapability.LOAD_ADAPTER,
    Pause: EngineCapability.PAUSE,
    Resume: EngineCapability.PAUSE,
    Sleep: EngineCapability.SLEEP,
    Wake: EngineCapability.SLEEP,
    UpdateWeights: EngineCapability.UPDATE_WEIGHTS,
}
"""What an engine must be able to do to obey a command."""


def refusal_of(command: ControlCommand, capabilities: tuple[EngineCapability, ...]) -> Refused:
    """What an engine with these capabilities answers to a command that needs another one."""
    known = ", ".join(capabilities) or "none"
    return Refused(f"this engine cannot do {CAPABILITY_OF[type(command)]}; its capabilities are: {known}")

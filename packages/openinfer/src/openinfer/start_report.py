"""`StartReport`: the phases of a server's start, of all its processes, on one axis of time."""

from collections.abc import Sequence

import msgspec

from openinfer_core import EngineInfo
from openinfer_core.process.timeline import StartPhase

_MIB = 2**20


class ReportedPhase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One phase; `begin_s` counts from the begin of the first process."""

    process: str
    """`frontend` or `engine`."""
    name: str
    begin_s: float
    seconds: float
    resident_mib: float
    """Of that process, at the phase's end."""
    device_mib: float
    """In use on the device by everyone, at the phase's end; 0 without a device."""


class StartReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `openinfer serve --start-report FILE` writes."""

    ready_s: float
    """From the begin of the frontend's process until it took connections."""
    phases: tuple[ReportedPhase, ...]
    memory_bytes: dict[str, int]
    """The engine's ledger: what it takes of its device's memory, by purpose."""

    @classmethod
    def of(cls, frontend: Sequence[StartPhase], engine: EngineInfo) -> "StartReport":
        zero_s = frontend[0].begin_s
        reported = [
            ReportedPhase(
                process=process,
                name=phase.name,
                begin_s=round(phase.begin_s - zero_s, 4),
                seconds=round(phase.seconds, 4),
                resident_mib=round(phase.resident_bytes / _MIB, 1),
                device_mib=round(phase.device_bytes / _MIB, 1),
            )
            for process, phases in (("frontend", frontend), ("engine", engine.start))
            for phase in phases
        ]
        last = frontend[-1]
        return cls(
            ready_s=round(last.begin_s + last.seconds - zero_s, 4),
            phases=tuple(sorted(reported, key=lambda phase: phase.begin_s)),
            memory_bytes=engine.memory_bytes,
        )

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self)) + b"\n"

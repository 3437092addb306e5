"""`Timeline`: where the time of a start goes, measured by the process that starts.

    process begins ─ imports ─┤ config ─┤ device ─┤ weights ─┤ … ready

Phases touch: each begins where the one before it ended, so that nothing is left out. An engine's phases go to its log
and into `EngineInfo.start`; a frontend has a timeline of its own, which runs in parallel to the engine's.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from openinfer_core.process.resident import resident_bytes

_MIB = 2**20


class StartPhase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One phase of a start."""

    name: str
    begin_s: float
    """Unix time, so that phases of several processes can be laid side by side."""
    seconds: float
    resident_bytes: int
    """The process's memory at the phase's end; 0 where the system does not say."""
    device_bytes: int = 0
    """Device memory in use at the phase's end, by all processes; 0 where there is no device, or not yet."""


class Timeline:
    """The phases of one process so far; None as `begin_s` takes the begin of this process. Times are Unix times."""

    def __init__(self, *, begin_s: float | None = None, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._last_s = clock() - process_age_s() if begin_s is None else begin_s
        self._phases: list[StartPhase] = []

    @property
    def phases(self) -> tuple[StartPhase, ...]:
        return tuple(self._phases)

    def mark(self, name: str, *, device_bytes: int = 0) -> None:
        now_s = self._clock()
        phase = StartPhase(
            name=name,
            begin_s=self._last_s,
            seconds=now_s - self._last_s,
            resident_bytes=resident_bytes(),
            device_bytes=device_bytes,
        )
        self._phases.append(phase)
        self._last_s = now_s

    def __str__(self) -> str:
        """`2.31 s: imports 0.52, …; 436 MiB resident`, for a log."""
        total_s = sum(phase.seconds for phase in self._phases)
        parts = ", ".join(f"{phase.name} {phase.seconds:.2f}" for phase in self._phases)
        resident = self._phases[-1].resident_bytes / _MIB if self._phases else 0.0
        return f"{total_s:.2f} s: {parts}; {resident:.0f} MiB resident"


def process_age_s() -> float:
    """Seconds since this process began, to 10 ms; 0 where the system does not say (not Linux)."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5), counted from after the name
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began_s)
    except (OSError, AttributeError):
        return 0.0

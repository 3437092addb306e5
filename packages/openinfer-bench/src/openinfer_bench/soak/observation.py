"""Memory and open files of a server's processes, by what each process does."""

import asyncio
import contextlib
import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from openinfer_bench.processes import descendants, tree_memory
from openinfer_core.errors import Refused

_ROLES = {
    "guard_process.py": "guard",
    "openinfer_engine.child": "engine",
    "openinfer_server.workers.worker": "worker",
}
_SEGMENT = ".kv"
SETTLE_S = 60.0
_LOOK_EVERY_S = 0.5
_STILL = 6  # looks in a row that see the same


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One look.

    Attributes:
        at_s: on the monotonic clock.
        proportional_mib: memory of all processes, shared pages counted once.
        anonymous_mib: private memory that is no file's, by role.
        descriptors: open ones, by role, less those of segments.
        segments: files of a disk tier, which stay open; the tier bounds their number.
    """

    at_s: float
    proportional_mib: float
    anonymous_mib: dict[str, float]
    descriptors: dict[str, int]
    segments: int


async def observe(pid: int) -> Observation:
    """Looks; again if a process ended meanwhile."""
    while True:
        try:
            return await asyncio.to_thread(_look, pid)
        except (OSError, Refused):
            os.kill(pid, 0)  # the server itself is there
            await asyncio.sleep(_LOOK_EVERY_S)


async def settle(pid: int, *, until: dict[str, int] | None = None) -> Observation:
    """Looks until the descriptors are as foreseen, or stay as they are, or `SETTLE_S` are over."""
    end_s, seen = time.monotonic() + SETTLE_S, [await observe(pid)]
    while time.monotonic() < end_s:
        last = seen[-_STILL:]
        if until is None and len(last) == _STILL and all(each.descriptors == last[0].descriptors for each in last):
            break
        if seen[-1].descriptors == until:
            break
        await asyncio.sleep(_LOOK_EVERY_S)
        seen.append(await observe(pid))
    return seen[-1]


def processes_of(pid: int, role: str) -> list[int]:
    """The descendants that do one thing: `guard`, `engine` or `worker`."""
    return [each for each in descendants(pid)[1:] if _role(each) == role]


def _look(pid: int) -> Observation:
    descriptors, anonymous = Counter[str](), Counter[str]()
    tree = descendants(pid)
    for each in tree:
        role = _role(each)
        files = _open_files(each)
        descriptors[role] += len(files)
        descriptors["segments"] += sum(name.endswith(_SEGMENT) for name in files)
        anonymous[role] += _anonymous_kib(each)
    descriptors["engine"] -= descriptors["segments"]
    return Observation(
        at_s=time.monotonic(),
        proportional_mib=tree_memory(pid).proportional_mib,
        anonymous_mib={role: round(kib / 1024, 2) for role, kib in sorted(anonymous.items())},
        segments=descriptors.pop("segments"),
        descriptors=dict(sorted(descriptors.items())),
    )


def _role(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return "ended"
    return next((role for part, role in _ROLES.items() if part in command), "server")


def _open_files(pid: int) -> list[str]:
    """What the descriptors of a process are of."""
    names: list[str] = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            names.append(os.readlink(descriptor))
    return names


def _anonymous_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))

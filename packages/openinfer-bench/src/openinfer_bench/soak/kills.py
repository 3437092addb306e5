"""Kills of a server's processes that it has to replace."""

import asyncio
import contextlib
import os
import signal
import time
from dataclasses import dataclass, field

from openinfer_bench.soak.observation import processes_of


@dataclass(slots=True)
class Kills:
    """When each kind of process was killed, on the monotonic clock."""

    guards_s: list[float] = field(default_factory=list[float])
    workers_s: list[float] = field(default_factory=list[float])


async def keep_killing(pid: int, kills: Kills, *, every_s: float) -> None:
    """Kills the guards of grammars and an API worker in turn, for ever."""
    turns = (("guard", kills.guards_s), ("worker", kills.workers_s))
    while every_s > 0:
        for role, killed_s in turns:
            await asyncio.sleep(every_s)
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                victims = processes_of(pid, role)
                for victim in victims if role == "guard" else victims[:1]:  # the spare guard, too
                    os.kill(victim, signal.SIGKILL)
                    killed_s.append(time.monotonic())

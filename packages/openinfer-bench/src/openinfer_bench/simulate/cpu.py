"""What computing on the host takes: a table measured on a machine (`fit.py`), charged to the interpreter that computes.

an event loop ──owe──► paid at the end of its turn: it gives the lock up where it waits, and no earlier
a task ──charge──► `Interpreter`: one at a time, handed on every 5 ms, as CPython's lock is
a task ──keep────► `Interpreter`: one at a time to its end: native code that does not give the lock up
a task ──World.charge──► a processor of its own: native code that has given it up
"""

from pathlib import Path

import msgspec

from openinfer_core.testing.simulation.world import World

TABLE = Path(__file__).with_name("cpu_times.json")
_SWITCH_S = 0.005  # sys.getswitchinterval()


class CpuTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of one processor."""

    callback_s: float
    """One callback of an event loop, and what it sends."""
    request_s: float
    """A request's way through the server to the engine, without its bytes."""
    received_byte_s: float
    """HTTP, of each byte of a request."""
    json_byte_s: float
    """Decoding a body, of each byte."""
    encoded_character_s: float
    """Of a text that is tokenized."""
    plan_s: float
    planned_row_s: float
    """What the scheduler takes for a step."""
    compile_s: float
    compiled_character_s: float
    """A grammar's first time: guard process, compiler and first mask."""
    mask_s: float
    """One row's mask, of JSON."""
    costly_mask_s: float
    """Of a hostile grammar, on and on: a matcher that takes longer fails its request."""
    memory_bytes_per_s: float


class FittedTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The committed table and where it is from."""

    machine: str
    commit: str
    times: CpuTimes


def fitted_times() -> CpuTimes:
    """The committed table."""
    return msgspec.json.decode(TABLE.read_bytes(), type=FittedTable).times


class Interpreter:
    """The interpreter lock of one process: what its threads compute takes turns."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._free_s = 0.0
        self._owed_s = 0.0

    def owe(self, duration_s: float) -> None:
        """What a callback of the process's event loop computes; `pay` lets the time pass."""
        self._owed_s += duration_s

    def pay(self) -> None:
        """At the end of a turn of the event loop."""
        owed_s, self._owed_s = self._owed_s, 0.0
        self.charge(owed_s)

    def charge(self, duration_s: float) -> None:
        """Python code, which hands the lock on now and then."""
        while duration_s > 0:
            slice_s = min(duration_s, _SWITCH_S)
            self.keep(slice_s)
            duration_s -= slice_s

    def keep(self, duration_s: float) -> None:
        """What keeps the lock to its end."""
        self._free_s = max(self._free_s, self._world.now_s) + duration_s
        self._world.charge(self._free_s - self._world.now_s)

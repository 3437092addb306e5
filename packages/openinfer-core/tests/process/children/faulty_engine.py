"""The main module of engine processes that misbehave, or behave, as the spec says."""

import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from openinfer_core import PluginFault, Refused, TokenEvent
from openinfer_core.process.engine_process import run_engine_process
from openinfer_core.simulated import SimulatedLoop, SimulatedOptions


class Spec(msgspec.Struct):
    behaviour: str


class DyingLoop(SimulatedLoop):
    def step(self) -> list[TokenEvent]:
        if self.stats().steps == 3:
            raise RuntimeError("device lost")
        return super().step()


class SlowlyEndingLoop(DyingLoop):
    """As with KV tiers on a disk that hangs."""

    def close(self) -> None:
        time.sleep(3600)


class LateLoop(SimulatedLoop):
    """Closes as late as it may with KV tiers on a slow disk, and leaves a file when it has."""

    def __init__(self, file: str) -> None:
        super().__init__(SimulatedOptions())
        self._file = Path(file)

    def close(self) -> None:
        time.sleep(4)
        super().close()
        self._file.touch()


class BreakingLoop(SimulatedLoop):
    def step(self) -> list[TokenEvent]:
        raise PluginFault("the scheduler x (mine 1.0) raised KeyError in plan; the engine ends")


class HangingLoop(SimulatedLoop):
    def step(self) -> list[TokenEvent]:
        time.sleep(3600)
        return []


def build(raw: msgspec.Raw) -> SimulatedLoop:
    behaviour = msgspec.json.decode(raw, type=Spec).behaviour
    if behaviour == "refuse":
        raise Refused("no engine of that kind")
    if behaviour == "crash":
        raise RuntimeError("a bug in the build")
    if behaviour == "exit":
        os._exit(3)
    if behaviour == "fault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if behaviour == "build forever":
        time.sleep(3600)
    if behaviour == "print":
        sys.stdout.write("this would break the protocol if it went there\n")
        sys.stdout.flush()
    if behaviour.startswith("close late "):
        return LateLoop(behaviour.removeprefix("close late "))
    loops = {"die in a step": DyingLoop, "hang in a step": HangingLoop, "break": BreakingLoop}
    loops["die and hang in close"] = SlowlyEndingLoop
    return loops.get(behaviour, SimulatedLoop)(SimulatedOptions(model=behaviour))


if __name__ == "__main__":
    raise SystemExit(run_engine_process(build))

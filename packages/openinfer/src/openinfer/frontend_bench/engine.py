"""The benchmark's engine process: the simulated engine, whose tokens say when they were made."""

import time

import msgspec

from openinfer.frontend_bench.stamps import STAMPS
from openinfer_core import TokenEvent, Tokens
from openinfer_core.engine_process import run_engine_process
from openinfer_core.simulated import SimulatedLoop, SimulatedOptions


class StampedLoop(SimulatedLoop):
    """Every token id is the time at which its step was made, so that a client can tell its lag."""

    def step(self) -> list[TokenEvent]:
        """One step of the simulated engine, stamped."""
        events = super().step()
        stamp = (int(time.monotonic() * 1e4) % STAMPS,)
        return [Tokens(event.request_id, stamp) if isinstance(event, Tokens) else event for event in events]


def _build(spec: msgspec.Raw) -> StampedLoop:
    return StampedLoop(msgspec.json.decode(spec, type=SimulatedOptions))


if __name__ == "__main__":
    raise SystemExit(run_engine_process(_build))

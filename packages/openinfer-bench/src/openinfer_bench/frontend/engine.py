"""The benchmark's engine process: the simulated engine, whose tokens say when they were made."""

import time

import msgspec

from openinfer_bench.frontend.stamps import STAMPS, StampedOptions
from openinfer_core import GenerateRequest, RequestId, TokenEvent, Tokens
from openinfer_core.process.engine_process import run_engine_process
from openinfer_core.simulated import SimulatedLoop


class StampedLoop(SimulatedLoop):
    """Every token id is the time at which its step was made, so that a client can tell its lag."""

    def __init__(self, options: StampedOptions) -> None:
        super().__init__(options)
        self._opening = options.opening_token_id
        self._unopened: set[RequestId] = set()

    def submit(self, request: GenerateRequest) -> list[TokenEvent]:
        """Takes a request."""
        if self._opening is not None:
            self._unopened.add(request.request_id)
        return super().submit(request)

    def step(self) -> list[TokenEvent]:
        """One step of the simulated engine, stamped."""
        events = super().step()
        stamp = (int(time.monotonic() * 1e4) % STAMPS,)
        return [self._stamped(event, stamp) if isinstance(event, Tokens) else event for event in events]

    def _stamped(self, event: Tokens, stamp: tuple[int]) -> Tokens:
        if self._opening is not None and event.request_id in self._unopened:
            self._unopened.discard(event.request_id)
            return Tokens(event.request_id, (self._opening,))
        return Tokens(event.request_id, stamp, event.logprobs)


def _build(spec: msgspec.Raw) -> StampedLoop:
    return StampedLoop(msgspec.json.decode(spec, type=StampedOptions))


if __name__ == "__main__":
    raise SystemExit(run_engine_process(_build))

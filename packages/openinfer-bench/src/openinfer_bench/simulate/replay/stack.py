"""The served stack in virtual time: scheduler, pool, loop, host, ledger and HTTP server as they are, fitted times.

    clients ──bytes──► server's loop (protocol, ASGI app) ──► engine's thread (host, step loop, scheduler) ──► GPU

The processes of the server and of the engine each have an interpreter lock of their own. No thread waits for a core:
the machine that was measured had 16 of them for these two, the clients' six, and the GPU's thread.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from uvicorn.config import Config
from uvicorn.server import ServerState

from openinfer.models import find_model_dir
from openinfer_bench.simulate.cpu import Interpreter
from openinfer_bench.simulate.replay.fitted import FittedServer
from openinfer_bench.simulate.replay.host_times import HostTimes
from openinfer_bench.simulate.replay.runner import TimedRunner
from openinfer_core.engine import EngineHandle, EngineInfo
from openinfer_core.events import TokenEvent, Tokens
from openinfer_core.process.local import InProcessEngine
from openinfer_core.queue_policies import FairShare
from openinfer_core.request import GenerateRequest
from openinfer_core.scheduling import QueuePolicyConfig, SchedulerConfig, StepPlan
from openinfer_core.testing.simulation.event_loop import VirtualEventLoop
from openinfer_core.testing.simulation.network import connect
from openinfer_core.testing.simulation.world import World
from openinfer_engine.loop import StepLoop
from openinfer_engine.scheduler.token_budget import TokenBudgetScheduler
from openinfer_server import Tokenizer
from openinfer_server.app import App, load_app
from openinfer_server.http import request as http_request
from openinfer_server.http.protocol import bounded_protocol
from openinfer_server.http.sliced_json import SLICE_BYTES
from openinfer_server.options import ServerOptions
from openinfer_server.testing import RecordingEngine

ADDRESS = ("127.0.0.1", 8000)
MODEL = "simulated"
_NUM_TOKEN_IDS = 151_936
_LOOPBACK_S = 20e-6  # one way, of a few bytes
_SOCKET_BYTES = 2_500_000  # Linux' buffers of a loopback connection


class ChargedLoop(StepLoop):
    """A step loop that takes its time for the frames of prompts."""

    charge_request: Callable[[GenerateRequest], None]

    def submit(self, request: GenerateRequest) -> list[TokenEvent]:
        self.charge_request(request)
        return super().submit(request)


class ReplayedEngine:
    """Engine of the measured size, in a thread."""

    def __init__(self, world: World, fitted: FittedServer) -> None:
        limits, host = fitted.limits, fitted.host.times
        interpreter = Interpreter(world)
        config = SchedulerConfig(
            num_blocks=limits.num_blocks,
            block_size_tokens=limits.block_size_tokens,
            max_num_seqs=limits.max_num_seqs,
            max_step_tokens=limits.max_step_tokens,
            max_model_tokens=limits.max_model_tokens,
        )
        info = EngineInfo(
            model=MODEL,
            family="qwen3",
            max_model_tokens=limits.max_model_tokens,
            num_token_ids=_NUM_TOKEN_IDS,
            eos_token_ids=(),
            block_size_tokens=limits.block_size_tokens,
            num_blocks=limits.num_blocks,
            max_num_seqs=limits.max_num_seqs,
            max_waiting=config.max_waiting,
        )

        def charge_plan(plan: StepPlan) -> None:
            # The planning itself is in the fitted steps; the prefix cache is not, as `bench offline` has none.
            cached = {start.slot for start in plan.started}
            found = sum(
                first for slot, first in zip(plan.slots.tolist(), plan.starts.tolist(), strict=True) if slot in cached
            )
            given = int(plan.num_host_tokens.sum())
            interpreter.charge(given * host.cold_token_s + found * host.cached_token_s)

        self.runner = TimedRunner(world, fitted.steps, readable_ids(), charge=charge_plan)
        self.scheduler = TokenBudgetScheduler(config, FairShare(QueuePolicyConfig()))
        self.loop = ChargedLoop(info=info, scheduler=self.scheduler, runner=self.runner)
        self.loop.charge_request = lambda request: interpreter.charge(
            len(request.prompt_token_ids) * host.taken_token_s
        )
        self.handle = InProcessEngine(self.loop)


class _Link(RecordingEngine):
    """The engine as the server's process has it: frames take their time, and their tokens."""

    def __init__(self, inner: EngineHandle, interpreter: Interpreter, fitted: FittedServer) -> None:
        super().__init__(inner)
        self._interpreter = interpreter
        self._fitted = fitted

    def submit(self, request: GenerateRequest) -> None:
        self._interpreter.charge(len(request.prompt_token_ids) * self._fitted.host.times.prompt_token_s)
        self._inner.submit(request)  # not remembered: prompts of a whole run are large

    async def events(self) -> AsyncIterator[list[TokenEvent]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        times = self._fitted.streaming
        async for events in self._inner.events():
            await asyncio.sleep(times.link_s)
            num_tokens = sum(isinstance(event, Tokens) for event in events)
            # Tokens are written one after the other: the mean one is on its way after half of them.
            half_s = num_tokens * times.streamed_token_s / 2
            self._interpreter.charge(times.wake_s + half_s)
            self._interpreter.owe(half_s)
            yield events


class ReplayedServer:
    """The HTTP server before it, in the running event loop."""

    def __init__(self, world: World, engine: ReplayedEngine, fitted: FittedServer) -> None:
        self._world = world
        self._interpreter = Interpreter(world)
        options = ServerOptions(model_name=[MODEL])
        link = _Link(engine.handle, self._interpreter, fitted)
        self.app: App = load_app(link, find_model_dir("tiny"), options)
        _charge_for_bodies(self._interpreter, fitted.host.times)
        self._protocol: Any = bounded_protocol(options)
        self._config = Config(
            self.app,
            http=self._protocol,
            ws="none",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=options.keep_alive_s,
        )
        self._config.load()
        self._state = ServerState()
        self.app.start()
        self._num_connections = 0

    def pay(self) -> None:
        """At the end of each turn of the server's event loop."""
        self._interpreter.pay()

    def connect(self, protocol: asyncio.Protocol, client_loop: VirtualEventLoop, server_loop: VirtualEventLoop) -> None:
        """Connects a client, called in its loop."""

        def make_server() -> asyncio.Protocol:
            return self._protocol(config=self._config, server_state=self._state, app_state={}, _loop=server_loop)

        self._num_connections += 1
        connect(
            self._world,
            client_loop=client_loop,
            client=protocol,
            server_loop=server_loop,
            make_server=make_server,
            delay_s=_LOOPBACK_S,
            client_address=("127.0.0.1", 20000 + self._num_connections % 40000),
            server_address=ADDRESS,
            kernel_bytes=_SOCKET_BYTES,
        )

    async def stop(self) -> None:
        await self.app.stop()


def _charge_for_bodies(interpreter: Interpreter, times: HostTimes) -> None:
    """Every request that is decoded from now on takes its time, in the thread that decodes it."""
    module: Any = http_request
    decode_body = module.decode_body

    def decode_slowly(decoder: Any, body: bytes, **options: Any) -> Any:
        byte_s = times.decoded_byte_s if len(body) <= SLICE_BYTES else times.sliced_byte_s
        interpreter.charge(times.request_s + len(body) * byte_s)
        return decode_body(decoder, body, **options)

    module.decode_body = decode_slowly


def readable_ids() -> list[int]:
    """Token ids of the tiny tokenizer whose text can be sent as it is."""
    tokenizer = Tokenizer.load(find_model_dir("tiny"))
    try:
        raw = [] if tokenizer.table is None else tokenizer.table.raw
        return [number for number, text in enumerate(raw) if text.isalpha() and text.isascii()]
    finally:
        tokenizer.close()

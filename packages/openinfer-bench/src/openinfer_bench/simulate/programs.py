"""What the simulated processes run: a server's first worker, further workers, the engine, and its ranks.

    outside ──► server (first worker) ──┬──► further workers ──links──┐
                     └──link────────────┴──► engine ◄──┘──► ranks

Each program is the product's own from its first line to its exit code, but for what a process has that a simulation's
has not: logs, a memory of its own, uvicorn's clock. What computes pays its process's interpreter.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from uvicorn.server import Server as UvicornServer

from openinfer.models import find_model_dir
from openinfer_bench.simulate.cpu import CpuTimes, Interpreter
from openinfer_bench.simulate.life import Life
from openinfer_bench.simulate.ranks import run_rank
from openinfer_bench.simulate.stack import Engine, SlowDisk, StackOptionsOfRun
from openinfer_core.errors import OpenInferError
from openinfer_core.process import engine_process
from openinfer_core.process.engine_process import LinkKind
from openinfer_core.process.host import EngineLoop
from openinfer_core.process.remote import spawn_engine
from openinfer_core.request import GenerateRequest
from openinfer_core.testing.simulation.event_loop import VirtualEventLoop
from openinfer_core.testing.simulation.processes import Child
from openinfer_core.testing.simulation.world import Process, World
from openinfer_engine.worker import process as rank_process
from openinfer_engine.worker.process_group import CHILD_MODULE as RANK
from openinfer_kv_cache.testing.tier_faults import FaultInjector
from openinfer_server import app as server_app
from openinfer_server import server
from openinfer_server.chat.template import ChatTemplate
from openinfer_server.http import request as http_request
from openinfer_server.options import EventLoop, ServerOptions
from openinfer_server.parsers import ModelParsers
from openinfer_server.text.control_tokens import BegunEncoding, ControlTokens, EncodedChat
from openinfer_server.text.marked_text import MarkedText
from openinfer_server.text.tokenizer import Tokenizer
from openinfer_server.workers import worker
from openinfer_server.workers.wire import WorkerLaunch

SERVER, ENGINE, WORKER = "simulated.server", "simulated.engine", "openinfer_server.workers.worker"
PORT = 8000
DESCRIPTORS = 256  # of each process
_IMPORTS_S = 0.4  # what a process takes before it does anything
_WEIGHTS_S = 0.6
_TICK_S = 1.0  # of uvicorn's loop: ten times a second would be most of what a quiet hour computes


class Programs:
    """All programs of a world.

    Args:
        options: of the engine.
        server_options: the number of workers is each life's.
        note: told each request as the engine gets it.
    """

    def __init__(
        self,
        world: World,
        options: StackOptionsOfRun,
        server_options: ServerOptions,
        *,
        faults: FaultInjector,
        disk: SlowDisk,
        note: Callable[[GenerateRequest], None],
    ) -> None:
        self._world = world
        self._options = options
        self._server_options = msgspec.structs.replace(server_options, port=PORT, event_loop=EventLoop.ASYNCIO)
        self._faults = faults
        self._disk = disk
        self._note = note
        processes = world.processes
        processes.programs |= {SERVER: self._serve, WORKER: self._work, ENGINE: self._run_engine, RANK: self._run_rank}
        processes.descriptor_limit = DESCRIPTORS
        processes.on_start = self._begin
        processes.make_event_loop = self._make_loop
        _charge_for_decoding(world, options.cpu)
        _charge_for_encoding(world, options.cpu)
        _share_one_process()
        _remember(world, server, "app_of", note="app")
        _remember(world, worker, "load_app", note="app")
        _remember(world, engine_process, "LoopRunner", note="host")

    def start(self, life: Life) -> None:
        """Starts a server."""
        self._world.outside.notes["life"] = life
        self._world.processes.num_to_fail = 0  # what a fault has left of the life before
        life.server, *_ = self._world.processes.start(SERVER)

    def _begin(self, process: Process) -> None:
        process.notes["interpreter"] = Interpreter(self._world)
        process.notes["life"] = life = self._world.process.notes["life"]
        life.processes.append(process)
        process.at_end.append(lambda: life.process_ended(process))

    def _make_loop(self) -> VirtualEventLoop:
        process = self._world.process
        interpreter: Interpreter | None = process.notes.get("interpreter")
        if interpreter is None:
            return VirtualEventLoop(self._world)
        callback_s = self._options.cpu.callback_s

        def take_turn(num_callbacks: int) -> None:
            interpreter.owe(num_callbacks * callback_s)
            interpreter.pay()

        loop = process.notes["loop"] = VirtualEventLoop(self._world, charge=take_turn)
        return loop

    # --- programs ---------------------------------------------------------------------------------------

    def _serve(self, child: Child) -> int:
        self._world.sleep(_IMPORTS_S)
        life: Life = child.process.notes["life"]
        options = msgspec.structs.replace(self._server_options, workers=life.num_workers)
        try:
            return server.run_starting(
                lambda: spawn_engine(ENGINE, _Spec(), link=LinkKind.UNIX),
                find_model_dir("tiny"),
                options,
                on_ready=lambda url: life.became_ready(),
            )
        except OpenInferError as error:
            life.could_not_start(error)
            return 1

    def _work(self, child: Child) -> int:
        self._world.sleep(_IMPORTS_S)
        launch = msgspec.json.decode(child.stdin.readline(), type=WorkerLaunch)
        try:
            with asyncio.Runner() as runner:
                return runner.run(worker.serve_launch(launch, child.stdin, child.stdout))  # type: ignore[arg-type]
        except OpenInferError:
            return 1

    def _run_engine(self, child: Child) -> int:
        self._world.sleep(_IMPORTS_S)
        life: Life = child.process.notes["life"]

        def build(spec: msgspec.Raw) -> EngineLoop:
            del spec
            self._world.sleep(_WEIGHTS_S)
            life.engine_process = child.process
            engine = life.engine = Engine(
                self._world,
                self._options,
                self._faults,
                self._disk,
                interpreter=child.process.notes["interpreter"],
                num_ranks=life.num_ranks,
                note=self._note,
            )
            return engine.loop

        def close_files() -> None:
            if life.engine is not None:
                life.engine.close_files()

        child.process.at_end.append(close_files)
        return engine_process.serve_parent(build, _Streams(child))

    def _run_rank(self, child: Child) -> int:
        self._world.sleep(_IMPORTS_S)
        life: Life = child.process.notes["life"]
        if life.engine_process is None:
            raise RuntimeError("a rank has no engine")
        return run_rank(self._world, child, life.engine_process.notes["meeting"])


class _Spec(msgspec.Struct, frozen=True):
    """What an engine is told; it knows all."""


class _Streams:
    """Implements `openinfer_core.process.engine_process.ParentStreams`."""

    def __init__(self, child: Child) -> None:
        self._child = child

    def first_line(self) -> bytes:
        return self._child.stdin.readline()

    def say(self, line: bytes) -> None:
        self._child.stdout.write(line)

    def wait_for_end(self) -> None:
        while self._child.stdin.end.read(4096):
            pass


def _share_one_process() -> None:
    """What is a process's own, and here that of all of them."""

    def nothing(*arguments: Any) -> None:
        del arguments

    for module in (server, worker, engine_process, rank_process):
        for name in ("return_freed_memory", "settle_memory", "set_up_logs", "yield_interpreter"):
            if hasattr(module, name):
                setattr(module, name, nothing)

    async def main_loop(self: UvicornServer) -> None:
        ticks = 0
        while not self.should_exit:
            await self.on_tick(ticks)
            ticks += round(10 * _TICK_S)
            await asyncio.sleep(_TICK_S)

    uvicorn.Server.main_loop = main_loop  # type: ignore[method-assign]
    _read_once()


def _read_once() -> None:
    """What every process of one model reads, and then does not change: it is most of what a start computes."""
    texts: dict[Path, Any] = {}
    load = Tokenizer.load.__func__  # type: ignore[attr-defined]

    def load_once(cls: type[Tokenizer], model_dir: Path, **options: Any) -> Tokenizer:
        # Its tables are the same in all processes; its threads are not.
        if model_dir not in texts:
            made = load(cls, model_dir, **options)
            texts[model_dir] = made._tokenizer  # noqa: SLF001 - what takes long to read
            return made
        return cls(texts[model_dir], num_token_ids=options.get("num_token_ids", 0))

    Tokenizer.load = classmethod(load_once)  # type: ignore[method-assign, assignment]
    templates: dict[tuple[Path, float, int], ChatTemplate | None] = {}
    load_template = ChatTemplate.load.__func__  # type: ignore[attr-defined]

    def template_once(
        cls: type[ChatTemplate], model_dir: Path, *, timeout_s: float, max_characters: int
    ) -> ChatTemplate | None:
        key = (model_dir, timeout_s, max_characters)
        if key not in templates:
            templates[key] = load_template(cls, model_dir, timeout_s=timeout_s, max_characters=max_characters)
        return templates[key]

    ChatTemplate.load = classmethod(template_once)  # type: ignore[method-assign, assignment]
    parsers: dict[tuple[str | None, str], ModelParsers] = {}
    module: Any = server_app
    choose_parsers = module.parsers_for

    def parsers_once(template: str | None, family: str, options: ServerOptions) -> ModelParsers:
        if (template, family) not in parsers:  # options are the same for all
            parsers[template, family] = choose_parsers(template, family, options)
        return parsers[template, family]

    module.parsers_for = parsers_once


def _remember(world: World, module: Any, name: str, *, note: str) -> None:
    """What is made by that name is a note of the process that makes it."""
    make = getattr(module, name)

    def remembered(*arguments: Any) -> Any:
        made = world.process.notes[note] = make(*arguments)
        return made

    setattr(module, name, remembered)


_ENCODE = "_encode"  # of `Tokenizer`


def _charge_for_encoding(world: World, cpu: CpuTimes) -> None:
    """Every text that is tokenized from now on takes its time, on a processor of its own."""
    plain: Callable[..., list[int]] = getattr(Tokenizer, _ENCODE)
    chat, rest = ControlTokens.encode, ControlTokens.finish

    def encode_slowly(self: Tokenizer, text: str, **options: Any) -> Any:
        world.charge(len(text) * cpu.encoded_character_s)
        return plain(self, text, **options)

    def encode_chat_slowly(self: ControlTokens, text: MarkedText) -> list[int]:
        world.charge(len(text) * cpu.encoded_character_s)
        return chat(self, text)

    def encode_rest_slowly(self: ControlTokens, begun: BegunEncoding) -> EncodedChat:
        world.charge(begun.new_characters * cpu.encoded_character_s)
        return rest(self, begun)

    # Every text goes through one of these: as it is, as a short chat, or as what is new of a chat.
    setattr(Tokenizer, _ENCODE, encode_slowly)
    ControlTokens.encode = encode_chat_slowly  # type: ignore[method-assign]
    ControlTokens.finish = encode_rest_slowly  # type: ignore[method-assign]


def _charge_for_decoding(world: World, cpu: CpuTimes) -> None:
    """Every body that is decoded from now on takes its time, in the thread that decodes it."""
    module: Any = http_request
    decode_body = module.decode_body

    def decode_slowly(decoder: Any, body: bytes, **options: Any) -> Any:
        interpreter: Interpreter = world.process.notes["interpreter"]
        is_on_loop = asyncio._get_running_loop() is not None  # noqa: SLF001 - the public one raises
        charge = interpreter.owe if is_on_loop else interpreter.charge
        charge(cpu.request_s + len(body) * cpu.json_byte_s)
        return decode_body(decoder, body, **options)

    module.decode_body = decode_slowly

"""Processes of a world: `subprocess.Popen`, `asyncio.create_subprocess_exec`, `os._exit`, `signal.signal`.

A program is a function that runs in the first task of a process of its own. It has a standard input and output, which
are pipes to the process that started it, and what it opens is closed when it ends. A killed one does nothing more.
"""

import asyncio
import errno
import os
import resource
import signal
import subprocess
import threading
from asyncio import StreamReader, StreamReaderProtocol
from collections.abc import Callable, Iterable
from types import GenericAlias
from typing import Any

from openinfer_core.testing.simulation.descriptors import VirtualFile
from openinfer_core.testing.simulation.event_loop import VirtualEventLoop
from openinfer_core.testing.simulation.sockets import Network
from openinfer_core.testing.simulation.world import Process, Task, World

Program = Callable[["Child"], int]


class Child:
    """What a program is given.

    Attributes:
        process: its own.
        stdin: what its parent says.
        stdout: what it says to its parent.
    """

    def __init__(self, process: Process, stdin: VirtualFile, stdout: VirtualFile) -> None:
        self.process = process
        self.stdin = stdin
        self.stdout = stdout


class Processes:
    """All processes that end, and what they run.

    Attributes:
        programs: by module.
        descriptor_limit: of new ones.
        num_to_fail: so many starts fail, as if there were no memory for another process.
        on_start: called with each new process, before it runs.
        make_event_loop: what `asyncio.new_event_loop` is in each.
    """

    def __init__(self, world: World, network: Network) -> None:
        self._world = world
        self._network = network
        self.programs: dict[str, Program] = {}
        self.descriptor_limit = 1 << 20
        self.num_to_fail = 0
        self.on_start: Callable[[Process], None] = lambda process: None
        self.make_event_loop: Callable[[], asyncio.AbstractEventLoop] = lambda: VirtualEventLoop(world)
        self.num_started = 0

    def start(self, module: str) -> tuple[Process, VirtualFile, VirtualFile]:
        """Begins a program; returns its process, and the parent's ends of its input and its output.

        Raises:
            OSError: `EAGAIN` or `EMFILE`, as `fork` and `pipe` have it.
        """
        world, network = self._world, self._network
        if self.num_to_fail:
            self.num_to_fail -= 1
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        process = Process(world.next_number(), module)
        process.descriptor_limit = self.descriptor_limit
        ours_in, theirs_in = network.pair((world.process, process))
        try:
            ours_out, theirs_out = network.pair((world.process, process))
        except OSError:
            ours_in.close()
            raise
        process.at_end.append(lambda: self._close_all(process))
        self.num_started += 1
        self.on_start(process)
        child = Child(process, VirtualFile(theirs_in), VirtualFile(theirs_out))
        program = self.programs[module]
        process.main_thread = threading.Thread(target=lambda: None, name=f"main of {module}")
        world.spawn(lambda: self._run(program, child), name=f"{module} {process.pid}", process=process)
        return process, VirtualFile(ours_in), VirtualFile(ours_out)

    def _run(self, program: Program, child: Child) -> None:
        try:
            code = program(child)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        self._world.end_own(code)

    def kill(self, process: Process, number: int = signal.SIGKILL) -> None:
        self._world.end(process, -number)

    def send_signal(self, process: Process, number: int) -> None:
        """Calls the process's handler, in a task of its own; without one, the process ends."""
        handler = process.handlers.get(number, signal.SIG_DFL)
        if handler is signal.SIG_IGN or process.has_ended:
            return
        if callable(handler):
            self._world.spawn(lambda: handler(number, None), name=f"signal {number}", process=process)
        else:
            self.kill(process, number)

    def _close_all(self, process: Process) -> None:
        for end in [*process.ends.values()]:
            (end.successor or end).vanish()
            end.forget()


class VirtualPopen:
    """`subprocess.Popen` of a world, for programs that it knows, with pipes for input and output."""

    processes: Processes
    world: World

    def __class_getitem__(cls, item: Any) -> GenericAlias:
        """Annotations name what its pipes carry."""
        return GenericAlias(cls, item)

    def __init__(self, arguments: list[str], *, stdin: int, stdout: int) -> None:
        del stdin, stdout
        self._process, self.stdin, self.stdout = self.processes.start(arguments[-1])
        self._waiting: list[Task] = []
        self._process.at_end.append(self._wake)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exit_code

    def poll(self) -> int | None:
        return self._process.exit_code

    def wait(self, timeout: float | None = None) -> int:
        world = self.world
        due_s = None if timeout is None else world.now_s + timeout
        while self._process.exit_code is None:
            if due_s is not None and world.now_s >= due_s:
                raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
            if world.current is not None:
                self._waiting.append(world.current)
            world.park(None if due_s is None else due_s - world.now_s)
        return self._process.exit_code

    def kill(self) -> None:
        self.processes.kill(self._process)

    def _wake(self) -> None:
        for task in self._waiting:
            self.world.wake(task)


class _Input:
    """What asyncio has for the standard input of a process."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._transport.close()


class AsyncProcess:
    """`asyncio.subprocess.Process` of a world."""

    def __init__(self, processes: Processes, process: Process, stdin: _Input, stdout: StreamReader) -> None:
        self._processes = processes
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self.stdin = stdin
        self.stdout = stdout
        process.at_end.append(self._tell)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exit_code

    async def wait(self) -> int | None:
        await asyncio.shield(self._ended)
        return self._process.exit_code

    def kill(self) -> None:
        if self._process.has_ended:
            raise ProcessLookupError
        self._processes.kill(self._process)

    def _tell(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(lambda: self._ended.done() or self._ended.set_result(None))


class _SharedMemory:
    """Memory between processes, which is real, and so are its descriptors: each goes with the last that has it."""

    def __init__(self) -> None:
        self._num_users: dict[int, int] = {}  # by descriptor

    def use(self, process: Process, descriptor: int) -> None:
        self._num_users[descriptor] = self._num_users.get(descriptor, 0) + 1
        process.at_end.append(lambda: self._leave(descriptor))

    def inherit(self, process: Process, descriptors: Iterable[int]) -> None:
        for descriptor in self._num_users.keys() & set(descriptors):
            self.use(process, descriptor)

    def _leave(self, descriptor: int) -> None:
        self._num_users[descriptor] -= 1
        if not self._num_users[descriptor]:
            del self._num_users[descriptor]
            os.close(descriptor)


def install_processes(world: World, network: Network) -> Processes:
    """Replaces what starts, ends and signals processes; for good."""
    processes = Processes(world, network)
    VirtualPopen.processes, VirtualPopen.world = processes, world
    memory = _SharedMemory()

    async def create_subprocess_exec(
        *arguments: str, limit: int, pass_fds: Iterable[int] = (), **options: Any
    ) -> AsyncProcess:
        del options  # pipes for input and output: all processes have them
        process, ours_in, ours_out = processes.start(arguments[-1])
        memory.inherit(process, pass_fds)
        loop: Any = asyncio.get_running_loop()
        reader = StreamReader(limit=limit, loop=loop)
        await loop.connect_accepted_socket(lambda: StreamReaderProtocol(reader, loop=loop), ours_out)
        transport, _ = await loop.connect_accepted_socket(asyncio.Protocol, ours_in)
        return AsyncProcess(processes, process, _Input(transport), reader)

    def memfd_create(name: str, flags: int = 0) -> int:
        descriptor = real_memory(name, flags)
        memory.use(world.process, descriptor)
        return descriptor

    real_memory: Any = getattr(os, "memfd_create", None)
    if real_memory is not None:  # Linux
        os.memfd_create = memfd_create  # type: ignore[attr-defined, assignment]
    real_exit = os._exit

    def end(code: int) -> None:
        if world.process is world.outside:
            real_exit(code)
        world.end_own(code)

    def handler_of(number: int) -> Any:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        return world.process.handlers.get(number, default)

    def handle(number: int, handler: Any) -> Any:
        before = handler_of(number)
        world.process.handlers[number] = handler
        return before

    def limits(which: int) -> tuple[int, int]:
        most = world.process.descriptor_limit
        return (most, most) if which == resource.RLIMIT_NOFILE else real_limits(which)

    real_limits = resource.getrlimit
    resource.getrlimit = limits  # type: ignore[assignment]

    def new_event_loop() -> asyncio.AbstractEventLoop:
        return processes.make_event_loop()

    asyncio.events.new_event_loop = new_event_loop
    subprocess.Popen = VirtualPopen  # type: ignore[misc, assignment]
    asyncio.create_subprocess_exec = create_subprocess_exec  # type: ignore[assignment]
    os._exit = end  # type: ignore[assignment]
    signal.signal = handle  # type: ignore[assignment]
    signal.getsignal = handler_of  # type: ignore[assignment]
    return processes

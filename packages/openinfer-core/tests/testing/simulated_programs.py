"""Programs that run in a world; see test_simulation.py."""

import asyncio
import mmap
import os
import queue
import secrets
import selectors
import signal
import socket
import subprocess
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from openinfer_core.testing.simulation.event_loop import VirtualEventLoop
from openinfer_core.testing.simulation.network import connect
from openinfer_core.testing.simulation.world import World


def producers(world: World, *, count: int) -> dict[str, Any]:
    items: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

    def produce(producer: int) -> None:
        for item in range(count):
            time.sleep(0.01)
            items.put((producer, item))

    threads = [threading.Thread(target=produce, args=(producer,)) for producer in range(3)]
    for thread in threads:
        thread.start()
    got = [items.get() for _ in range(3 * count)]
    for thread in threads:
        thread.join()
    return {"items": got, "now_s": world.now_s}


def locks(world: World) -> dict[str, Any]:
    lock, counted = threading.Lock(), [0]

    def count() -> None:
        for _ in range(100):
            with lock:
                before = counted[0]
                time.sleep(0.001)
                counted[0] = before + 1

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    began_s = world.now_s
    with lock:
        timed_out = not lock.acquire(timeout=2.5)
    condition = threading.Condition()  # an RLock's
    with condition, condition:
        condition.notify_all()
    return {
        "sum": counted[0],
        "timed_out": timed_out,
        "waited_s": round(world.now_s - began_s, 6),
        "reentrant": condition.acquire(blocking=False),
    }


def loops(world: World) -> dict[str, Any]:
    heard: list[str] = []
    closed: list[bool] = []
    other = VirtualEventLoop(world)

    async def numbers() -> Any:
        try:
            yield 1
            yield 2
        finally:
            closed.append(True)

    async def listen(asked: "asyncio.Future[None]", answer: Any) -> None:
        await asked
        heard.append("ping")
        answer()

    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        answered = asyncio.Event()
        asked = other.create_future()
        thread = threading.Thread(
            target=lambda: other.run_until_complete(listen(asked, lambda: loop.call_soon_threadsafe(answered.set)))
        )
        thread.start()
        other.call_soon_threadsafe(asked.set_result, None)
        await answered.wait()
        heard.append("pong")
        async for _ in numbers():
            break
        pool = ThreadPoolExecutor(2)

        def work() -> float:
            time.sleep(5)
            return time.monotonic()

        async def job(number: int) -> float:
            await asyncio.sleep(0.1 * number)
            return await loop.run_in_executor(pool, work)

        began_s = world.now_s
        return [round(end - began_s, 6) for end in await asyncio.gather(*map(job, range(4)))]

    with asyncio.Runner(loop_factory=lambda: VirtualEventLoop(world)) as runner:
        ends = runner.run(main())
    return {"executor_ends_s": ends, "heard": heard, "generator_closed": closed == [True]}


class _Side(asyncio.Protocol):
    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.said: list[str] = []
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.pieces.append(data)

    def pause_writing(self) -> None:
        self.said.append("pause")

    def resume_writing(self) -> None:
        self.said.append("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self.said.append("lost")


async def _connected(world: World, client: _Side, server: _Side) -> None:
    loop: Any = asyncio.get_running_loop()
    connect(
        world,
        client_loop=loop,
        client=client,
        server_loop=loop,
        make_server=lambda: server,
        delay_s=0.001,
        client_address=("127.0.0.1", 5000),
        server_address=("127.0.0.1", 80),
    )
    await asyncio.sleep(0.1)


def same_in_every_python(world: World) -> dict[str, Any]:
    """Takes what versions of Python differ in: threads of an executor next to others, and turns that a wait takes."""
    turns: list[int] = []
    loop = VirtualEventLoop(world, charge=turns.append)
    executor = ThreadPoolExecutor(2, thread_name_prefix="many")

    def compute(number: int) -> int:
        for _ in range(number % 3):
            time.sleep(0.001)
        world.note("computed", number)
        return number

    async def main() -> list[Any]:
        futures = [loop.run_in_executor(executor, compute, number) for number in range(40)]
        outcomes: list[Any] = [await asyncio.wait_for(future, 1.0) for future in futures[:20]]
        outcomes += await asyncio.gather(*futures[20:])
        for timeout_s in (0.0, 0.5):
            waiting = asyncio.ensure_future(asyncio.sleep(3.0))
            try:
                await asyncio.wait_for(waiting, timeout_s)
            except TimeoutError:
                outcomes.append(["late", waiting.cancelled()])
        outer = asyncio.ensure_future(asyncio.wait_for(waiting := asyncio.ensure_future(asyncio.sleep(3.0)), 1.0))
        await asyncio.sleep(0.1)
        outer.cancel()
        await asyncio.wait([outer])
        outcomes.append([outer.cancelled(), waiting.cancelled()])
        return outcomes

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        outcomes = runner.run(main())
    executor.shutdown()
    return {"outcomes": outcomes, "turns": sum(turns), "order_of_locks": [world.digest, world.num_switches]}


def closed_before_it_is_read(world: World) -> dict[str, Any]:
    """A side that is closed, or whose other side is, while that one does not read what has arrived."""
    reader, writer = [_Side(), _Side()], [_Side(), _Side()]

    async def main() -> None:
        for client, server in zip(reader, writer, strict=True):
            await _connected(world, client, server)
            client.transport.pause_reading()
            server.transport.write(b"all of it")
            server.transport.close()
        await asyncio.sleep(1)
        assert [client.said for client in reader] == [[], []]
        reader[0].transport.resume_reading()
        reader[1].transport.write(b"to a side that is gone")
        await asyncio.sleep(1)

    with asyncio.Runner(loop_factory=lambda: VirtualEventLoop(world)) as runner:
        runner.run(main())
    return {
        "read": [b"".join(client.pieces).decode() for client in reader],
        "said": [client.said for client in reader],
    }


def connection(world: World) -> dict[str, Any]:
    client, server = _Side(), _Side()
    sent = bytes(range(256)) * 1000

    async def main() -> None:
        await _connected(world, client, server)
        client.transport.pause_reading()
        server.transport.write(sent[:100_000])
        await asyncio.sleep(1)
        held = len(b"".join(client.pieces))
        assert held < 100_000
        client.transport.resume_reading()
        await asyncio.sleep(1)
        server.transport.write(sent[100_000:])
        server.transport.close()
        await asyncio.sleep(5)

    with asyncio.Runner(loop_factory=lambda: VirtualEventLoop(world)) as runner:
        runner.run(main())
    return {
        "intact": b"".join(client.pieces) == sent,
        "num_pieces": len(client.pieces),
        "paused": "pause" in server.said,
        "resumed": "resume" in server.said,
        "lost_on_both_sides": client.said[-1:] == ["lost"] and server.said[-1:] == ["lost"],
    }


def entropy(world: World) -> list[str]:
    del world
    return [os.urandom(8).hex(), secrets.token_hex(4), str(uuid.uuid4())]


def clocks(world: World) -> dict[str, float]:
    began_s, wall_s = time.monotonic(), time.time()
    time.sleep(86400)
    slept_s = time.monotonic() - began_s
    world.wall_offset_s += 3600
    return {"slept_s": slept_s, "wall_step_s": round(time.time() - wall_s - slept_s, 3)}


def spinning(world: World) -> None:
    ours, theirs = socket.socketpair()
    selector = selectors.DefaultSelector()
    selector.register(ours, selectors.EVENT_READ)
    theirs.send(b"never read")
    while world.now_s < 1:
        selector.select()


def computing_for_ever(world: World) -> None:
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.1, 0.1)  # in place of half a minute
    while world.now_s < 1:
        pass


def handlers(world: World) -> dict[str, Any]:
    """What signals do that no handler is set for, and after one was set and put back."""
    answers = {"term": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL}
    answers["interrupt"] = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.signal(signal.SIGTERM, before)
    return answers | {"again": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "end": world.process.has_ended}


def deadlock(world: World) -> None:
    del world
    a, b = threading.Lock(), threading.Lock()

    def take(first: Any, second: Any) -> None:
        with first:
            time.sleep(1)
            with second:
                pass

    threads = [
        threading.Thread(target=take, args=(a, b), name="waits-for-b"),
        threading.Thread(target=take, args=(b, a), name="waits-for-a"),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def failing_thread(world: World) -> dict[str, bool]:
    del world

    def fail() -> None:
        raise ValueError("on purpose")

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    return {"alive": thread.is_alive(), "goes_on": True}


def processes(world: World) -> dict[str, Any]:
    """Children answer over pipes, one is killed while it waits, one cannot be started."""

    def echo(child: Any) -> int:
        child.process.notes["locals"] = threading.current_thread() is threading.main_thread()
        while line := child.stdin.readline():
            child.stdout.write(line.upper())
        return 3

    def wait(child: Any) -> int:
        try:
            time.sleep(1000.0)
        finally:
            left.append(child.process.pid)
        return 0

    left: list[int] = []
    world.processes.programs |= {"echo": echo, "wait": wait}
    first = subprocess.Popen(["python", "-m", "echo"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    second = subprocess.Popen(["python", "-m", "wait"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert first.stdin is not None
    assert first.stdout is not None
    assert second.stdout is not None
    first.stdin.write(b"one\n")
    said = first.stdout.readline()
    first.stdin.close()
    code = first.wait()
    try:
        second.wait(2.0)
        timed_out = False
    except subprocess.TimeoutExpired:
        timed_out = True
    second.kill()
    world.processes.num_to_fail = 1
    try:
        subprocess.Popen(["python", "-m", "echo"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        refused = False
    except BlockingIOError:
        refused = True
    return {
        "said": said.decode(),
        "code": code,
        "timed_out": timed_out,
        "killed": second.wait(),
        "end_of_file": second.stdout.readline() == b"",
        "left_its_blocks": left == [second.pid],
        "refused": refused,
        "now_s": round(world.now_s, 2),
    }


def inherited_memory(world: World) -> dict[str, Any]:
    """A process inherits memory of one that is killed before it looks at that; none is left when both have ended."""
    made: list[int] = []
    found: dict[str, bool] = {}

    async def start_child() -> None:
        await asyncio.create_subprocess_exec("python", "-m", "child", limit=1024, pass_fds=(made[0],))
        await asyncio.sleep(1000.0)

    def parent(child: Any) -> int:
        del child
        made.append(os.memfd_create("shared"))
        os.ftruncate(made[0], 4096)
        asyncio.run(start_child())
        return 0

    def child(child: Any) -> int:
        del child
        time.sleep(5.0)
        mmap.mmap(made[0], 4096).close()
        found["its child has it"] = True
        return 0

    world.processes.programs |= {"parent": parent, "child": child}
    process, *_ = world.processes.start("parent")
    time.sleep(1.0)
    world.processes.kill(process)
    time.sleep(10.0)
    try:
        os.fstat(made[0])
    except OSError:
        found["none is left"] = True
    return found


def sockets(world: World) -> dict[str, Any]:
    """Bytes between two processes, in order whatever the cuts, until the link ends within them."""
    sent = bytes(range(256)) * 1000
    heard: list[bytes] = []

    def serve(child: Any) -> int:
        del child
        with socket.create_server(("127.0.0.1", 9000)) as listener:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(sent)
                time.sleep(10.0)
        return 0

    world.processes.programs["serve"] = serve
    world.processes.descriptor_limit = 5
    process, *_ = world.processes.start("serve")
    time.sleep(1.0)
    connection = socket.create_connection(("127.0.0.1", 9000))
    selector = selectors.DefaultSelector()
    selector.register(connection, selectors.EVENT_READ)
    connection.setblocking(False)
    while sum(map(len, heard)) < len(sent):
        assert selector.select(5.0)
        heard.append(connection.recv(1 << 20))
    waits = selector.select(0.5) == []
    world.processes.kill(process)
    selector.select()
    end = connection.recv(10)
    try:
        socket.create_connection(("127.0.0.1", 9000))
        refused = False
    except ConnectionRefusedError:
        refused = True
    return {
        "intact": b"".join(heard) == sent,
        "pieces": len(heard) > 3,
        "waits": waits,
        "end": end == b"",
        "refused": refused,
        "left": len(process.ends),
    }

"""Large requests are answered by a process of their own, which their connection is handed to."""

import asyncio
import contextlib
import functools
import http.client
import itertools
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from openinfer_core.process.descriptors import open_descriptors
from openinfer_server.http.handover import Handed, Handing, HandOver
from openinfer_server.limits.descriptors import MAX_WAITED_FOR
from openinfer_server.limits.suspects import SUSPECTED_S, Suspects
from openinfer_server.server import LONG_CONTEXT_TOKENS
from openinfer_server.testing import DEADLINE_S, wait_until
from openinfer_server.workers.group import LARGE_PAUSE_S, can_share_ports
from openinfer_server.workers.kept_bytes import KEPT_BYTES

pytestmark = pytest.mark.skipif(not can_share_ports(), reason="only Linux hands connections over")
LARGE = 4096
PATIENCE_S = 3 * DEADLINE_S  # for a process that starts or ends, on a machine that others use
wait_patiently = functools.partial(wait_until, timeout_s=PATIENCE_S)
CHILD = """
import logging, sys
from pathlib import Path
from openinfer_core.simulated import SimulatedOptions, spawn_simulated
from openinfer_server import EventLoop, ServerOptions, run

logging.basicConfig(level="INFO")
engine = spawn_simulated(SimulatedOptions(num_token_ids=2040, tpot_s=0.005, max_model_tokens=int(sys.argv[5])))
loop = EventLoop(sys.argv[2])
numbers = {"workers": int(sys.argv[3]), "large_request_workers": int(sys.argv[4])}
server = ServerOptions(port=0, drain_deadline_s=20, event_loop=loop, large_request_bytes=4096, **numbers)
sys.exit(run(engine, Path(sys.argv[1]), server, on_ready=lambda url: print(url, flush=True)))
"""


class Server:
    """A server of its own; `large` is the process that takes large requests."""

    def __init__(self, model_dir, event_loop, num_workers=1, max_open_files=1024, num_large=1, context=16_000):
        limited = ["sh", "-c", f'ulimit -n {max_open_files}; exec "$0" "$@"']
        numbers = map(str, (num_workers, num_large, context))
        command = [*limited, sys.executable, "-c", CHILD, str(model_dir), event_loop, *numbers]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `kill`
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log, text=True)
        self.host, port = self.process.stdout.readline().strip().removeprefix("http://").split(":")
        self.port = int(port)

    def connect(self, source="127.0.0.1"):
        return http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE_S, source_address=(source, 0))

    def ask(self, path="/v1/completions", body=None, connection=None, source="127.0.0.1"):
        """Status, whether the other process answered, and the body."""
        with contextlib.ExitStack() as stack:
            if connection is None:
                connection = stack.enter_context(contextlib.closing(self.connect(source)))
            method = "GET" if body is None else "POST"
            headers = {} if body is None else {"content-type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, response.getheader("connection") == "close", response.read().decode()

    def workers(self):
        found = []
        for each in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "openinfer_server.workers.worker" in each.cmdline():
                    found.append(each)
        return found

    def holder_but(self, dead):
        """Another process for large requests, if there is one, that has a client's connection."""
        for each in self.workers():
            with contextlib.suppress(psutil.Error):
                if each.pid != dead.pid and has_connection(each):
                    return each
        return None

    def wait_for_large(self):
        wait_patiently(lambda: self.ask(body=large())[:2] == (200, True), "a process that takes large requests")
        worker = self.workers()[-1]
        wait_patiently(lambda: not clients_of(worker), "it has closed the answered connection")
        return worker

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=PATIENCE_S)
        return self.log()

    def log(self):
        """What it has said so far."""
        return os.pread(self._log.fileno(), 2**24, 0).decode()

    def kill(self):
        self.process.kill()
        self.process.communicate()
        self._log.close()


@pytest.fixture
def start(model_dir):
    servers = []

    def start(event_loop="asyncio", num_workers=1, **limits):
        servers.append(Server(model_dir, event_loop, num_workers, **limits))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


def large(**fields):
    return {"prompt": "stone " * 1000, "max_tokens": 3, "ignore_eos": True, **fields}


def small(**fields):
    return {"prompt": "stone", "max_tokens": 3, "ignore_eos": True, **fields}


def success(server):
    page = server.ask("/metrics")[2]
    return sum(map(float, re.findall(r"^openinfer_request_success_total\{[^}]*\} (\S+)$", page, re.MULTILINE)))


def head(length, path="/v1/completions", **fields):
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in {"content_length": length, **fields}.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def read_one(client):
    """One response with a length."""
    read = b""
    while b"\r\n\r\n" not in read:
        read += client.recv(2**16)
    start, _, body = read.partition(b"\r\n\r\n")
    while len(body) < int(re.search(rb"content-length: (\d+)", start)[1]):
        body += client.recv(2**16)
    return start + body


def read_all(client):
    parts = []
    while part := client.recv(2**16):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("event_loop", ["asyncio", "uvloop"])
def test_large_requests_have_a_process_that_the_first_of_them_starts(start, event_loop):
    server = start(event_loop)
    assert server.workers() == []
    assert server.ask(body=small())[:2] == (200, False)
    assert server.workers() == []
    first = server.ask(body=large(seed=1))
    assert first[:2] == (200, True)  # it waited for the process, and was not answered by the one that there was
    worker = server.wait_for_large()
    assert worker.nice() > psutil.Process(server.process.pid).nice()
    counted = success(server)
    status, by_the_other, text = server.ask(body=large(seed=1))
    assert (status, by_the_other) == (200, True)
    assert json.loads(text)["usage"] == json.loads(first[2])["usage"]
    assert server.ask(body=small())[:2] == (200, False)
    assert success(server) == counted + 2
    events = server.ask(body=large(stream=True))
    assert events[:2] == (200, True)
    assert events[2].endswith("data: [DONE]\n\n")
    assert server.ask("/tokenize", {"prompt": "stone " * 1000})[:2] == (200, True)
    assert server.ask(body=large(unknown=1))[:2] == (400, True)
    # What is kept is asked for later, of the process that small requests come to: the other one gives it back.
    status, by_the_other, text = server.ask("/v1/responses", {"input": "stone " * 1000, "max_output_tokens": 2})
    assert (status, by_the_other) == (200, False), text
    assert server.ask(f"/v1/responses/{json.loads(text)['id']}")[0] == 200
    log = server.end()
    assert server.process.returncode == 0, log
    assert "Traceback" not in log
    assert "Invalid HTTP request" not in log
    psutil.wait_procs([worker], timeout=PATIENCE_S)
    assert not worker.is_running()


def test_process_for_large_requests_of_a_long_context_is_started_with_the_server(start):
    """Or the first of them, such as the first turn after a restart, would wait for seconds that are no one's fault."""
    server = start(num_workers=2, num_large=2, context=LONG_CONTEXT_TOKENS)
    assert server.ask("/metrics")[0] == 200  # which waits for none of those that are starting
    wait_patiently(lambda: len(server.workers()) == 3, "the processes are there before anything was asked for")
    server.wait_for_large()
    assert len(server.workers()) == 3
    log = server.end()
    assert log.count("2 processes for large requests are started") == 1
    assert server.process.returncode == 0, log


def test_head_may_come_in_parts_and_after_another_request(start):
    server = start()
    server.wait_for_large()
    body = json.dumps(large()).encode()
    with socket.create_connection((server.host, server.port), timeout=PATIENCE_S) as client:
        small_body = json.dumps(small()).encode()
        client.sendall(head(len(small_body)) + small_body)
        assert read_one(client).startswith(b"HTTP/1.1 200")
        whole = head(len(body)) + body
        for place in range(0, 90, 30):
            client.sendall(whole[place : place + 30])
        client.sendall(whole[90:])
        answer = read_all(client)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in answer
    with socket.create_connection((server.host, server.port), timeout=PATIENCE_S) as client:  # no length is told
        client.sendall(head("x", transfer_encoding="chunked").replace(b"content-length: x\r\n", b""))
        client.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        assert b"connection: close" in read_all(client)


def test_large_request_that_begins_among_the_bytes_of_another_is_answered_here(start):
    server = start()
    server.wait_for_large()
    body, small_body = json.dumps(large()).encode(), json.dumps(small()).encode()
    with socket.create_connection((server.host, server.port), timeout=PATIENCE_S) as client:
        client.sendall(head(len(small_body)) + small_body + head(len(body), connection="close") + body)
        answers = read_all(client)
    assert answers.count(b"HTTP/1.1 200") == 2


@pytest.mark.parametrize("event_loop", ["asyncio", "uvloop"])
def test_request_whose_process_dies_is_answered_by_the_next(start, event_loop):
    server = start(event_loop)
    worker = server.wait_for_large()
    body = json.dumps(large()).encode()
    with socket.create_connection((server.host, server.port), timeout=PATIENCE_S) as client:
        client.sendall(head(len(body)) + body[:100])
        wait_patiently(lambda: has_connection(worker), "the connection is handed over")
        worker.kill()
        client.sendall(body[100:])
        answer = read_all(client)
    assert answer.startswith(b"HTTP/1.1 200")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 3
    assert server.wait_for_large().pid != worker.pid
    assert server.ask(body=small())[0] == 200
    log = server.end()
    assert log.count("another takes its place") == 1
    assert server.process.returncode == 0, log


def test_request_that_outlives_two_processes_is_503_and_large_ones_of_its_owner_are_for_a_while(start):
    server = start()
    worker = server.wait_for_large()
    body = json.dumps(large()).encode()
    with socket.create_connection((server.host, server.port), timeout=PATIENCE_S) as client:
        client.sendall(head(len(body)) + body[:100])
        wait_patiently(lambda: has_connection(worker), "the connection is handed over")
        worker.kill()
        wait_patiently(lambda: server.holder_but(worker) is not None, "it is handed to the next process")
        server.holder_but(worker).kill()
        answer = read_all(client)
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"retry-after: " in answer
    status, _, told = server.ask(body=large())
    assert (status, "ended two processes" in told) == (503, True), told
    assert server.ask(body=small())[0] == 200
    answered = lambda: server.ask(body=large(), source="127.0.0.2")[:2] == (200, True)  # noqa: E731
    wait_patiently(answered, "large requests of another client have a process")
    log = server.end()
    assert log.count("another takes its place") == 2
    assert server.process.returncode == 0, log


def test_deaths_of_the_process_for_large_requests_do_not_end_the_server(start):
    server = start()
    dead = server.wait_for_large()
    for _ in range(2):
        dead.kill()
        following = functools.partial(next_worker, server, dead)
        wait_patiently(lambda: following() is not None, "another process takes its place")  # noqa: B023
        dead = following()
        wait_patiently(lambda: server.ask(body=large())[:2] == (200, True), "it takes large requests")
    dead.kill()
    pause = f"another takes its place in {LARGE_PAUSE_S:g} s"
    wait_patiently(lambda: pause in server.log(), "the server has seen the third death")
    assert server.ask("/health")[0] == 200
    assert server.ask(body=small())[0] == 200
    log = server.end()  # which does not wait for the next process, for which it is not time yet
    assert server.process.returncode == 0, log


def next_worker(server, dead):
    """The process that came after one that died; None if it is not there yet."""
    return next((each for each in server.workers() if each.pid != dead.pid), None)


@pytest.mark.parametrize("event_loop", ["asyncio", "uvloop"])
def test_responses_that_are_kept_are_given_back_to_the_process_that_keeps_them(start, event_loop):
    server = start(event_loop, context=100_000)
    server.wait_for_large()
    text = "stone " * 90_000
    of_none = {"input": text, "max_output_tokens": 2, "store": False}
    assert server.ask("/v1/responses", of_none)[:2] == (200, True)
    assert server.ask("/v1/responses/input_tokens", {"input": text})[:2] == (200, True)
    status, by_the_other, told = server.ask("/v1/responses", {"input": text, "max_output_tokens": 2})
    assert (status, by_the_other) == (200, False), told
    kept = json.loads(told)["id"]
    items = json.loads(server.ask(f"/v1/responses/{kept}/input_items")[2])["data"]
    assert items[0]["content"][0]["text"] == text
    further = {"input": "stone " * 1000, "max_output_tokens": 2, "store": False, "previous_response_id": kept}
    with contextlib.closing(server.connect()) as connection:  # it goes on after an answer of this process
        for _ in range(2):
            status, by_the_other, told = server.ask("/v1/responses", further, connection=connection)
            assert (status, by_the_other) == (200, False), told
        assert json.loads(told)["usage"]["input_tokens"] > 91_000
        assert server.ask("/v1/responses", of_none, connection=connection)[:2] == (200, True)
    log = server.end()
    assert server.process.returncode == 0, log
    assert "Traceback" not in log
    assert "without starting response" not in log


def test_background_response_of_a_large_body_is_made_where_it_is_kept(start):
    server = start()
    server.wait_for_large()
    asked = {"input": "stone " * 1000, "max_output_tokens": 2, "background": True}
    status, by_the_other, told = server.ask("/v1/responses", asked)
    assert (status, by_the_other) == (200, False), told
    kept = json.loads(told)["id"]
    ended = lambda: json.loads(server.ask(f"/v1/responses/{kept}")[2])["status"] == "incomplete"  # noqa: E731
    wait_patiently(ended, "the response has its tokens")


def test_process_without_descriptors_makes_a_request_wait_for_another_time(start):
    server = start()
    worker = server.wait_for_large()
    limits = resource.prlimit(worker.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, (limit_with_room_for_one(worker), limits[1]))
    status, _, told = server.ask(body=large())  # there is room for the link, and for no connection
    assert status == 503, told
    assert server.ask(body=small())[:2] == (200, False)
    resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, limits)
    assert server.wait_for_large().pid == worker.pid


@pytest.mark.parametrize("event_loop", ["asyncio", "uvloop"])
def test_many_bodies_that_do_not_end_leave_each_process_descriptors(start, event_loop):
    server = start(event_loop, max_open_files=256)
    server.wait_for_large()
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection((server.host, server.port), timeout=PATIENCE_S))
            for _ in range(150)
        ]
        for client in clients:
            client.sendall(head(10_000) + b"{")
        worker = server.workers()[-1]
        wait_patiently(lambda: len(clients_of(worker)) > 60, "most are handed over")
        for client in clients[-10:]:
            assert server.ask("/health")[0] == 200
            client.settimeout(0.0)
            with contextlib.suppress(BlockingIOError):  # it waits for its body's end, which is not refused for its form
                assert not client.recv(64).startswith(b"HTTP/1.1 400")
    server.wait_for_large()
    log = server.end()
    assert "no descriptor" not in log
    assert "Invalid HTTP" not in log
    assert server.process.returncode == 0, log


def limit_with_room_for_one(process):
    """A limit of open files: numbers of descriptors are below it, and one of them is free."""
    taken = {int(path.name) for path in Path(f"/proc/{process.pid}/fd").iterdir()}
    free = (number for number in itertools.count() if number not in taken)
    return next(itertools.islice(free, 1, None))


def has_connection(process):
    return any(link.status == "ESTABLISHED" for link in process.net_connections("tcp"))


def clients_of(process):
    """The connections of clients of which a process holds a descriptor, those that the client has left included."""
    return [link for link in process.net_connections("tcp") if link.status != "LISTEN"]


def test_client_that_leaves_before_its_body_has_ended_leaves_nothing(start):
    server = start()
    worker, first = server.wait_for_large(), psutil.Process(server.process.pid)
    wait_patiently(lambda: not clients_of(worker) + clients_of(first), "the answered connections are closed")
    with socket.create_connection((server.host, server.port), timeout=PATIENCE_S) as client:
        client.sendall(head(10_000) + b"{")
        wait_patiently(lambda: has_connection(worker), "the connection is handed over")
    wait_patiently(lambda: not clients_of(worker) + clients_of(first), "each process has closed the connection")


def test_each_of_several_workers_hands_over(start):
    server = start(num_workers=2)
    assert len(server.workers()) == 1
    for _ in range(8):
        assert server.ask(body=large())[0] == 200
    wait_patiently(lambda: len(server.workers()) == 2, "a process that takes large requests")
    for _ in range(8):
        server.wait_for_large()
    log = server.end()
    assert server.process.returncode == 0, log


@pytest.mark.parametrize("event_loop", ["asyncio", "uvloop"])
def test_turns_of_a_conversation_come_to_one_of_several_processes(start, event_loop):
    """Whether their bodies come with the head or later, and by whichever front; when one process dies, others go on."""
    server = start(event_loop, num_workers=2, num_large=3)
    session = lambda name, **fields: {"user": f"{name}" * 10, **large(**fields)}  # noqa: E731
    for name in range(8):
        there = lambda: server.ask(body=session(name))[:2] == (200, True)  # noqa: B023, E731
        wait_patiently(there, "its process")
    assert len(server.workers()) == 4
    with contextlib.ExitStack() as stack:
        holders = {}
        for name in [*range(8)] * 2:
            body = json.dumps(session(name, stream=True, max_tokens=14_000)).encode()
            body = body[:-1] + b" " * (len(holders) % 2) + body[-1:]  # what comes behind the beginning decides nothing
            client = stack.enter_context(socket.create_connection((server.host, server.port), timeout=PATIENCE_S))
            if name in holders:
                client.sendall(head(len(body)))
                client.sendall(body)
            else:
                client.sendall(head(len(body)) + body)
            assert client.recv(12) == b"HTTP/1.1 200"
            local = client.getsockname()[1]
            holder = lambda: [each for each in server.workers() if local in ports_of(each)]  # noqa: B023, E731
            wait_patiently(lambda: len(holder()) == 1, "one process has the connection")  # noqa: B023
            assert holders.setdefault(name, holder()[0].pid) == holder()[0].pid
        assert len({*holders.values()}) == 3
        psutil.Process(holders[0]).kill()
        other = next(name for name, pid in holders.items() if pid != holders[0])
        assert server.ask(body=session(other))[:2] == (200, True)
        assert server.ask(body=session(0))[:2] == (200, True)  # by the process that takes its place
    log = server.end()
    assert log.count("another takes its place") == 1
    assert server.process.returncode == 0, log


def ports_of(process):
    """Of the clients whose connections a process has."""
    return {link.raddr.port for link in process.net_connections("tcp") if link.status == "ESTABLISHED"}


def place_of(hand_over, read, *, sends=b"", owner=""):
    """The number of the process that a request is handed over to."""

    async def placed():
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            socket.create_connection(listener.getsockname()) as client,
            listener.accept()[0] as connection,
        ):
            connection.setblocking(False)
            handing = Handing(connection, read, owner=owner, is_kept=False, is_waited_for=True)
            placing = asyncio.create_task(hand_over._placed(handing))  # noqa: SLF001
            await asyncio.sleep(0)
            client.sendall(sends)
            place = await placing
            assert not sends or connection.recv(1) == sends[:1]  # it stays there to be read
            return hand_over._places.index(place)  # noqa: SLF001

    return asyncio.run(placed())


def test_place_is_that_of_the_owner_and_the_beginning_of_the_body():
    hand_over = HandOver(
        [f"/{number}" for number in range(64)], [], least_bytes=LARGE, want=lambda: None, tenant_of=lambda headers: ""
    )
    bodies = [f"{number} ".encode() * LARGE for number in range(4)]
    start, chunked = head(LARGE * 3), head(0, transfer_encoding="chunked")
    whole = [place_of(hand_over, [start, body]) for body in bodies]
    assert len({*whole}) > 1
    assert whole == [place_of(hand_over, [start + body[:LARGE] + b"another end"]) for body in bodies]
    assert whole == [place_of(hand_over, [start], sends=body) for body in bodies]
    assert whole == [place_of(hand_over, [start, body[:100]], sends=body[100:]) for body in bodies]
    assert len({place_of(hand_over, [start, bodies[0]], owner=owner) for owner in "abcdef"}) > 1
    # By the owner alone: what does not come, or comes in parts of any size.
    alone = place_of(hand_over, [start, bodies[0][:-1][: LARGE - 1]], owner="a")
    assert alone == place_of(hand_over, [chunked, bodies[1]], owner="a")
    assert alone == place_of(hand_over, [start], owner="a")


def test_death_of_the_first_worker_ends_the_one_for_large_requests(start):
    server = start()
    worker = server.wait_for_large()
    server.process.kill()
    psutil.wait_procs([worker], timeout=PATIENCE_S)
    assert not worker.is_running()


@pytest.mark.parametrize(
    ("method", "url", "headers", "is_taken"),
    [
        (b"POST", b"/v1/completions", [(b"content-length", b"4096")], True),
        (b"POST", b"/v1/completions?a=b", [(b"content-length", b"4096")], True),
        (b"POST", b"/v1/completions", [(b"transfer-encoding", b"chunked")], True),
        (b"POST", b"/v1/completions", [(b"content-length", b"4095")], False),
        (b"POST", b"/v1/completions", [(b"content-length", b"-1")], False),
        (b"POST", b"/v1/completions", [], False),
        (b"GET", b"/v1/completions", [(b"content-length", b"4096")], False),
        (b"POST", b"/v1/models", [(b"content-length", b"4096")], False),
        (b"POST", b"/v1/responses", [(b"content-length", b"4096")], True),
        (b"POST", b"/v1/responses", [(b"content-length", b"%d" % KEPT_BYTES)], False),
        (b"POST", b"/v1/responses", [(b"transfer-encoding", b"chunked")], False),
    ],
)
def test_large_requests_are_taken_where_another_process_may_answer_or_give_back(method, url, headers, is_taken):
    hand_over = handing_over("/nowhere", ["/v1/completions"], returning=["/v1/responses"])
    assert hand_over.takes(method, url, headers) is is_taken


def handing_over(address, paths=(), **arguments):
    return HandOver(
        [str(address)],
        paths,
        **{"least_bytes": LARGE, "want": lambda: None, "tenant_of": lambda headers: "", **arguments},
    )


def test_process_that_does_not_come_is_wanted_once_and_waited_for_once(tmp_path):
    asyncio.run(wait_for_none(tmp_path / "large"))


async def wait_for_none(path):
    wanted = []
    hand_over = handing_over(path, want=lambda: wanted.append(1), first_start_s=0.0)
    with connected() as connection:
        for _ in range(2):
            handing = hand_over.begin(connection, [b"POST ", b"/"], "")
            assert await hand_over.finish(handing) == (Handed.GIVEN_BACK, b"POST /")
            hand_over.release(handing)
    assert wanted == [1]
    assert hand_over.num_handed_over == 0


def test_so_many_wait_for_the_first_start_and_what_comes_then_is_answered_here(tmp_path):
    asyncio.run(wait_for_the_first(tmp_path / "large"))


async def wait_for_the_first(path):
    hand_over = handing_over(path, first_start_s=PATIENCE_S)
    async with asyncio.timeout(PATIENCE_S):
        with contextlib.ExitStack() as stack:
            connections = [stack.enter_context(connected()) for _ in range(MAX_WAITED_FOR + 1)]
            handings = [hand_over.begin(each, [b"POST"], "") for each in connections]
            assert handings.pop() is None
            finishing = [asyncio.create_task(hand_over.finish(each)) for each in handings]
            async with OtherProcesses(path):
                assert {await each for each in finishing} == {(Handed.LET_GO, b"")}
            for each in handings:
                hand_over.release(each)


def test_many_large_requests_in_one_turn_take_no_descriptors_before_their_turn(tmp_path):
    asyncio.run(begin_many(tmp_path / "large"))


async def begin_many(path):
    hand_over = handing_over(path)
    async with asyncio.timeout(PATIENCE_S), OtherProcesses(path, at_once=1):
        with contextlib.ExitStack() as stack:
            first, *connections = [stack.enter_context(connected()) for _ in range(4 * MAX_WAITED_FOR)]
            handing = hand_over.begin(first, [b"POST"], "")
            assert await hand_over.finish(handing) == (Handed.LET_GO, b"")
            hand_over.release(handing)
            before = open_descriptors()
            handings = [hand_over.begin(each, [b"POST"], "") for each in connections]
            assert open_descriptors() == before
            told = await asyncio.gather(*map(hand_over.finish, handings))
            assert set(told) == {(Handed.LET_GO, b"")}
            assert hand_over.num_handed_over == len(connections) + 1
            for each in handings:
                hand_over.release(each)
            assert open_descriptors() == before


def test_front_without_descriptors_has_a_request_come_again(tmp_path):
    asyncio.run(hand_over_without_descriptors(tmp_path / "large"))


async def hand_over_without_descriptors(path):
    hand_over = handing_over(path)
    async with asyncio.timeout(PATIENCE_S), OtherProcesses(path, at_once=1):
        with connected() as connection:
            for expected in (Handed.LET_GO, Handed.LOST, Handed.LET_GO):
                handing = hand_over.begin(connection, [b"POST"], "")
                limits = resource.getrlimit(resource.RLIMIT_NOFILE)
                if expected is Handed.LOST:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
                try:
                    told, _ = await hand_over.finish(handing)
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                assert told is expected
                hand_over.release(handing)


def test_owner_is_the_tenant_or_the_address():
    hand_over = handing_over("/nowhere", tenant_of=lambda headers: dict(headers).get(b"tenant", b"").decode())
    assert hand_over.owner([(b"tenant", b"acme")], "10.0.0.1") == "acme"
    assert hand_over.owner([], "10.0.0.1") == "10.0.0.1"


def test_an_owner_is_suspected_for_a_while_and_few_are_remembered():
    suspects = Suspects()
    suspects.add("acme", now_s=100.0)
    assert suspects.left_s("acme", now_s=130.0) == SUSPECTED_S - 30.0
    assert suspects.left_s("other", now_s=130.0) == 0.0
    assert suspects.left_s("acme", now_s=100.0 + SUSPECTED_S) == 0.0
    for number in range(2000):
        suspects.add(f"owner {number}", now_s=200.0)
    assert suspects.left_s("owner 0", now_s=200.0) == 0.0
    assert suspects.left_s("owner 1999", now_s=200.0) == SUSPECTED_S


# Another process, as far as connections are handed to it: it ends by what one of them says, and answers others. The
# first waits for two of them before it looks at what they say.
OTHER_PROCESS = """
import contextlib, os, socket, sys
path, at_once = sys.argv[1], int(sys.argv[2])
if os.path.exists(path):
    os.unlink(path)
listener = socket.socket(socket.AF_UNIX)
listener.bind(path)
listener.listen()
print("it listens", flush=True)
while True:
    arrived = []
    for _ in range(at_once):
        link, _ = listener.accept()
        kept = socket.recv_fds(link, 1, 2)[1]
        said = b""
        while part := link.recv(65536):
            said += part
        arrived.append((link, said, kept))
    at_once = 1
    if any(b"poison" in said for _, said, _ in arrived):
        os._exit(1)
    for link, _, descriptors in arrived:
        with contextlib.suppress(BrokenPipeError):  # of a front that does not wait to be told
            link.send(b"\1")
        link.close()
        for each in descriptors:
            os.close(each)
"""


class OtherProcesses:
    """Started anew whenever it has ended by itself. A context manager."""

    def __init__(self, path, at_once=2):
        self.deaths = asyncio.Queue()
        self._path = path
        self._at_once = at_once

    async def __aenter__(self):
        self._process = await self._start(self._at_once)
        self._watching = asyncio.create_task(self._watch())
        await self._process.stdout.readline()
        return self

    async def __aexit__(self, *_):
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def _start(self, at_once):
        command = (sys.executable, "-c", OTHER_PROCESS, str(self._path), str(at_once))
        return await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)

    async def _watch(self):
        while True:
            await self._process.wait()
            self.deaths.put_nowait(self._process.returncode)
            self._process = await self._start(1)


def test_lost_requests_are_repeated_one_after_the_other_and_the_one_that_kills_is_found(tmp_path):
    asyncio.run(lose_and_repeat(tmp_path / "large"))


async def lose_and_repeat(path):
    hand_over = handing_over(path)
    async with asyncio.timeout(PATIENCE_S), OtherProcesses(path) as others:
        with contextlib.ExitStack() as stack:
            said = {"good": b"of the good one", "bad": b"poison", "third": b"of a third one"}
            connections = {name: stack.enter_context(connected()) for name in said}
            handings = {name: hand_over.begin(connections[name], [said[name]], name) for name in ("bad", "good")}
            told = dict(zip(handings, await asyncio.gather(*map(hand_over.finish, handings.values())), strict=True))
            assert told == {"bad": (Handed.LOST, b""), "good": (Handed.LET_GO, b"")}
            for _ in range(2):
                await others.deaths.get()
            assert hand_over.suspected_s("bad") > 0
            assert hand_over.suspected_s("good") == 0
            third = hand_over.begin(connections["third"], [said["third"]], "third")
            assert third is not None  # it waits for the next process, or has it
            assert await hand_over.finish(third) == (Handed.LET_GO, b"")
            assert others.deaths.empty()
            for handing in (*handings.values(), third):
                hand_over.release(handing)


@contextlib.contextmanager
def connected():
    """The server's end of a TCP connection, of which nothing is read."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            yield accepted

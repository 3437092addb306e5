"""Several processes on one port, before one engine: what they count together, and how they end together."""

import asyncio
import contextlib
import functools
import http.client
import json
import re
import resource
import signal
import subprocess
import sys
import time

import psutil
import pytest

from openinfer_core.testing.simulation import asyncio_waits
from openinfer_server import ServerError, ServerOptions
from openinfer_server.observability.metrics import ServerMetrics
from openinfer_server.observability.metrics_snapshot import MetricsSnapshot, summed
from openinfer_server.testing import DEADLINE_S, wait_until
from openinfer_server.workers.group import WorkerGroup, can_share_ports

needs_shared_ports = pytest.mark.skipif(not can_share_ports(), reason="only Linux spreads connections over processes")
CHILD = """
import logging, sys
from pathlib import Path
from openinfer_core.simulated import SimulatedOptions, spawn_simulated
from openinfer_server import EventLoop, ServerOptions, run

logging.basicConfig(level="INFO")
engine = spawn_simulated(SimulatedOptions(num_token_ids=400, tpot_s=0.005, max_model_tokens=16_000))
server = ServerOptions(port=0, workers=3, drain_deadline_s=20, event_loop=EventLoop(sys.argv[2]))
sys.exit(run(engine, Path(sys.argv[1]), server, on_ready=lambda url: print(url, flush=True)))
"""


@pytest.fixture
def serving(model_dir):
    """Starts three workers: the first one's process, its children (engine last), host and port."""
    started = []

    def start(event_loop="asyncio"):
        command = [sys.executable, "-c", CHILD, str(model_dir), event_loop]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        host, port = process.stdout.readline().strip().removeprefix("http://").split(":")
        children = psutil.Process(process.pid).children()
        workers = [child for child in children if "openinfer_server.workers.worker" in child.cmdline()]
        (engine,) = [child for child in children if child not in workers]
        assert len(workers) == 2
        started.extend(children)
        return process, workers, engine, (host, int(port))

    yield start
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for process in started:
        if isinstance(process, subprocess.Popen):
            process.communicate()


def ask(address, method, path, body=None):
    with contextlib.closing(http.client.HTTPConnection(*address, timeout=DEADLINE_S)) as connection:
        headers = {} if body is None else {"content-type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, response.read().decode()


def number(page, name):
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE))


@needs_shared_ports
@pytest.mark.parametrize("event_loop", ["asyncio", "uvloop"])
def test_workers_share_port_and_engine_count_together_and_drain(serving, event_loop):
    process, workers, engine, address = serving(event_loop)
    for _ in range(24):
        status, answer = ask(
            address, "POST", "/v1/completions", {"prompt": "stone", "max_tokens": 3, "ignore_eos": True}
        )
        assert status == 200, answer
    assert all(any(link.status == "LISTEN" for link in each.net_connections()) for each in workers)
    for _ in range(12):  # whichever worker answers
        status, page = ask(address, "GET", "/metrics")
        assert status == 200
        assert number(page, "openinfer_request_success_total") == 24
        assert number(page, "openinfer_generation_tokens_total") == 72
        assert number(page, "openinfer_requests_open") == 0
        # one budget, of which each worker has told its part
        assert number(page, 'openinfer_budget_limit{budget="body_bytes"}') == 512 * 2**20
        assert number(page, 'openinfer_budget_limit{budget="queued_tokens"}') == 2**23
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, log
    assert "Traceback" not in log
    psutil.wait_procs([*workers, engine], timeout=DEADLINE_S)
    assert not any(each.is_running() for each in (*workers, engine))


@needs_shared_ports
def test_death_of_the_engine_ends_all_with_1(serving):
    process, workers, engine, _ = serving()
    engine.kill()
    _, log = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1, log
    assert "the engine died" in log
    psutil.wait_procs([*workers, engine], timeout=DEADLINE_S)
    assert not any(each.is_running() for each in (*workers, engine))


def living_workers(process):
    return [each for each in psutil.Process(process.pid).children() if is_worker(each)]


def is_worker(process):
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
        return "openinfer_server.workers.worker" in process.cmdline()
    return False


def has_new_worker(process, known):
    return any(each.pid not in known and listens(each) for each in living_workers(process))


def listens(worker):
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(link.status == "LISTEN" for link in worker.net_connections())
    return False


@needs_shared_ports
def test_worker_that_died_is_replaced_and_the_third_death_in_a_minute_ends_all_with_1(serving):
    process, workers, engine, address = serving()
    for _ in range(12):
        body = {"prompt": "stone", "max_tokens": 3, "ignore_eos": True}
        assert ask(address, "POST", "/v1/completions", body)[0] == 200
    assert number(ask(address, "GET", "/metrics")[1], "openinfer_request_success_total") == 12
    for victim in workers:
        known = {each.pid for each in living_workers(process)}
        victim.kill()
        wait_until(functools.partial(has_new_worker, process, known), "a new worker that listens")
    for _ in range(12):  # whichever answers: what the dead had counted is there, and nothing is wrong
        assert ask(address, "GET", "/health")[0] == 200
        status, page = ask(address, "GET", "/metrics")
        assert status == 200
        assert number(page, "openinfer_request_success_total") == 12
    living_workers(process)[0].kill()
    _, log = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1, log
    assert log.count("another takes its place") == 2
    assert "ended with code -9; the server ends" in log
    psutil.wait_procs([*workers, engine], timeout=DEADLINE_S)
    assert not engine.is_running()


@needs_shared_ports
def test_worker_that_cannot_be_started_is_no_death_and_starts_when_it_can(serving):
    process, workers, _, address = serving()
    limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (3, limits[1]))  # there is no descriptor for a pipe
    known = {each.pid for each in living_workers(process)}
    workers[0].kill()
    said = "no worker can be started, which is tried again each second: [Errno 24]"
    assert any(said in line for line in process.stderr)
    time.sleep(3)  # as many attempts as deaths that would end it; on a slow machine fewer, which ends as well
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, limits)
    wait_until(functools.partial(has_new_worker, process, known), "a new worker that listens")
    assert ask(address, "GET", "/health")[0] == 200
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, log


@needs_shared_ports
def test_death_of_the_first_worker_ends_the_others(serving):
    process, workers, engine, _ = serving()
    process.kill()
    gone, alive = psutil.wait_procs([*workers, engine], timeout=DEADLINE_S)
    assert (len(gone), alive) == (3, [])


def test_lost_worker_is_said_in_health(shared, call):
    class Lost:
        lost = "worker 7 ended with code -9"

        async def snapshots(self):
            raise TimeoutError

    service = shared.service
    peers, service.peers = service.peers, Lost()
    try:
        status, _, answer = call(shared, "GET", "/health")
        assert (status, json.loads(answer)["status"]) == (503, "worker 7 ended with code -9")
        assert call(shared, "GET", "/metrics")[0] == 503
    finally:
        service.peers = peers


def test_snapshots_add_up_and_survive_the_wire():
    import msgspec

    one, other = (ServerMetrics(max_model_tokens=100) for _ in range(2))
    for metrics, times in ((one, 1), (other, 2)):
        metrics.responses["/v1/models", 200] += times
        metrics.generated_tokens.value += times
        metrics.time_to_first_token_s.observe(0.02, times)
        metrics.request_prompt_tokens.observe(7, times)
    parts = [MetricsSnapshot.of(metrics, open_requests=3) for metrics in (one, other)]
    parts = [msgspec.json.decode(msgspec.json.encode(part), type=MetricsSnapshot) for part in parts]
    both = summed(parts, max_model_tokens=100)
    assert both.responses == {("/v1/models", 200): 3}
    assert both.generated_tokens.value == 3
    assert both.time_to_first_token_s.total == pytest.approx(0.06)
    assert sum(both.request_prompt_tokens.counts) == 3
    assert MetricsSnapshot.of(both, open_requests=0).histograms.keys() == parts[0].histograms.keys()
    assert both.ended == dict.fromkeys(both.ended, 0)


def test_workers_need_an_engine_that_can_be_joined(info, model_dir):
    from openinfer_core.process.local import InProcessEngine
    from openinfer_server import run
    from openinfer_server.testing import ParrotLoop

    with pytest.raises(ServerError, match="process of its own" if can_share_ports() else "Linux"):
        run(InProcessEngine(ParrotLoop(info)), model_dir, ServerOptions(port=0, workers=2))


def test_the_end_takes_no_turn_on_and_on_where_all_that_is_left_has_just_ended(monkeypatch):
    """Python 3.12 gathers what has ended without a turn of the loop, in which it would have taken itself out."""
    gathered = []

    def gather(*tasks):
        gathered.append(tasks)
        assert len(gathered) < 9, "nothing else runs any more"
        return asyncio_waits.gather(*tasks)

    async def ended():
        pass

    async def end():
        group = WorkerGroup(lambda: None)
        group._spawn(ended())  # noqa: SLF001 - what listens to a worker, without a process
        await asyncio.sleep(0)
        await group.end(1.0)

    monkeypatch.setattr(asyncio, "gather", gather)
    asyncio.run(end())
    assert len(gathered) == 1

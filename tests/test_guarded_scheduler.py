"""What mutants of the scheduler of `docs/reference/write-a-scheduler.md` cost, in a package of their own.

Each runs behind a real server on loopback, with the tiny model; a request of priority `SPOILT` brings its fault out.
Kit and guard catch it, and name it in the answer, in the log and in `/health`.
"""

import importlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from openinfer.models import find_family, find_model_dir
from openinfer_core import BrokenPlugin
from openinfer_core.plugins import SCHEDULERS
from openinfer_core.testing import ConformanceError
from openinfer_core.testing.scheduler import check_scheduler
from openinfer_engine import EngineOptions, build_loop, resolve
from openinfer_server import ServerOptions
from openinfer_server.testing import ThreadedServer, wait_until

PAGE = (Path(__file__).parents[1] / "docs" / "reference" / "write-a-scheduler.md").read_text(encoding="utf-8")
SPOILT = 99
MUTANTS = """
import threading
import time
from dataclasses import replace

SPOILT = 99
GATE = threading.Event()


def is_spoilt(requests):
    return any(request.priority == SPOILT for request in requests)


class Losing(CachedFirstScheduler):
    def add(self, request, *, now_s):
        return [] if request.priority == SPOILT else super().add(request, now_s=now_s)


class LosingInKit(CachedFirstScheduler):
    def add(self, request, *, now_s):
        return [] if request.request_id == 5 else super().add(request, now_s=now_s)


class BadPlan(CachedFirstScheduler):
    def plan(self, *, now_s):
        plan = super().plan(now_s=now_s)
        if plan is None or not is_spoilt(job.request for job in self.jobs.values()):
            return plan
        return replace(plan, slots=plan.slots + np.int32(255))


class BadPlanInKit(CachedFirstScheduler):
    def plan(self, *, now_s):
        plan = super().plan(now_s=now_s)
        return plan if plan is None or plan.step < 4 else replace(plan, slots=plan.slots + np.int32(255))


class RaisingInAdd(CachedFirstScheduler):
    def add(self, request, *, now_s):
        if is_spoilt([request]):
            raise ValueError("a secret of the plug-in")
        return super().add(request, now_s=now_s)


class RaisingInPlan(CachedFirstScheduler):
    def plan(self, *, now_s):
        if is_spoilt(job.request for job in self.jobs.values()):
            raise ValueError("a secret of the plug-in")
        return super().plan(now_s=now_s)


class Exiting(CachedFirstScheduler):
    def plan(self, *, now_s):
        if is_spoilt(job.request for job in self.jobs.values()):
            raise SystemExit(0)
        return super().plan(now_s=now_s)


class RaisingInApply(CachedFirstScheduler):
    def apply(self, plan, result, *, now_s):
        if is_spoilt(job.request for job in self.jobs.values()):
            raise ValueError("a secret of the plug-in")
        return super().apply(plan, result, now_s=now_s)


class RaisingInAbort(CachedFirstScheduler):
    def abort(self, request_id):
        raise ValueError("a secret of the plug-in")


class Wedged(CachedFirstScheduler):
    def plan(self, *, now_s):
        return None if is_spoilt(job.request for job in self.jobs.values()) else super().plan(now_s=now_s)


class Slow(CachedFirstScheduler):
    def plan(self, *, now_s):
        if is_spoilt(job.request for job in self.jobs.values()):
            GATE.wait(60)
        return super().plan(now_s=now_s)


class SlowInKit(CachedFirstScheduler):
    def plan(self, *, now_s):
        time.sleep(1.05)
        return super().plan(now_s=now_s)


class WithoutCapabilities(CachedFirstScheduler):
    capabilities = None
"""
NAMES = re.findall(r"^class (\w+)\(", MUTANTS, re.M)
RAISING = ("RaisingInAdd", "RaisingInPlan", "RaisingInApply")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The package foreign-schedulers 1.0: the page's scheduler and its mutants, installed for these tests."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    scheduler = next(block for block in blocks if "class CachedFirstScheduler" in block)
    folder = tmp_path_factory.mktemp("site")
    (folder / "foreign_schedulers.py").write_text(f"{scheduler}\n{MUTANTS}", encoding="utf-8")
    metadata = folder / "foreign_schedulers-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign-schedulers\nVersion: 1.0\n")
    entries = "\n".join(f"{name} = foreign_schedulers:{name}" for name in ("CachedFirstScheduler", *NAMES))
    (metadata / "entry_points.txt").write_text(f"[{SCHEDULERS}]\n{entries}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield importlib.import_module("foreign_schedulers")


def engine_options(scheduler: str, **others: Any) -> EngineOptions:
    return EngineOptions(scheduler=scheduler, num_blocks=64, max_num_seqs=4, max_model_tokens=128, **others)


@pytest.fixture
def serve(package: ModuleType) -> Iterator[Callable[..., ThreadedServer]]:
    """Starts servers of a scheduler of the package; they end with the test."""
    model_dir = find_model_dir("tiny")
    family, _ = find_family(model_dir)
    with ExitStack() as servers:

        def start(scheduler: str) -> ThreadedServer:
            loop = build_loop(resolve(family.definition, model_dir, engine_options(scheduler)))
            return servers.enter_context(ThreadedServer(loop, model_dir, ServerOptions(port=0)))

        yield start
        package.GATE.set()
    package.GATE.clear()


def call(server: ThreadedServer, method: str, path: str, body: object = None) -> tuple[int, dict[str, Any]]:
    connection = HTTPConnection(*server.address, timeout=60)
    try:
        content = None if body is None else json.dumps(body)
        connection.request(method, path, content, {"content-type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode()
        return response.status, json.loads(text) if text.startswith("{") else {"text": text}
    finally:
        connection.close()


def complete(server: ThreadedServer, *, priority: int = 0) -> tuple[int, dict[str, Any]]:
    body = {"prompt": [300, 301, 302], "max_tokens": 4, "priority": priority, "ignore_eos": True}
    return call(server, "POST", "/v1/completions", body)


def plugin(name: str) -> str:
    return f"{name} (foreign-schedulers 1.0)"


# --- what is right --------------------------------------------------------------------------------------------


def test_scheduler_of_the_page_serves_and_its_plans_pass(serve: Callable[..., ThreadedServer]) -> None:
    server = serve("CachedFirstScheduler")
    answers: list[tuple[int, dict[str, Any]]] = []
    threads = [threading.Thread(target=lambda: answers.append(complete(server))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [status for status, _ in answers] == [200] * 6
    assert {answer["usage"]["completion_tokens"] for _, answer in answers} == {4}
    health = call(server, "GET", "/health")
    assert health[0] == 200
    assert "plugin_faults" not in health[1]


# --- a request that is lost -------------------------------------------------------------------------------------


def test_lost_request_ends_within_a_second_and_others_are_served(
    serve: Callable[..., ThreadedServer], caplog: pytest.LogCaptureFixture
) -> None:
    server = serve("Losing")
    assert complete(server)[0] == 200
    begin_s = time.monotonic()
    status, answer = complete(server, priority=SPOILT)
    assert time.monotonic() - begin_s < 2.0
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert f"the scheduler {plugin('Losing')} lost this request" in answer["error"]["message"]
    assert f"the scheduler {plugin('Losing')} lost this request" in caplog.text
    status, health = call(server, "GET", "/health")
    assert (status, health["status"]) == (200, "ok")
    assert health["plugin_faults"] == [f"{plugin('Losing')}, of {SCHEDULERS}: lost_request 1"]
    metrics = call(server, "GET", "/metrics")[1]["text"]
    labels = f'group="{SCHEDULERS}",plugin="{plugin("Losing")}",kind="lost_request"'
    assert f"openinfer_plugin_faults_total{{{labels}}} 1" in metrics
    assert complete(server)[0] == 200


# --- what ends the engine ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        ("BadPlan", "made a plan that breaks the contract: slots are 0 .. 3; the plan names 25"),
        ("RaisingInAdd", "raised ValueError in add"),
        ("RaisingInPlan", "raised ValueError in plan"),
        ("Exiting", "raised SystemExit in plan"),
        ("RaisingInApply", "raised ValueError in apply"),
        ("Wedged", "is wedged: it has 1 requests and plans no step"),
    ],
)
def test_fault_that_ends_the_engine_is_named_in_answer_log_and_health(
    serve: Callable[..., ThreadedServer], caplog: pytest.LogCaptureFixture, scheduler: str, message: str
) -> None:
    server = serve(scheduler)
    assert complete(server)[0] == 200
    status, answer = complete(server, priority=SPOILT)
    named = f"the scheduler {plugin(scheduler)} {message}"
    assert status == 503
    assert named in answer["error"]["message"]
    assert "secret" not in answer["error"]["message"]
    # The server ends by itself a second after its engine, as with any dead engine.
    wait_until(lambda: call(server, "GET", "/health")[0] == 503, "bad health")
    assert named in call(server, "GET", "/health")[1]["status"]
    assert server.join() == 1
    assert named in caplog.text
    assert "secret" in caplog.text or not scheduler.startswith("Raising")


def test_abort_that_raises_ends_the_engine_naming_it(
    serve: Callable[..., ThreadedServer], caplog: pytest.LogCaptureFixture
) -> None:
    server = serve("RaisingInAbort")
    body = {"prompt": [300], "max_tokens": 100, "stream": True, "ignore_eos": True, "deadline_s": 1e-6}
    status, answer = call(server, "POST", "/v1/completions", body)
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
    assert server.join() == 1
    assert f"the scheduler {plugin('RaisingInAbort')} raised ValueError in abort" in caplog.text


# --- slow -------------------------------------------------------------------------------------------------------


def test_slow_scheduler_is_named_by_health_while_it_has_the_loop(
    serve: Callable[..., ThreadedServer], package: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve("Slow")
    answers: list[tuple[int, dict[str, Any]]] = []
    asking = threading.Thread(target=lambda: answers.append(complete(server, priority=SPOILT)))
    asking.start()
    named = f"the scheduler {plugin('Slow')} has been in plan for"
    wait_until(lambda: named in call(server, "GET", "/health")[1]["status"], "health that names the scheduler")
    labels = f'plugin="{plugin("Slow")}",call="plan"'
    assert f"openinfer_plugin_slow_call_seconds{{{labels}}}" in call(server, "GET", "/metrics")[1]["text"]
    assert named in caplog.text
    package.GATE.set()
    asking.join()
    assert answers[0][0] == 200
    health = call(server, "GET", "/health")[1]
    assert health["status"] == "ok"
    assert any("slow_call" in fault for fault in health["plugin_faults"])
    assert f"the scheduler {plugin('Slow')} took" in caplog.text


# --- what is refused at the start -------------------------------------------------------------------------------


def test_queue_policy_is_refused_with_a_scheduler_that_asks_none(package: ModuleType) -> None:
    del package
    model_dir = find_model_dir("tiny")
    family, _ = find_family(model_dir)
    build_loop(resolve(family.definition, model_dir, engine_options("CachedFirstScheduler"))).close()
    for others in ({"queue_policy": "fcfs"}, {"tenant_weights": {"gold": 2.0}}):
        with pytest.raises(
            Exception, match=rf"{re.escape(plugin('CachedFirstScheduler'))} orders requests by itself"
        ) as caught:
            build_loop(resolve(family.definition, model_dir, engine_options("CachedFirstScheduler", **others)))
        assert type(caught.value).__name__ == "Refused"


def test_scheduler_without_capabilities_is_refused_by_name(package: ModuleType) -> None:
    del package
    model_dir = find_model_dir("tiny")
    family, _ = find_family(model_dir)
    with pytest.raises(BrokenPlugin, match=rf"{re.escape(plugin('WithoutCapabilities'))} has no capabilities"):
        build_loop(resolve(family.definition, model_dir, engine_options("WithoutCapabilities")))


# --- the kit ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        ("LosingInKit", "lost: requests .* have no terminal event"),
        ("BadPlanInKit", "beyond max_num_seqs"),
        ("RaisingInAbort", "secret"),
        ("SlowInKit", "took longer than 1 s"),
    ],
)
def test_kit_catches_the_mutants_too(package: ModuleType, scheduler: str, message: str) -> None:
    raised = ValueError if scheduler.startswith("Raising") else ConformanceError
    with pytest.raises(raised, match=message):
        check_scheduler(getattr(package, scheduler))

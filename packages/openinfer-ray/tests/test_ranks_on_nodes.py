"""Ranks of one replica on two nodes of a real Ray cluster: their tokens and ends, a node's death, shares and paths."""

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from safetensors.numpy import save_file

import openinfer_tiny_model
from openinfer import LLM
from openinfer_engine.testing import random_weights
from openinfer_qwen3.family import Qwen3
from openinfer_ray.model_paths import VARIABLE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="replicas on Ray need Linux")

COMMAND = [sys.executable, "-m", "openinfer.commands.main", "ray"]
GIVE_UP_S = 900.0  # of the whole test, whatever the machine does meanwhile
NODES = 3  # that may have ranks: two, and one to take the place of one that dies
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
PROMPTS = ["Where is Paris?", "Count to nine: one, two,", "a b c d e"]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Each node has the model of the folder `model` in another folder."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("OPENINFER_LOG_LEVEL", "info")
    cluster_utils: Any = importlib.import_module("ray.cluster_utils")

    small: dict[str, Any] = {"object_store_memory": 80 << 20}
    # What connects from this machine is attached to the head, so no rank is there.
    started = cluster_utils.Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **small}
    )
    try:
        for index in range(NODES):
            paths = {VARIABLE: f"{tmp_path / 'model'}={tmp_path / f'node-{index}'}"}
            started.add_node(num_cpus=1, env_vars=paths, **small)
        yield started
    finally:
        started.shutdown()


class Served:
    """`openinfer ray serve` on a cluster, with the ranks of one replica on two nodes."""

    def __init__(self, address: str, log: Path, *, model: str = "tiny", ranks: int = 2, shares: str = "1") -> None:
        self._log = log
        flags = ["--ray-address", address, "--port", "0", "--model-name", "tiny"]
        flags += ["--tensor-parallel-size", str(ranks), "--ranks-per-node", shares]
        flags += ["--replica-health-period-s", "0.5", "--replica-timeout-s", "120", "--drain-deadline-s", "240"]
        # Neither silence nor a step that takes long may be what ends the engine.
        flags += ["--rank-timeout-s", "3600", "--health-max-step-age-s", "3600"]
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [*COMMAND, "serve", model, *flags], stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self._watchdog = threading.Timer(GIVE_UP_S, self.process.kill)
        self._watchdog.daemon = True
        self._watchdog.start()
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        found = re.fullmatch(r"openinfer: serving tiny on (http\S+), 1 replicas on Ray\n", said)
        assert found is not None, (said, self.log)
        self.url = found[1]

    @property
    def log(self) -> str:
        return self._log.read_text("utf-8", errors="replace")

    def ask(self, prompt: str, max_tokens: int) -> httpx.Response:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=GIVE_UP_S)

    def wait(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            assert self.process.poll() is None, self.log  # the watchdog ends what would never come
            time.sleep(0.1)

    def end(self) -> None:
        self._watchdog.cancel()
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def served(cluster: Any, tmp_path: Path) -> Iterator[Served]:
    started = Served(cluster.address, tmp_path / "log")
    try:
        yield started
    finally:
        started.end()


def test_ranks_on_two_nodes_say_what_one_process_says_and_outlive_neither_a_node_nor_the_engine(
    cluster: Any, served: Served
) -> None:
    assert len(ranks()) == 1
    expected = said_by_an_engine()
    assert [text_of(served.ask(prompt, 24)) for prompt in PROMPTS] == expected

    # An engine without Ray Serve has a rank on the node that is left. In this process, which has imported Ray, it would
    # be refused: Ray brings distributions of its own, which the rank's process does not see.
    on_two_nodes = {"tensor_parallel_size": 2, "rank_host": f"ray={cluster.address},ranks-per-node=1"}
    assert said_by_an_engine(engine_host="process", rank_timeout_s=600, **on_two_nodes) == expected
    served.wait(lambda: len(ranks()) == 1)

    (rank,) = ranks()
    actor, raylet = rank.parents()[0], raylet_of(rank)
    rank.suspend()  # so that what is asked from here on cannot be answered, however fast the engine is
    with ThreadPoolExecutor(8) as clients:
        answers = [clients.submit(served.ask, PROMPTS[0], 24) for _ in range(8)]
        served.wait(lambda: num_open(served) == len(answers))
        # The rank ends with its actor, and Ray's other processes of that node with the raylet. The actor comes first:
        # the kernel continues what is stopped in a process group whose parent dies, and the rank could answer then.
        actor.kill()
        raylet.kill()
        assert {answer.result().status_code for answer in answers} <= {500, 503}
    served.wait(lambda: has_ended(rank) and len(ranks()) == 1)
    served.wait(lambda: served.ask(PROMPTS[0], 24).status_code == 200)
    assert [text_of(served.ask(prompt, 24)) for prompt in PROMPTS] == expected
    assert raylet_of(ranks()[0]).pid != raylet.pid

    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait() == 0
    _, left = psutil.wait_procs([*ranks(), *placers()], timeout=GIVE_UP_S)
    assert left == []


def test_nodes_with_unequal_shares_find_the_model_at_paths_of_their_own(cluster: Any, tmp_path: Path) -> None:
    folders = [tmp_path / f"node-{index}" for index in range(NODES)]
    for folder in folders:
        write_model(folder)
    expected = said_by_an_engine(str(folders[0]), tensor_parallel_size=3)
    # What the command reads is here; weights are on the nodes alone.
    here = tmp_path / "model"
    here.mkdir()
    for name in ("config.json", *TOKENIZER):
        shutil.copy(folders[0] / name, here)
    served = Served(cluster.address, tmp_path / "log", model=str(here), ranks=3, shares="2+1")
    try:
        assert [text_of(served.ask(prompt, 24)) for prompt in PROMPTS] == expected
        paths = [folder for each in ranks() for folder in folders if str(folder) in command_line(each)]
        assert len(ranks()) == 2  # rank 1 is on the node of rank 0, which the engine's process is
        assert len(paths) == 1
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait() == 0
    finally:
        served.end()


def write_model(folder: Path) -> None:
    """A model that three ranks can share."""
    source = openinfer_tiny_model.model_dir()
    config = json.loads((source / "config.json").read_bytes())
    config |= {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 384, "num_hidden_layers": 2}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_weights(Qwen3().definition, config), folder / "model.safetensors")
    for name in TOKENIZER:
        shutil.copy(source / name, folder)


def said_by_an_engine(model: str = "tiny", **options: Any) -> list[str]:
    with LLM(model, **options) as llm:
        return [each.text for each in llm.generate(PROMPTS, ignore_eos=True, max_tokens=24, temperature=0)]


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def num_open(served: Served) -> float:
    """Requests that the server has; the engine does not tell of its own while a step waits for ranks."""
    metrics = httpx.get(f"{served.url}/metrics", timeout=GIVE_UP_S).text
    return sum(float(found) for found in re.findall(r"^openinfer_requests_open(?:\{[^}]*\})? (\S+)$", metrics, re.M))


def ranks() -> list[psutil.Process]:
    """Processes of ranks that actors of this test's cluster have started."""
    return [each for each in children() if "openinfer_engine.worker.process" in command_line(each)]


def placers() -> list[psutil.Process]:
    return [each for each in children() if "openinfer_ray.ranks.placer" in command_line(each)]


def children() -> list[psutil.Process]:
    return psutil.Process(os.getpid()).children(recursive=True)


def raylet_of(rank: psutil.Process) -> psutil.Process:
    return next(each for each in rank.parents() if each.name() == "raylet")


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []

"""Real servers of tiny models that take turns, behind one address."""

import asyncio
import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from openinfer.commands.main import main
from openinfer.models import find_model_dir
from openinfer.several.child import START_AGAIN_S, ChildServer
from openinfer.several.models_file import ModelsFile, ServedModel, read_models_file
from openinfer.several.turns import CannotWake
from openinfer_core import InvalidRequest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="models sleep on Linux")

ARGUMENTS = ["--num-blocks", "64", "--max-num-seqs", "4", "--grammar-compiler", "none"]


def write(path: Path, **settings: object) -> Path:
    model = path.parent / "model"  # installers link files of packages, also while tests run: then none could sleep
    shutil.copytree(find_model_dir("tiny"), model, dirs_exist_ok=True)
    arguments = ["--model", str(model), *ARGUMENTS]
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    for name in ("first", "second"):
        lines += ["[[models]]", f'name = "{name}"', f"arguments = {json.dumps(arguments)}"]
    path.write_text("\n".join(lines))
    return path


class Router:
    """`openinfer serve --models`, as a process."""

    def __init__(self, file: Path) -> None:
        command = [sys.executable, "-m", "openinfer.commands.main", "serve", "--models", str(file), "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        assert "serving first, second on http://" in said, said
        self.url = said.split(" on ")[1].split(",")[0]
        self.address = self.url.removeprefix("http://")

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, dict]:
        with contextlib.closing(http.client.HTTPConnection(self.address, timeout=120)) as connection:
            given = {"content-type": "application/json", **headers}
            connection.request(method, path, None if body is None else json.dumps(body), given)
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def complete(self, model: str, *, max_tokens: int = 8) -> str:
        body = {"model": model, "prompt": "The capital", "max_tokens": max_tokens, "temperature": 0}
        status, answer = self.ask("POST", "/v1/completions", body)
        assert status == 200, answer
        return answer["choices"][0]["text"]

    @property
    def states(self) -> dict[str, str]:
        return self.ask("GET", "/health")[1]["models"]

    def server_of(self, model: str) -> int:
        """The process of a model's server."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in children}
        return next(pid for pid, command in commands.items() if model.encode() in command)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(120)
        self.process.stdout.close()
        return code


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    running = Router(write(tmp_path_factory.mktemp("models") / "models.toml", turn_s=0.0))
    yield running
    children = [running.server_of(model) for model in ("first", "second")]
    assert running.end() == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


def test_each_model_is_woken_when_it_is_asked_for(router: Router) -> None:
    said = router.complete("first")
    assert router.states == {"first": "awake", "second": "asleep"}
    assert router.complete("second") == said  # the same weights under another name
    assert router.states == {"first": "asleep", "second": "awake"}
    assert router.complete("first") == said
    assert [card["id"] for card in router.ask("GET", "/v1/models")[1]["data"]] == ["first", "second"]


def test_streams_of_an_sdk_pass_through_piece_by_piece(router: Router) -> None:
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        whole = client.chat.completions.create(
            model="second", messages=[{"role": "user", "content": "Hello"}], max_tokens=12, temperature=0
        )
        stream = client.chat.completions.create(
            model="second", messages=[{"role": "user", "content": "Hello"}], max_tokens=12, temperature=0, stream=True
        )
        pieces = [each.choices[0].delta.content or "" for each in stream if each.choices]
    assert len(pieces) > 2
    assert "".join(pieces) == whole.choices[0].message.content


def test_an_sdk_finds_one_model_by_its_name(router: Router) -> None:
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0) as client:
        assert client.models.retrieve("second") == client.models.list().data[1]
        for unknown in ("third", "org/third"):
            with pytest.raises(openai.NotFoundError, match=f"the model '{unknown}' is not served") as refused:
                client.models.retrieve(unknown)
            assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.NotFoundError) as refused:
            client.responses.retrieve("resp_1")
        assert refused.value.code == "unknown_url"


def test_requests_of_both_models_at_once_are_all_answered(router: Router) -> None:
    answers: list[str] = []

    def ask(model: str) -> None:
        answers.append(router.complete(model))

    threads = [threading.Thread(target=ask, args=(model,)) for model in ("first", "second") * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 8
    assert len(set(answers)) == 1


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("POST", "/v1/completions", {"model": "third", "prompt": "a"}, {}, 404),
        ("POST", "/v1/completions", {"prompt": "a"}, {}, 400),
        ("POST", "/v1/completions", {"model": 3}, {}, 400),
        ("POST", "/v1/completions", {"model": "first", "prompt": "a", "nonsense": 1}, {}, 400),
        ("POST", "/v1/completions", {"model": "first"}, {"content-type": "text/plain"}, 415),
        ("POST", "/v1/completions", {"model": "first"}, {"origin": "http://elsewhere"}, 403),
        ("POST", "/v1/completions", {"model": "first"}, {"host": "elsewhere:80"}, 403),
        ("POST", "/sleep", {"model": "first"}, {}, 403),
        ("POST", "/update_weights", {"model": "first", "path": "x"}, {}, 403),
        ("GET", "/metrics", None, {}, 404),
    ],
)
def test_what_is_refused(router: Router, method, path, body, headers, status) -> None:
    assert router.ask(method, path, body, **headers)[0] == status


def test_requests_without_end_are_bounded(router: Router) -> None:
    with contextlib.closing(http.client.HTTPConnection(router.address, timeout=120)) as connection:
        connection.putrequest("GET", "/health")
        connection.putheader("x-long", "x" * 200_000)
        connection.endheaders()
        assert connection.getresponse().status == 431


def test_server_that_has_died_is_started_again_and_all_end_with_a_router_that_is_killed(tmp_path: Path) -> None:
    running = Router(write(tmp_path / "models.toml", max_awake=2))
    try:
        said = running.complete("first")
        dead = running.server_of("second")
        os.kill(dead, signal.SIGKILL)
        body = {"model": "second", "prompt": "The capital", "max_tokens": 8, "temperature": 0}
        until_s = time.monotonic() + 120
        while (answer := running.ask("POST", "/v1/completions", body))[0] == 503:  # until the router knows of it
            assert time.monotonic() < until_s
        assert (answer[0], answer[1]["choices"][0]["text"]) == (200, said)
        assert running.server_of("second") != dead
        assert running.complete("first") == said
        left = running.server_of("first")
    finally:
        running.process.kill()
        running.process.wait()
        running.process.stdout.close()
    until_s = time.monotonic() + 120
    while Path(f"/proc/{left}").exists() and "\nState:\tZ" not in Path(f"/proc/{left}/status").read_text():
        assert time.monotonic() < until_s, "a server goes on without its router"
        time.sleep(0.05)


def test_server_that_cannot_sleep_is_ended_and_started_again(tmp_path: Path) -> None:
    """Its memory would be held next to that of the model that takes its turn."""
    running = Router(write(tmp_path / "models.toml", turn_s=0.0))
    try:
        said = running.complete("first")
        before = running.server_of("first")
        (tmp_path / "model/model.safetensors").chmod(0o600)  # a change of the folder, though not of a byte
        assert running.complete("second") == said
        with pytest.raises(StopIteration):
            running.server_of("first")
        assert running.complete("first") == said
        assert running.server_of("first") != before
        assert running.end() == 0
    finally:
        running.process.kill()
        running.process.wait()


def test_server_that_ends_is_not_started_again_all_the_time(tmp_path: Path) -> None:
    now_s = [100.0]
    model = ServedModel(name="lost", arguments=["--model", f"{tmp_path}/nowhere"])

    async def wake() -> str:
        with pytest.raises(CannotWake) as raised:
            await server.wake()
        return str(raised.value)

    async def live() -> list[str]:
        found = [await wake(), await wake()]
        now_s[0] += START_AGAIN_S
        found.append(await wake())
        await server.close()
        return found

    server = ChildServer(model, tmp_path, clock=lambda: now_s[0])
    first, second, third = asyncio.run(live())
    assert first == third == "the server of the model lost ended with exit code 2 while it started"
    assert second == "the server of the model lost has ended; it is started again in 30 s"


def test_model_that_does_not_start_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "models.toml"
    file.write_text(f'[[models]]\nname = "lost"\narguments = ["--model", "{tmp_path}/nowhere"]')
    assert main(["serve", "--models", str(file), "--port", "0"]) == 2
    assert "the server of the model lost ended with exit code 2 while it started" in capfd.readouterr().err


def test_other_addresses_than_loopback_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "models.toml")
    assert main(["serve", "--models", str(file), "--host", "0.0.0.0"]) == 2
    assert "served on loopback alone" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "missing required field `models`"),
        ("models = []", "1 to 64 models"),
        ('[[models]]\nname = "a"\narguments = ["--port=1"]', "--port is what the router gives"),
        ('[[models]]\nname = "a"\narguments = []\n[[models]]\nname = "a"\narguments = []', "each of its own name"),
        ('[[models]]\nname = "a"\narguments = ["a\\u0000b"]', "NUL"),
        ('max_awake = 0\n[[models]]\nname = "a"\narguments = []', "max_awake"),
        ('turn_s = -1.0\n[[models]]\nname = "a"\narguments = []', "turn_s"),
        ('more = 1\n[[models]]\nname = "a"\narguments = []', "unknown field `more`"),
    ],
)
def test_file_that_means_nothing_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "models.toml").write_text(text)
    with pytest.raises(InvalidRequest, match=message):
        read_models_file(tmp_path / "models.toml")


def test_file_is_read_with_defaults(tmp_path: Path) -> None:
    found = read_models_file(write(tmp_path / "models.toml"))
    assert isinstance(found, ModelsFile)
    assert (found.max_awake, found.max_waiting, found.turn_s) == (1, 64, 10.0)


@pytest.mark.parametrize(
    ("arguments", "first"),
    [
        (["--device", "cuda"], ["--enable-sleep", "true"]),
        (["--model", "a", "--device=cuda"], ["--enable-sleep", "true"]),
        (["--model", "a"], []),
        (["--device", "cpu"], []),
    ],
)
def test_models_on_a_gpu_are_started_so_that_they_can_sleep(arguments: list[str], first: list[str]) -> None:
    assert list(ServedModel(name="a", arguments=arguments).flags) == first + arguments

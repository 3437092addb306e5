"""A real server with two API workers: what an operator tells one of them holds for both."""

import contextlib
import http.client
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from openinfer.models import find_model_dir

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="engines sleep on Linux")

OPERATOR, USER = "operator-0123456789", "user-0123456789abcd"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    keys = folder / "keys.toml"
    keys.touch(mode=0o600)
    keys.write_text(
        f'[[keys]]\ntenant = "o"\nlevel = "admin"\nkey = "{OPERATOR}"\n[[keys]]\ntenant = "u"\nkey = "{USER}"\n'
    )
    root = folder / "model"  # installers link files of packages, also while tests run: then they are no longer the same
    shutil.copytree(find_model_dir("tiny"), root)
    (root / "empty").mkdir()
    command = [sys.executable, "-m", "openinfer.commands.main", "serve", str(root), "--port", "0", "--workers", "2"]
    command += ["--api-keys-file", str(keys), "--weights-root", str(root), "--num-blocks", "64"]
    process = subprocess.Popen([*command, "--grammar-compiler", "none"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split(" on http://")[1].split(" ")[0]
    finally:
        process.terminate()
        assert process.wait(120) == 0
        process.stdout.close()


def ask(address: str, method: str, path: str, body: object = None, *, key: str = OPERATOR) -> tuple[int, dict]:
    """Over a connection of its own, which either worker may take."""
    with contextlib.closing(http.client.HTTPConnection(address, timeout=120)) as connection:
        headers = {"x-api-key": key, "content-type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def complete(address: str) -> tuple[int, dict]:
    body = {"prompt": "The capital of France", "max_tokens": 8, "temperature": 0}
    return ask(address, "POST", "/v1/completions", body, key=USER)


def test_sleep_and_wake_hold_for_every_worker(address: str) -> None:
    text = complete(address)[1]["choices"][0]["text"]
    status, answer = ask(address, "POST", "/sleep")
    assert (status, answer["state"]) == (200, "asleep")
    for _ in range(12):
        assert complete(address)[0] == 503
        assert ask(address, "GET", "/is_sleeping", key=USER)[1] == {"is_sleeping": True}
        assert ask(address, "GET", "/ready")[0] == 503
        assert ask(address, "GET", "/health")[0] == 200
    woken: list[int] = []
    threads = [threading.Thread(target=lambda: woken.append(ask(address, "POST", "/wake_up")[0])) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert woken == [200] * 6
    for _ in range(12):
        assert complete(address)[1]["choices"][0]["text"] == text


def test_update_holds_for_every_worker_and_is_for_operators(address: str) -> None:
    update = {"path": ".", "content_hash": "ab" * 32}
    assert ask(address, "POST", "/update_weights", update, key=USER)[0] == 403
    text = complete(address)[1]["choices"][0]["text"]
    status, answer = ask(address, "POST", "/update_weights", update)
    assert (status, answer["state"], answer["weights_version"]) == (200, "serving", f"content {'ab' * 32}")
    for _ in range(12):
        assert complete(address)[1]["choices"][0]["text"] == text
    status, answer = ask(address, "POST", "/update_weights", {"path": "empty"})
    told = answer["error"]["message"]
    assert (status, "has neither model.safetensors nor" in told, "--load-format" in told) == (400, True, False)
    status, answer = ask(address, "POST", "/update_weights", {"path": "../.."})
    assert (status, "not below --weights-root" in answer["error"]["message"]) == (400, True)
    assert complete(address)[0] == 200

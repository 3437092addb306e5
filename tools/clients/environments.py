"""Environments of clients, each of its own under .run/clients, made again only if what it is made of has changed."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from .table import FOLDER, Client, pin

ENVIRONMENTS = FOLDER.parents[1] / ".run" / "clients"
LOCKS = FOLDER / "locks"
INSTALL_S = 1200
_LOCK_HEAD = "# ./run clients --lock: what the pins of clients.toml require, everywhere\n"
_OLDEST_PYTHON = "3.11"
_UV = str(Path(sys.executable).with_name("uv"))


class Failure(Exception):
    """An environment could not be made; the message says why."""


def environment_of(client: Client) -> Path:
    return ENVIRONMENTS / client.runtime / (client.environment or client.name)


def lock_of(client: Client) -> Path:
    return LOCKS / f"{client.environment or client.name}.txt"


def make_environment(client: Client) -> Path:
    """Make the environment of a client unless it is there; return its folder."""
    folder = environment_of(client)
    recipe = lock_of(client).read_text("utf-8") if client.runtime == "python" else json.dumps(client.requires)
    made_from = hashlib.sha256(recipe.encode()).hexdigest()
    record = folder / "made-from"
    if not record.exists() or record.read_text("utf-8") != made_from:
        shutil.rmtree(folder, ignore_errors=True)
        _make_python(folder, lock_of(client)) if client.runtime == "python" else _make_node(folder, client.requires)
        record.write_text(made_from, encoding="utf-8")
    return folder


def _make_python(folder: Path, lock: Path) -> None:
    _call(_UV, "venv", "--quiet", "--python", sys.executable, str(folder))
    _call(_UV, "pip", "sync", "--quiet", "--python", str(folder), str(lock))


def _make_node(folder: Path, requires: tuple[str, ...]) -> None:
    folder.mkdir(parents=True)
    package = {"private": True, "type": "module", "dependencies": dict(map(pin, requires))}
    (folder / "package.json").write_text(json.dumps(package), encoding="utf-8")
    _call("npm", "install", "--silent", "--no-audit", "--no-fund", "--no-package-lock", at=folder)


def write_locks(clients: list[Client]) -> None:
    """Resolve the pins of the clients of Python anew."""
    for client in clients:
        if client.runtime == "python":
            lock = lock_of(client)
            command = (_UV, "pip", "compile", "--quiet", "--universal", "--python-version", _OLDEST_PYTHON)
            found = _call(*command, "--no-header", "--no-annotate", "-", given="\n".join(client.requires))
            lock.write_text(_LOCK_HEAD + found, encoding="utf-8")


def _environment() -> dict[str, str]:
    """Leave out what ./run binds its own environments to: a client has a lock of its own."""
    return {name: value for name, value in os.environ.items() if name not in {"UV_CONSTRAINT", "UV_BUILD_CONSTRAINT"}}


def _call(*command: str, at: Path | None = None, given: str | None = None) -> str:
    try:
        done = subprocess.run(
            command,
            cwd=at,
            input=given,
            env=_environment(),
            capture_output=True,
            text=True,
            timeout=INSTALL_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Failure(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        raise Failure(f"{' '.join(command)} ended with {done.returncode}: {(done.stderr + done.stdout)[-1500:]}")
    return done.stdout

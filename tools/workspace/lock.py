"""Resolve everything that is ever installed here into locks/: exact versions, each with the hashes of its files.

    ./run lock                  # after a requirement has changed: what still fits stays as it is
    ./run lock --upgrade        # the newest of everything

locks/workspace.txt   all packages with all extras, their tests, the tools of hatch.toml, builds, hatch and uv; CUDA 13
locks/cuda12.txt      what is installed, with CUDA 12, which CUDA 13 excludes
locks/uv.txt          uv alone, for machines that have none

Each is right for every platform and every Python from 3.11 on, and names no index. `./run`, `./run install` and
`./run alone` hand them to uv as constraints, which refuses a file of another hash; tests/test_locks.py says when a
requirement has no place in them. `./run licences` follows: what they say of themselves, third_party.py.
"""

import argparse
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import uv

ROOT = Path(__file__).resolve().parents[2]
LOCKS = Path(__file__).with_name("locks")
OLDEST_PYTHON = "3.11"
BOOTSTRAP = ("hatch>=1.18,<2", "uv>=0.9,<1")  # ./run installs them
EXCLUDED = {"workspace": {"cuda12", "nccl12"}, "cuda12": {"cuda13", "nccl13"}}  # extras that one lock cannot have
HEAD = "# ./run lock\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--upgrade", action="store_true", help="the newest of everything")
    upgrade = parser.parse_args().upgrade
    LOCKS.mkdir(exist_ok=True)
    resolve("workspace", [*of_packages("workspace", tests=True), *of_environments(), *BOOTSTRAP], upgrade=upgrade)
    resolve("cuda12", of_packages("cuda12", tests=False), upgrade=upgrade)
    resolve("uv", [line for line in BOOTSTRAP if line.startswith("uv")], upgrade=upgrade)
    return 0


def projects() -> list[dict]:
    files = sorted([*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("examples/*/pyproject.toml")])
    return [tomllib.loads(file.read_text(encoding="utf-8")) for file in files]


def of_packages(lock: str, *, tests: bool) -> list[str]:
    """Return what our packages require of third parties."""
    ours = {each["project"]["name"] for each in projects()}
    lines = [line for each in projects() for line in of_project(each, EXCLUDED[lock], tests=tests)]
    return [line for line in lines if name_of(line) not in ours]


def of_project(project: dict, excluded: set[str], *, tests: bool) -> Iterator[str]:
    yield from project["build-system"]["requires"]
    yield from project["project"].get("dependencies", [])
    for extra, lines in project["project"].get("optional-dependencies", {}).items():
        if extra not in excluded:
            yield from lines
    if tests:
        yield from project.get("dependency-groups", {}).get("test", [])


def of_environments() -> list[str]:
    environments = tomllib.loads((ROOT / "hatch.toml").read_text(encoding="utf-8"))["envs"]
    return [line for each in environments.values() for line in each.get("dependencies", [])]


def name_of(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None, requirement
    return found.group().lower()


def resolve(name: str, requirements: list[str], *, upgrade: bool) -> None:
    lock = LOCKS / f"{name}.txt"
    command = [uv.find_uv_bin(), "pip", "compile", "--quiet", "--universal", "--python-version", OLDEST_PYTHON]
    command += ["--generate-hashes", "--no-header", "--no-annotate", "--output-file", str(lock), "-"]
    command += ["--upgrade"] if upgrade else []
    given = "\n".join(sorted(set(requirements)))
    # not bound by the lock that it makes
    kept = {key: value for key, value in os.environ.items() if key not in {"UV_CONSTRAINT", "UV_BUILD_CONSTRAINT"}}
    subprocess.run(command, input=given, text=True, check=True, stdout=subprocess.DEVNULL, env=kept)
    lock.write_text(HEAD + lock.read_text(encoding="utf-8").removeprefix(HEAD), encoding="utf-8")
    print(f"lock: {lock.relative_to(ROOT)}")


if __name__ == "__main__":
    sys.exit(main())

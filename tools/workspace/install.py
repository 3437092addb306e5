"""Make an environment with the `openinfer` command and chosen extras; all our packages come from local files.

    ./run install [--cuda13] [--nccl] [--offload] ...           # in a checkout: editable, into .run/openinfer
    python3 install.py --into ~/openinfer [--cuda13] ...        # in a folder of wheels, as `./run wheels` leaves it

Our packages are on no index, so a stranger may put others of these names there. Every name of ours is therefore
bound to its folder or wheel, whether it is installed or not: an index supplies third parties alone, in the versions of
`locks/` and with the hashes that stand there. `--unlocked` takes the newest that fit. Extras add to those that the
environment has; `--fresh` begins anew. Needs nothing but Python 3.11; uses uv where there is one.
"""

import argparse
import email
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
UMBRELLA = "openinfer"
CHOSEN = "chosen-extras.json"
HELP = {
    "cuda12": "NVIDIA GPUs with an older driver: CuPy and its CUDA 12 libraries",
    "cuda13": "NVIDIA GPUs, driver 580 or newer: CuPy and its CUDA 13 libraries",
    "nccl": "several GPUs, with --cuda13 or --cuda12: NCCL",
    "offload": "KV blocks in host memory, on disk, in Valkey and S3: --kv-tier",
    "kv-events": "events of the KV cache for routers: --kv-events",
    "otel": "OpenTelemetry spans: --otlp-traces-endpoint",
    "uvloop": "the faster event loop",
    "plot": "matplotlib, for bench serve --plot",
}
LOCKS = HERE / "locks"
PINNED = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)((?:.*\\\n)*.*)$", re.MULTILINE)  # a lock's entry, to its last hash
HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_NAME = re.compile(r"\s*([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?")
OF_EXTRA = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")


@dataclass(frozen=True)
class Ours:
    """One package of ours: where it lies, and what it requires, under "" and by extra."""

    name: str
    path: Path
    requires: dict[str, list[str]]


@dataclass
class Wanted:
    """Which of our packages are installed, with which extras: what one of them needs is in here too."""

    extras: dict[str, set[str]] = field(default_factory=dict)

    def add(self, packages: dict[str, Ours], name: str, extras: Iterable[str] = ()) -> None:
        have = self.extras.get(name)
        new = {"", *extras} - (have or set())
        self.extras[name] = (have or set()) | new
        for requirement in (each for extra in new for each in packages[name].requires.get(extra, ())):
            other, others = parsed(requirement)
            if other in packages and (other not in self.extras or others - self.extras[other]):
                self.add(packages, other, others)


class Failure(Exception):
    """Something that the user can mend; the message says what."""


def main() -> int:
    packages = find_packages(HERE)
    choice = flags_of(packages[UMBRELLA], packages)
    options = parse_arguments(choice)
    environment: Path = options.into.expanduser().resolve()
    chosen = chosen_extras(options, choice, environment)
    wanted = Wanted()
    for name, extras in (parsed(each) for each in [f"{UMBRELLA}[{','.join([*always(packages), *chosen])}]"]):
        wanted.add(packages, name, extras)
    python = make_environment(environment, options.python, fresh=options.fresh)
    lock = None if options.unlocked else lock_for(chosen)
    further = [folder.resolve() for folder in options.with_folder]
    tested = [line for folder in further for line in tests_need(folder)] if options.tests else []
    for name, extras in map(parsed, tested):
        if name in packages:
            wanted.add(packages, name, extras)
    tools = [line for line in tested if parsed(line)[0] not in packages]
    install(python, packages, wanted, further, tools, lock=lock, dry_run=options.dry_run)
    if options.dry_run:
        return 0
    (environment / CHOSEN).write_text(json.dumps(sorted(chosen)), encoding="utf-8")
    print(f"openinfer is installed; start it with {how_to_start(environment)}")
    if not {"cuda12", "cuda13"} & chosen and shutil.which("nvidia-smi"):
        print("This machine has an NVIDIA GPU: install again with --cuda13 (driver 580 or newer) or --cuda12 to use it")
    return 0


def find_packages(here: Path) -> dict[str, Ours]:
    """Return the packages of the checkout that a folder is in, or those whose wheels lie in it.

    Raises:
        Failure: it is neither, or there are two wheels of one package.
    """
    wheels = sorted(here.glob("openinfer*.whl"))
    if wheels:
        found = [from_wheel(path) for path in wheels]
        names = [each.name for each in found]
        if twice := {name for name in names if names.count(name) > 1}:
            raise Failure(f"{here} has several wheels of {', '.join(sorted(twice))}; keep one of each")
    else:
        projects = sorted(here.parents[1].glob("packages/*/pyproject.toml"))
        found = [from_project(path) for path in projects]
    packages = {each.name: each for each in found}
    if UMBRELLA not in packages:
        raise Failure(f"found neither wheels of openinfer in {here} nor a checkout around it")
    return packages


def from_project(file: Path) -> Ours:
    project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    requires = {"": project.get("dependencies", []), **project.get("optional-dependencies", {})}
    return Ours(project["name"], file.parent, requires)


def from_wheel(wheel: Path) -> Ours:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", each))
        metadata = email.message_from_bytes(archive.read(name))
    requires: dict[str, list[str]] = {extra: [] for extra in ["", *metadata.get_all("Provides-Extra", [])]}
    for line in metadata.get_all("Requires-Dist", []):
        of_extra = OF_EXTRA.search(line)
        requires[of_extra.group(1) if of_extra else ""].append(OF_EXTRA.sub("python_version > '3'", line))
    return Ours(metadata["Name"], wheel, requires)


def parsed(requirement: str) -> tuple[str, set[str]]:
    """`openinfer-kernels[cuda13]>=0.1` -> ("openinfer-kernels", {"cuda13"})."""
    found = _NAME.match(requirement)
    assert found is not None, requirement
    return found.group(1), {each.strip() for each in (found.group(2) or "").split(",") if each.strip()}


def always(packages: dict[str, Ours]) -> list[str]:
    """Return the extras of openinfer that bring packages of ours and no extra of theirs: they are always installed."""
    extras = {extra: lines for extra, lines in packages[UMBRELLA].requires.items() if extra}
    return [
        extra
        for extra, lines in extras.items()
        if all(name in packages and not others for name, others in map(parsed, lines))
    ]


def flags_of(umbrella: Ours, packages: dict[str, Ours]) -> list[str]:
    left = [extra for extra in umbrella.requires if extra and extra not in always(packages)]
    return sorted({"nccl" if extra.startswith("nccl") else extra for extra in left})


def parse_arguments(choice: list[str]) -> argparse.Namespace:
    first, *_ = (__doc__ or "").splitlines()
    in_checkout = not list(HERE.glob("openinfer*.whl"))
    parser = argparse.ArgumentParser(prog="./run install" if in_checkout else "install.py", description=first)
    for extra in choice:
        parser.add_argument(f"--{extra}", action="store_true", help=HELP.get(extra, f"the extra {extra} of openinfer"))
    parser.add_argument(
        "--with",
        dest="with_folder",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="a package of your own, or of examples/, installed too, editable; repeatable",
    )
    parser.add_argument(
        "--tests", action="store_true", help="with --with: also what its tests need, the dependency group test"
    )
    into = HERE.parents[1] / ".run" / "openinfer" if in_checkout else None
    parser.add_argument(
        "--into",
        type=Path,
        default=into,
        required=into is None,
        metavar="FOLDER",
        help="where the environment is" + (" (default: .run/openinfer)" if into else ""),
    )
    parser.add_argument("--python", help="its interpreter: a path, or a version such as 3.14 where there is uv")
    parser.add_argument("--fresh", action="store_true", help="begin with an empty environment")
    parser.add_argument(
        "--unlocked", action="store_true", help="third parties in their newest versions, whatever their hashes"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be installed, and install nothing")
    return parser.parse_args()


def chosen_extras(options: argparse.Namespace, choice: list[str], environment: Path) -> set[str]:
    """Return the extras asked for now, and those that the environment already has; `nccl` gets its CUDA version."""
    record = environment / CHOSEN
    chosen = set(json.loads(record.read_text("utf-8"))) if record.exists() and not options.fresh else set[str]()
    asked = {extra for extra in choice if getattr(options, extra.replace("-", "_"))}
    cuda = {"cuda12", "cuda13"} & (chosen | asked)
    if len(cuda) > 1:
        raise Failure("CuPy for CUDA 12 and for CUDA 13 exclude each other; choose one, with --fresh to change")
    if "nccl" in asked:
        if not cuda:
            raise Failure("--nccl is for several GPUs: give --cuda13 or --cuda12 with it")
        asked = asked - {"nccl"} | {f"nccl{cuda.pop().removeprefix('cuda')}"}
    return chosen | asked


def make_environment(folder: Path, python: str | None, *, fresh: bool) -> str:
    """Create the environment unless it is there; return its interpreter."""
    if folder.exists() and not (folder / "pyvenv.cfg").exists() and any(folder.iterdir()):
        raise Failure(f"{folder} is not empty, and no environment of Python; name another folder with --into")
    interpreter = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if fresh or python or not interpreter.exists():
        if uv := shutil.which("uv"):
            call(uv, "venv", "--quiet", "--clear", "--python", python or sys.executable, str(folder))
        else:
            call(python or sys.executable, "-m", "venv", "--clear", str(folder))
    return str(interpreter)


def install(
    python: str,
    packages: dict[str, Ours],
    wanted: Wanted,
    further: list[Path],
    tools: list[str],
    *,
    lock: Path | None,
    dry_run: bool,
) -> None:
    """Install what is wanted; every name of ours is bound to its local file, whatever an index has."""
    wishes = [*requirements(packages, wanted, further), *tools]
    with tempfile.TemporaryDirectory(prefix="openinfer-install-") as scratch:
        constraints = Path(scratch) / "constraints.txt"
        constraints.write_text("".join(bound(packages)), encoding="utf-8")
        if uv := shutil.which("uv"):
            locked = [] if lock is None else ["--constraint", str(lock), "--build-constraint", str(lock)]
            # Compiled, as pip does it: a service that may not write here would compile all its imports at each start.
            how = ["--dry-run"] if dry_run else ["--quiet", "--compile-bytecode"]
            call(uv, "pip", "install", "--python", python, *how, "--constraint", str(constraints), *locked, *wishes)
        else:
            with_pip([python, "-m", "pip", "install"], constraints, wishes, lock=lock, dry_run=dry_run)


def with_pip(pip: list[str], constraints: Path, wishes: list[str], *, lock: Path | None, dry_run: bool) -> None:
    """Do what uv does in one call: pip knows hashes only where everything has one, and our folders have none."""
    if lock is None or dry_run:
        call(*pip, "--dry-run" if dry_run else "--quiet", "--constraint", str(constraints), *wishes)
        return
    pins, report, hashed = (constraints.with_name(name) for name in ("pins.txt", "report.json", "hashed.txt"))
    text = lock.read_text(encoding="utf-8")
    pins.write_text(re.sub(r"\s*\\\n\s*--hash=\S+", "", text), encoding="utf-8")
    bounds = ("--constraint", str(constraints), "--constraint", str(pins))
    call(*pip, "--quiet", "--dry-run", "--ignore-installed", "--report", str(report), *bounds, *wishes)
    hashed.write_text("".join(with_hashes(text, json.loads(report.read_text(encoding="utf-8")))), encoding="utf-8")
    call(*pip, "--quiet", "--no-deps", "--require-hashes", "--requirement", str(hashed))
    call(*pip, "--quiet", *bounds, *wishes)


def with_hashes(lock: str, report: dict[str, list[dict[str, dict[str, str]]]]) -> Iterator[str]:
    """Yield those of a lock's entries that pip's report is about; what no lock has, a package of yours asks for."""
    entries = {(found.group(1), found.group(2)): HASH.findall(found.group(3)) for found in PINNED.finditer(lock)}
    for each in report["install"]:
        metadata = each["metadata"]
        pinned = (re.sub(r"[-_.]+", "-", metadata["name"]).lower(), metadata["version"])
        if hashes := entries.get(pinned):
            yield f"{'=='.join(pinned)} {' '.join(f'--hash=sha256:{digest}' for digest in hashes)}\n"


def lock_for(extras: set[str]) -> Path:
    """Return the lock that knows these extras: CUDA 12 and CUDA 13 exclude each other there, too."""
    return LOCKS / ("cuda12.txt" if extras & {"cuda12", "nccl12"} else "workspace.txt")


def bound(packages: dict[str, Ours]) -> Iterator[str]:
    """Yield a constraint for each name of ours, also for those that nothing is known to require."""
    for name, package in packages.items():
        yield f"{name} @ {package.path.as_uri()}\n"


def requirements(packages: dict[str, Ours], wanted: Wanted, further: list[Path]) -> Iterator[str]:
    """Yield our packages by their paths, then what the chosen extras require: pip fails on extras of a bound name."""
    for name in wanted.extras:
        path = packages[name].path
        yield from ("--editable", str(path)) if path.is_dir() else (f"{name} @ {path.as_uri()}",)
    for name, extras in wanted.extras.items():
        for line in (each for extra in sorted(extras - {""}) for each in packages[name].requires[extra]):
            if parsed(line)[0] not in packages:
                yield line
    for folder in further:
        if not (folder / "pyproject.toml").exists():
            raise Failure(f"--with {folder}: no pyproject.toml is there; name the folder of a package")
        yield from ("--editable", str(folder))


def tests_need(folder: Path) -> list[str]:
    """Return what a package's tests need, as its dependency group `test` says."""
    file = folder / "pyproject.toml"
    groups = tomllib.loads(file.read_text(encoding="utf-8")).get("dependency-groups", {}) if file.exists() else {}
    lines = groups.get("test", ["pytest"])
    if not all(isinstance(line, str) for line in lines):
        raise Failure(f"--tests: the dependency group test of {file} includes another group; write its lines out")
    return lines


def how_to_start(environment: Path) -> str:
    if environment == HERE.parents[1] / ".run" / "openinfer" and os.name != "nt":
        return "./run openinfer"
    return str(environment / ("Scripts" if os.name == "nt" else "bin") / "openinfer")


def call(*command: str) -> None:
    # what ./run binds hatch to is this installer's to choose
    kept = {name: value for name, value in os.environ.items() if name not in {"UV_CONSTRAINT", "UV_BUILD_CONSTRAINT"}}
    done = subprocess.run(command, env=kept | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}, check=False)
    if done.returncode:
        raise Failure(f"this command ended with code {done.returncode}: {' '.join(command)}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failure as failure:
        sys.exit(f"install: {failure}")

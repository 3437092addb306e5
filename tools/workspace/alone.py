"""Install each package from its built wheel into an empty environment, and run its tests there.

    ./run alone [NAME ...] [--python 3.12] [--without-tests] [--jobs 2] [--results FOLDER]

This is the proof that `pip install` works: an editable checkout hides a missing dependency, a file left out of the
wheel and an import of a sibling that was never declared. For each package, in a folder outside the checkout:

1.  an empty environment gets the package's wheel and what it requires; our own packages come from the wheels built
    here and from nowhere else, third parties from the registry;
2.  the package is imported and its entry points are loaded, before any test requirement is there to help;
3.  what was installed is held against the rules (`broken_rules`) and weighed;
4.  the package's `test` group is added and its tests run, copied out of the checkout. CUDA sources are compiled into
    the user's own cache, by the digest of what they are made of: none that the suite or an earlier run has compiled.

The whole is done once more for `openinfer[qwen3]`, the install that DESIGN promises to be small.

As many packages as there are cores are taken through these steps at once, those with the most tests first; what one
of them prints is shown in one piece when it has ended.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO
from xml.etree import ElementTree as ET

import uv

ROOT = Path(__file__).resolve().parents[2]
UV = uv.find_uv_bin()
LOCK = Path(__file__).with_name("locks") / "workspace.txt"
PROBE = Path(__file__).with_name("installed.py")
NEVER_INSTALLED = frozenset({"torch", "transformers", "tensorflow", "jax"})
SMALL_INSTALL = "openinfer[qwen3]"
SMALL_INSTALL_MAX_BYTES = 60_000_000
BUILDS_ON = {"openinfer-kimi-k2": "openinfer-deepseek"}  # the one arrow between families


@dataclass(frozen=True)
class Package:
    """One distribution of this repository."""

    folder: Path
    name: str
    version: str

    @property
    def tests(self) -> Path:
        return self.folder / "tests"


@dataclass(frozen=True)
class Installed:
    """What `installed.py` saw inside one environment: bytes per distribution, and the model families among them."""

    size_bytes: dict[str, int]
    families: list[str]

    @property
    def beside_numpy_bytes(self) -> int:
        return sum(size for name, size in self.size_bytes.items() if name != "numpy")


class Failure(Exception):
    """A step of one package's run went wrong; the message says which."""


@dataclass
class Check:
    """One requirement on its way through the steps of the module docstring, in a folder of its own."""

    requirement: str
    package: Package
    folder: Path
    failure: str | None = None
    seconds: float = 0.0
    tests: Counter[str] = field(default_factory=Counter)

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def has_tests(self) -> bool:
        return self.requirement == self.package.name

    @property
    def bytes_of_tests(self) -> int:
        """Say roughly how long it takes: what is begun last should be short."""
        return sum(path.stat().st_size for path in self.package.tests.rglob("*.py")) if self.has_tests else 0


def main() -> int:
    options = parse_arguments()
    packages = find_packages()
    with tempfile.TemporaryDirectory(prefix="openinfer-alone-") as scratch:
        chosen = choose(packages, options.names)
        checks = [Check(name, package, Path(scratch) / name) for name, package in chosen.items()]
        wheels = build_wheels(packages, Path(scratch) / "wheels")
        run_all(checks, wheels, options)
    return summarise(checks)


def run_all(checks: list[Check], wheels: Path, options: argparse.Namespace) -> None:
    heading(f"{len(checks)} installs, {options.jobs} at a time")
    longest_first = sorted(checks, key=lambda check: check.bytes_of_tests, reverse=True)
    with ThreadPoolExecutor(options.jobs) as threads:
        running = {threads.submit(run_one, check, wheels, options): check for check in longest_first}
        for done in as_completed(running):
            done.result()
            check = running[done]
            heading(f"{check.requirement}: {check.seconds:.0f} s")
            print(check.log.read_text("utf-8", errors="replace"), end="")
            if check.failure:
                print(f"FAILED: {check.failure}")
            sys.stdout.flush()


def run_one(check: Check, wheels: Path, options: argparse.Namespace) -> None:
    began = time.monotonic()
    check.folder.mkdir()
    with check.log.open("w", encoding="utf-8") as log:
        try:
            check_alone(check, wheels, log, options)
        except Failure as failure:
            check.failure = str(failure)
    check.seconds = time.monotonic() - began


def summarise(checks: list[Check]) -> int:
    """Print a line per package, and how many tests ran in all; return 1 if anything failed."""
    heading("alone: summary")
    for check in checks:
        counts = ", ".join(f"{number} {outcome}" for outcome, number in check.tests.items() if number)
        print(f"  {check.seconds:5.0f} s  {check.requirement:28} {counts}")
    failures = [f"FAILED: {check.requirement}: {check.failure}" for check in checks if check.failure]
    print("\n".join(failures) if failures else f"{len(checks)} installs, each alone: all is well")
    total = sum((check.tests for check in checks), Counter[str]())
    if total:
        print(f"alone: {total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped", flush=True)
    return 1 if failures else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="distributions to check (default: all)")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the empty environments")
    parser.add_argument("--without-tests", action="store_true", help="install, import and weigh only")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="packages at once (default: cores)")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="keep each package's JUnit XML there")
    return parser.parse_args()


def find_packages() -> list[Package]:
    found = []
    for project_file in sorted([*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("examples/*/pyproject.toml")]):
        project = tomllib.loads(project_file.read_text(encoding="utf-8"))["project"]
        found.append(Package(project_file.parent, project["name"], project["version"]))
    return found


def choose(packages: list[Package], names: list[str]) -> dict[str, Package]:
    """Map each requirement to check to the package whose wheel and tests it stands for."""
    chosen = {package.name: package for package in packages}
    if "openinfer" in chosen:
        chosen[SMALL_INSTALL] = chosen["openinfer"]
    unknown = set(names) - set(chosen)
    if unknown:
        sys.exit(f"alone: no such package: {', '.join(sorted(unknown))}; there are: {', '.join(chosen)}")
    return {name: package for name, package in chosen.items() if not names or name in names}


def build_wheels(packages: list[Package], folder: Path) -> Path:
    """Build every package (source archive first, then the wheel from it, as an index would get them).

    Returns the path of a constraints file that binds our names to these wheels: no index can supply one of them.
    """
    heading("building the wheels")
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        wheels = list(threads.map(lambda package: build_wheel(package, folder), packages))
    lines = []
    for package, wheel in zip(packages, wheels, strict=True):
        print(f"  {wheel.stat().st_size / 1e6:7.2f} MB  {wheel.name}", flush=True)
        lines.append(f"{package.name} @ {wheel.as_uri()}\n")
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(lines), encoding="utf-8")
    return constraints


def build_wheel(package: Package, folder: Path) -> Path:
    run(
        UV, "build", "--quiet", "--build-constraint", str(LOCK), "--out-dir", str(folder), str(package.folder), cwd=ROOT
    )
    return folder / f"{package.name.replace('-', '_')}-{package.version}-py3-none-any.whl"


def check_alone(check: Check, wheels: Path, log: IO[str], options: argparse.Namespace) -> None:
    """Take one requirement through the four steps of the module docstring; `wheels` is from `build_wheels`.

    Raises:
        Failure: a step failed; its output is in the log.
    """
    package = check.package
    python = make_environment(check.folder, options.python, log)
    install(python, wheels, log, check.requirement)
    installed = probe(python, package.name, log)
    write_sizes(installed, log)
    problems = broken_rules(check.requirement, package, installed)
    if problems:
        raise Failure("; ".join(problems))
    if options.without_tests or not check.has_tests:
        return
    if not any(package.tests.rglob("test_*.py")):
        raise Failure(f"no tests in {package.tests.relative_to(ROOT)}")
    install(python, wheels, log, check.requirement, "--group", f"{package.folder / 'pyproject.toml'}:test")
    run_tests(check, python, log, options)


def run_tests(check: Check, python: str, log: IO[str], options: argparse.Namespace) -> None:
    shutil.copytree(check.package.tests, check.folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "conftest.py", check.folder)
    for page in check.package.folder.glob("*.md"):  # what tests say of them
        shutil.copy(page, check.folder)
    results = check.folder / "results.xml"
    options_of_pytest = ["-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    options_of_pytest += ["--rootdir", str(check.folder), "-o", "junit_family=xunit1", f"--junitxml={results}"]
    try:
        run(python, "-I", "-m", "pytest", *options_of_pytest, "tests", cwd=check.folder, log=log)
    finally:
        if results.exists():
            check.tests = count_outcomes(results)
            if options.results:
                options.results.mkdir(parents=True, exist_ok=True)
                shutil.copy(results, options.results / f"{check.package.name}.xml")


def count_outcomes(results: Path) -> Counter[str]:
    suites = list(ET.parse(results).getroot().iter("testsuite"))
    counted = {key: sum(int(each.get(key, 0)) for each in suites) for key in ("tests", "failures", "errors", "skipped")}
    failed = counted["failures"] + counted["errors"]
    passed = counted["tests"] - failed - counted["skipped"]
    return Counter({"passed": passed, "failed": failed, "skipped": counted["skipped"]})


def make_environment(folder: Path, python: str, log: IO[str]) -> str:
    """Create an empty environment and return its interpreter."""
    run(UV, "venv", "--quiet", "--python", python, str(folder / "venv"), cwd=ROOT, log=log)
    on_windows = folder / "venv" / "Scripts" / "python.exe"
    return str(on_windows if on_windows.exists() else folder / "venv" / "bin" / "python")


def install(python: str, wheels: Path, log: IO[str], *arguments: str) -> None:
    bounds = ("--constraints", str(wheels), "--constraints", str(LOCK))  # third parties with their hashes
    command = (UV, "pip", "install", "--quiet", "--python", python, *bounds, *arguments)
    run(*command, cwd=ROOT, log=log)


def probe(python: str, name: str, log: IO[str]) -> Installed:
    """Import the package in its environment, load its entry points, and report what is installed there."""
    answer = run(python, "-I", str(PROBE), name, cwd=Path(python).parent, log=log, capture=True)
    return Installed(**json.loads(answer))


def broken_rules(requirement: str, package: Package, installed: Installed) -> list[str]:
    """Return, in words, each promise about a lean install that this environment breaks."""
    problems = []
    if heavy := NEVER_INSTALLED & installed.size_bytes.keys():
        problems.append(f"pulls in {', '.join(sorted(heavy))}")
    allowed = {package.name, BUILDS_ON.get(package.name)} if requirement == package.name else {"openinfer-qwen3"}
    if others := set(installed.families) - allowed:
        problems.append(f"pulls in the model families {', '.join(sorted(others))}")
    if requirement == SMALL_INSTALL and installed.beside_numpy_bytes >= SMALL_INSTALL_MAX_BYTES:
        problems.append(f"{installed.beside_numpy_bytes:,} bytes beside NumPy; {SMALL_INSTALL_MAX_BYTES:,} is too much")
    return problems


def write_sizes(installed: Installed, log: IO[str]) -> None:
    for name, size in sorted(installed.size_bytes.items(), key=lambda item: -item[1]):
        log.write(f"  {size / 1e6:7.2f} MB  {name}\n")
    log.write(f"  {installed.beside_numpy_bytes / 1e6:7.2f} MB  in all, beside NumPy\n")
    log.flush()


def heading(text: str) -> None:
    print(f"\n---- {text} ----", flush=True)


def run(*command: str, cwd: Path, log: IO[str] | None = None, capture: bool = False) -> str:
    """Run a command as if its environment were active and no other had ever been; return its output if captured."""
    environment = environment_of(Path(command[0]).parent)
    output = subprocess.PIPE if capture else log
    done = subprocess.run(command, cwd=cwd, env=environment, stdout=output, stderr=log, check=False)
    if done.returncode:
        raise Failure(f"exit code {done.returncode} from {' '.join(command)}")
    return (done.stdout or b"").decode()


def environment_of(bin_folder: Path) -> dict[str, str]:
    """Drop what hatch and an outer environment have set: no command of the checkout may be found by its name."""
    leaky = ("PYTHON", "VIRTUAL_ENV", "HATCH_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(leaky)}
    outside = [path for path in os.environ["PATH"].split(os.pathsep) if not Path(path).is_relative_to(ROOT)]
    return kept | {"PATH": os.pathsep.join([str(bin_folder), *outside])}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failure as failure:
        sys.exit(f"FAILED: {failure}")

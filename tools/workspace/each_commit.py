"""Check every commit of a range by itself, oldest first: that history can be bisected, and each step stands alone.

    ./run each-commit main~20..main                       # lint, format, types, layers, tests of the touched packages
    ./run each-commit main~20..main --without-tests       # the quick pass
    ./run each-commit main~20..main --stop                # ends at the first commit that fails

Commits are checked out one after the other in a worktree of their own, `.run/each-commit/tree`, by the `./run` of that
commit. Its environments are kept from commit to commit, and made anew where a commit changes what they are made from.
What passed is written to `.run/each-commit/results.jsonl` at once and not done again: interrupt it as you like, and
start it with the same range to go on. A step that failed is tried again; its output is kept beside that file.

Tests that a commit must pass: those of each package and example that it touches, and `tests/` where it touches
anything else, or a package's `pyproject.toml`. A commit that only touches the changelogs and pages of a package is
tested too: tests read them.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".run" / "each-commit"
TREE = FOLDER / "tree"
GATES = ("lint", "format-check", "types", "layers")
TESTS = "tests"
STEPS = (*GATES, TESTS)
MADE_FROM = ("hatch.toml", "run", "packages/*/pyproject.toml", "examples/*/pyproject.toml")
WIDTH = 12


@dataclass(frozen=True)
class Commit:
    """A commit of the range."""

    hash: str
    subject: str

    @property
    def touched(self) -> list[str]:
        return git("diff-tree", "--no-commit-id", "--name-only", "-r", "--root", self.hash).splitlines()


class Results:
    """The file of what passed: a JSON object per line, `{"commit", "step", "seconds"}`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: dict[tuple[str, str], float] = {}
        if path.exists():
            for line in path.read_text("utf-8").splitlines():
                each = json.loads(line)
                self._seconds[each["commit"], each["step"]] = each["seconds"]

    def seconds(self, commit: Commit, step: str) -> float | None:
        return self._seconds.get((commit.hash, step))

    def passed(self, commit: Commit, step: str, seconds: float) -> None:
        self._seconds[commit.hash, step] = seconds
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"commit": commit.hash, "step": step, "seconds": round(seconds, 1)}) + "\n")


def main() -> int:
    options = parse_arguments()
    FOLDER.mkdir(parents=True, exist_ok=True)
    results = Results(options.results)
    steps = GATES if options.without_tests else STEPS
    commits = commits_of(options.range)
    failed: list[str] = []
    print(f"{len(commits)} commits; what fails is kept in {FOLDER.relative_to(ROOT)}")
    print(f"{'commit':{WIDTH}}" + "".join(f"{step:>{WIDTH + 2}}" for step in steps) + "  subject", flush=True)
    for commit in commits:
        bad = check(commit, steps, results)
        failed += [f"{commit.hash[: WIDTH - 2]} {step}: {commit.subject}" for step in bad]
        if bad and options.stop:
            break
    print("\n".join(["", *[f"FAILED: {each}" for each in failed]]) if failed else "every commit passes", flush=True)
    return 1 if failed else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("range", metavar="RANGE", help="as `git rev-list` takes it: A..B, or one commit for it alone")
    parser.add_argument("--without-tests", action="store_true", help="lint, format, types and layers only")
    parser.add_argument("--stop", action="store_true", help="end at the first commit that fails")
    parser.add_argument(
        "--results", type=Path, default=FOLDER / "results.jsonl", help="what passed (default: %(default)s)"
    )
    return parser.parse_args()


def git(*arguments: str) -> str:
    return subprocess.run(("git", *arguments), cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def commits_of(revisions: str) -> list[Commit]:
    single = () if ".." in revisions else ("--no-walk",)
    listed = git("log", "--reverse", "--topo-order", "--no-merges", "--format=%H%x09%s", *single, revisions)
    return [Commit(*line.split("\t", maxsplit=1)) for line in listed.splitlines()]


def check(commit: Commit, steps: tuple[str, ...], results: Results) -> list[str]:
    """Run what this commit has not passed yet, print its line of the table, and return the steps that fail."""
    failed: list[str] = []
    print(f"{commit.hash[: WIDTH - 2]:{WIDTH}}", end="", flush=True)
    if any(results.seconds(commit, step) is None for step in steps):
        check_out(commit)
    for step in steps:
        seconds = results.seconds(commit, step)
        if seconds is None:
            began = time.monotonic()
            has_passed = run_step(commit, step)
            seconds = time.monotonic() - began
            if has_passed:
                results.passed(commit, step, seconds)
            else:
                failed.append(step)
        print(f"{'FAILED ' if step in failed else ''}{seconds:.0f} s".rjust(WIDTH + 2), end="", flush=True)
    print(f"  {commit.subject}", flush=True)
    return failed


def check_out(commit: Commit) -> None:
    if not (TREE / ".git").exists():
        shutil.rmtree(TREE, ignore_errors=True)
        git("worktree", "prune")
        git("worktree", "add", "--quiet", "--detach", str(TREE), commit.hash)
    git("-C", str(TREE), "checkout", "--quiet", "--force", "--detach", commit.hash)
    git("-C", str(TREE), "clean", "--quiet", "-d", "--force")  # what is ignored stays: the environments
    forget_stale_environments()


def forget_stale_environments() -> None:
    """An editable install keeps the entry points and requirements that it was made with."""
    digest = hashlib.blake2b()
    for pattern in MADE_FROM:
        for path in sorted(TREE.glob(pattern)):
            digest.update(f"{path.relative_to(TREE)}\0{path.read_text('utf-8')}\0".encode())
    made_from = TREE / ".run" / "made-from"
    if made_from.exists() and made_from.read_text("utf-8") == digest.hexdigest():
        return
    for name in ("default", "test", "checks"):
        shutil.rmtree(TREE / ".run" / name, ignore_errors=True)
    made_from.parent.mkdir(exist_ok=True)
    made_from.write_text(digest.hexdigest(), "utf-8")


def run_step(commit: Commit, step: str) -> bool:
    commands = list(commands_of(commit, step))
    log = FOLDER / f"{commit.hash[: WIDTH - 2]}.{step}.log"
    with log.open("wb") as output:
        codes = [
            subprocess.run(command, cwd=TREE, env=environment(), stdout=output, stderr=output, check=False).returncode
            for command in commands
        ]
    if any(codes):
        return False
    log.unlink()
    return True


def commands_of(commit: Commit, step: str) -> Iterator[tuple[str, ...]]:
    if step != TESTS:
        yield ("./run", step)
    elif folders := test_folders(commit):
        yield ("./run", "test", "-q", *folders)


def test_folders(commit: Commit) -> list[str]:
    touched: set[str] = set()
    for parts in (path.split("/") for path in commit.touched):
        is_in_package = parts[0] in {"packages", "examples"} and len(parts) > 2
        if is_in_package:
            touched.add(f"{parts[0]}/{parts[1]}/tests")
        if not is_in_package or parts[-1] == "pyproject.toml":
            touched.add("tests")
    return sorted(folder for folder in touched if (TREE / folder).is_dir())


def environment() -> dict[str, str]:
    """Drop what the hatch that runs this has set: the worktree's own `./run` sets it for itself."""
    leaky = ("HATCH_", "VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(leaky)}
    outside = [path for path in os.environ["PATH"].split(os.pathsep) if not Path(path).is_relative_to(ROOT)]
    return kept | {"PATH": os.pathsep.join(outside)}


if __name__ == "__main__":
    sys.exit(main())

"""Run the commands of the README and the docs as a reader would, and check those that take a GPU or hours.

    ./run page-commands [PAGE ...] [--check-only]

A fence that begins with three backticks and `sh` is run: all those of a page, in order, in one shell each, in the root
of the checkout, with an environment that has PATH, HOME and nothing else. In every other fence the commands of ours are
looked at alone: `./run NAME` must exist, and so must each flag of `./run install` and of `openinfer COMMAND`.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/**/*.md",
    "deploy/**/*.md",
    "packages/*/README.md",
    "examples/*/README.md",
)
OPENINFER = ROOT / ".run" / "openinfer" / "bin" / "openinfer"
TIMEOUT_S = 300
_FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_OF_RUN_ITSELF = {"openinfer", "demo"}


@dataclass(frozen=True)
class Block:
    """The text between two fences, and where it begins."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT) if self.page.is_relative_to(ROOT) else self.page}:{self.line}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("pages", nargs="*", type=Path, metavar="PAGE", help="default: every page of the checkout")
    parser.add_argument("--check-only", action="store_true", help="run nothing, check all")
    options = parser.parse_args()
    pages = options.pages or sorted({page for pattern in PAGES for page in ROOT.glob(pattern)})
    blocks = [block for page in pages for block in blocks_of(page.resolve())]
    problems = [] if options.check_only else [said for page in pages if (said := run_page(page.resolve(), blocks))]
    subprocess.run([ROOT / "run", "openinfer", "--version"], check=True)  # installs it where it is not
    problems += [problem for block in blocks for problem in wrong_commands(block)]
    print(f"page-commands: {len(blocks)} blocks of {len(pages)} pages, {len(problems)} problems")
    print("\n".join(f"FAILED: {problem}" for problem in problems))
    return 1 if problems else 0


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        yield Block(page, text.count("\n", 0, found.start()) + 1, found.group(1), found.group(2))


def run_page(page: Path, blocks: list[Block]) -> str | None:
    """Run the `sh` blocks of a page; return what went wrong, if anything did."""
    runnable = [block for block in blocks if block.page == page and block.language == "sh"]
    with tempfile.TemporaryDirectory(prefix="openinfer-home-") as home:
        environment = {"HOME": home, "PATH": os.environ.get("PAGE_COMMANDS_PATH", "/usr/local/bin:/usr/bin:/bin")}
        for block in runnable:
            print(f"\n---- {block.where} ----\n{block.text}", flush=True)
            began = time.monotonic()
            command = ["bash", "-euo", "pipefail", "-c", block.text]
            try:
                done = subprocess.run(
                    command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, timeout=TIMEOUT_S, check=False
                )
            except subprocess.TimeoutExpired:
                return f"{block.where}: not done after {TIMEOUT_S} s"
            if done.returncode:
                return f"{block.where}: exit code {done.returncode}"
            print(f"---- {time.monotonic() - began:.0f} s", flush=True)
    return None


def wrong_commands(block: Block) -> Iterator[str]:
    """Yield what is wrong with the commands of ours in a block, by their names and flags."""
    for words in commands_in(block):
        if words[0] == "./run" and len(words) > 1 and words[1] not in scripts() | _OF_RUN_ITSELF:
            yield f"{block.where}: there is no ./run {words[1]}"
        is_known, flags = known_flags(words)
        if not is_known:
            yield f"{block.where}: there is no openinfer {' '.join(words[1:3])}"
        given = {word.partition("=")[0] for word in words if word.startswith("--") and word != "--"}
        if flags is not None and (wrong := given - flags):
            yield f"{block.where}: {' '.join(words[:3])} has no {', '.join(sorted(wrong))}"


def commands_in(block: Block) -> Iterator[list[str]]:
    """Yield the words of each command that begins with `./run`, `openinfer` or `install.py`."""
    for line in block.text.replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # no line of a shell
            continue
        while words and re.fullmatch(r"\w+=\S*|\$|python3", words[0]):
            words = words[1:]
        if words and words[0] == "./run" and words[1:2] == ["openinfer"]:
            words = words[1:]
        if words and (words[0] in {"./run", "openinfer"} or words[0].endswith(("install.py", "bin/openinfer"))):
            end = next((index for index, word in enumerate(words) if word in {"|", "&&", ";", "&", ">"}), len(words))
            yield ["openinfer" if words[0].endswith("bin/openinfer") else words[0], *words[1:end]]


def known_flags(words: list[str]) -> tuple[bool, set[str] | None]:
    """Say whether there is such a command, and which flags it has; None where they are another tool's."""
    if words[0] == "openinfer":
        if len(words) == 1 or words[1].startswith("-"):
            return True, {"--version", "--help"}
        has_parts = words[1] in {"bench", "kernels", "ray"} or words[1:3] in (
            ["simulate", "fit"],
            ["simulate", "replay"],
        )
        command = words[1:3] if has_parts and len(words) > 2 else words[1:2]
        if command[0].isupper() or command[-1].isupper() or command[-1] == "...":
            return True, None
        return flags_of_openinfer(tuple(command))
    if words[0].endswith("install.py") or words[1:2] == ["install"]:
        return True, flags_in(help_of(sys.executable, str(ROOT / "tools" / "workspace" / "install.py"), "--help"))
    return True, None


@cache
def flags_of_openinfer(command: tuple[str, ...]) -> tuple[bool, set[str] | None]:
    takes_model = command in {("dynamo",), ("serve",), ("generate",), ("plan",), ("ray", "serve")}
    text = help_of(str(OPENINFER), *command, *(["--model", "tiny"] if takes_model else []), "--help")
    return (False, None) if text is None else (True, flags_in(text))


@cache
def help_of(*command: str) -> str | None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"COLUMNS": "200"})
    return done.stdout if done.returncode == 0 else None


def flags_in(text: str | None) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text or ""))


@cache
def scripts() -> set[str]:
    table = tomllib.loads((ROOT / "hatch.toml").read_text(encoding="utf-8"))
    return set(table["envs"]["default"]["scripts"])


if __name__ == "__main__":
    sys.exit(main())

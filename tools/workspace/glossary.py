"""Find words that were given up for the field's terms: `glossary.toml` has them, what to say instead, and exceptions.

./run words             # each use, with the term to use; fails if there is one
./run words --report    # the same, but never fails
./run words --count     # only how often each is used
"""

import argparse
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True)
class Word:
    """A retired word: the pattern that finds it, where it is wrong, and what to say instead."""

    pattern: re.Pattern[str]
    says: str
    paths: tuple[str, ...]


@dataclass(frozen=True)
class Allowed:
    """A use that may stay, and why."""

    path: str
    pattern: re.Pattern[str]
    reason: str


@dataclass(frozen=True)
class Finding:
    """One use of a retired word."""

    path: str
    line_number: int
    word: str
    says: str


@dataclass(frozen=True)
class Glossary:
    """The table of `glossary.toml`."""

    words: tuple[Word, ...]
    allowed: tuple[Allowed, ...]
    scanned: tuple[str, ...]
    skipped: tuple[str, ...]

    @classmethod
    def load(cls, table: Path = TABLE) -> "Glossary":
        content = tomllib.loads(table.read_text("utf-8"))
        return cls(
            words=tuple(
                Word(re.compile(each["pattern"]), each["say"], tuple(each.get("in", ("**",))))
                for each in content["word"]
            ),
            allowed=tuple(
                Allowed(each["path"], re.compile(each["pattern"]), each["reason"])
                for each in content.get("allowed", ())
            ),
            scanned=tuple(content["scanned"]),
            skipped=tuple(content["skipped"]),
        )

    def findings(self, root: Path) -> Iterator[Finding]:
        """Every use below `root` that no exception covers, paths in order."""
        for path in text_files(root):
            if matches(path, self.scanned) and not matches(path, self.skipped):
                yield from self._findings_of_file(root, path)

    def _findings_of_file(self, root: Path, path: str) -> Iterator[Finding]:
        words = [word for word in self.words if matches(path, word.paths)]
        allowed = [each for each in self.allowed if matches(path, (each.path,))]
        try:
            text = (root / path).read_text("utf-8")
        except (UnicodeDecodeError, FileNotFoundError):  # an image; a file deleted and not committed
            return
        lines = text.split("\n")
        for number, line in enumerate([path, *lines]):  # 0 is the path itself: a file's name counts
            if any(each.pattern.search(line) for each in allowed):
                continue
            for word in words:
                for match in word.pattern.finditer(line):
                    yield Finding(path, number, match[0], word.says)


def main() -> int:
    options = parse_arguments()
    found = list(Glossary.load().findings(ROOT))
    if options.count:
        for (word, says), count in Counter((each.word.lower(), each.says) for each in found).most_common():
            print(f"{count:5}  {word:28} -> {says}")
    else:
        for each in found:
            print(f"{each.path}:{each.line_number}: {each.word!r}: {each.says}")
    print(f"{len(found)} uses of retired words" if found else "no retired word is used", flush=True)
    return 1 if found and not options.report else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--report", action="store_true", help="print what there is and end with 0 all the same")
    parser.add_argument("--count", action="store_true", help="only how often each word is used")
    return parser.parse_args()


def text_files(root: Path) -> list[str]:
    """What git tracks or would track; where `root` is no checkout, every file."""
    if not (root / ".git").exists():
        return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    listed = subprocess.run(
        ("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"),
        cwd=root,
        check=True,
        capture_output=True,
    )
    return sorted(set(listed.stdout.decode().split("\0")) - {""})


def matches(path: str, globs: tuple[str, ...]) -> bool:
    """Whether a glob fits; `**` and `*` both pass `/`, and `**/` may be nothing."""
    return any(fnmatchcase(path, glob) or fnmatchcase(path, glob.replace("**/", "")) for glob in globs)


if __name__ == "__main__":
    sys.exit(main())

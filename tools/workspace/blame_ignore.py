"""Write `.git-blame-ignore-revs`: the commits that only move or rename, which `git blame` then looks through.

    ./run blame-ignore                                            # after the last of them is on main
    git config blame.ignoreRevsFile .git-blame-ignore-revs        # once per clone

A commit is one of them if its subject says "move:" or "rename:".
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / ".git-blame-ignore-revs"
HEAD = "# Commits that move or rename and change nothing else; written by ./run blame-ignore.\n"
SAYS_SO = re.compile(r"\b(move|rename):")


def main() -> int:
    command = ("git", "log", "--reverse", "--no-merges", "--format=%H%x09%s")
    listed = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    commits = [line.split("\t", maxsplit=1) for line in listed.splitlines()]
    chosen = [(commit, subject) for commit, subject in commits if SAYS_SO.search(subject)]
    TARGET.write_text(HEAD + "".join(f"\n# {subject}\n{commit}\n" for commit, subject in chosen), "utf-8")
    print(f"{len(chosen)} commits in {TARGET.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

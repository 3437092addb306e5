"""Build the wheels of all packages, and a constraints file that binds our names to them.

    ./run wheels [--out dist]

Each is built as an index would get it: the source archive first, then the wheel from that.
"""

import argparse
import sys
from pathlib import Path

import alone


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, default=alone.ROOT / "dist", metavar="FOLDER", help="default: dist")
    folder: Path = parser.parse_args().out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    packages = [package for package in alone.find_packages() if package.folder.parent.name == "packages"]
    constraints = alone.build_wheels(packages, folder)
    print(f"{len(packages)} wheels in {folder}; install them with --constraint {constraints}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except alone.Failure as failure:
        sys.exit(f"FAILED: {failure}")

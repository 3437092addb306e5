"""Build the wheels of all packages into a folder that installs them, here or on a machine without a checkout.

    ./run wheels [--out dist]
    python3 dist/install.py --into ~/openinfer [--cuda13] ...      # there: Python 3.11 and an index for third parties

Each is built as an index would get it: the source archive first, then the wheel from that, and its SBOM beside it.
`SHA256SUMS` has them all.
"""

import argparse
import hashlib
import shutil
import sys
from pathlib import Path

import alone
import lock
import sbom
import third_party

INSTALLER = Path(__file__).with_name("install.py")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, default=alone.ROOT / "dist", metavar="FOLDER", help="default: dist")
    folder: Path = parser.parse_args().out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    packages = [package for package in alone.find_packages() if package.folder.parent.name == "packages"]
    alone.build_wheels(packages, folder)
    sbom.write_sboms(folder)
    shutil.copy(INSTALLER, folder)
    shutil.copytree(lock.LOCKS, folder / lock.LOCKS.name, dirs_exist_ok=True)
    write_sums(folder)
    print(f"{len(packages)} wheels in {folder}; install them, here or elsewhere, with")
    print(f"  python3 {folder / INSTALLER.name} --into FOLDER [--cuda13] ...")
    return 0


def write_sums(folder: Path) -> None:
    """Write what `sha256sum --check SHA256SUMS` checks."""
    patterns = ("*.whl", "*.cdx.json", "*.tar.gz", "*.py", "locks/*.txt")
    files = sorted(file for pattern in patterns for file in folder.glob(pattern))
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.relative_to(folder)}\n" for file in files]
    (folder / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (alone.Failure, third_party.Failure) as failure:
        sys.exit(f"FAILED: {failure}")

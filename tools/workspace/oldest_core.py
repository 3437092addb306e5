"""Install and test each package alone, as `alone.py` does, with the oldest openinfer-core that the packages allow.

    ./run oldest-core [NAME ...] [--ref COMMIT] [--without-tests]

The oldest core is built from the tag `openinfer-core-VERSION` of the lowest release within the bounds by which the
packages of this checkout require core; `--ref` names another commit. Without such a tag there is no older core than
this checkout's, which `./run alone` has: nothing is done. `docs/reference/public-api.md` has the matrix.
"""

import argparse
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

import alone

CORE = "openinfer-core"
TAG = f"{CORE}-"


def main() -> int:
    options = parse_arguments()
    ref = options.ref or oldest_tag(tags(alone.ROOT), lowest_allowed(alone.ROOT))
    if ref is None:
        bound = ".".join(map(str, lowest_allowed(alone.ROOT)))
        print(
            f"oldest-core: no tag {TAG}VERSION from {bound} on: no release is older than this checkout; see ./run alone"
        )
        return 0
    packages = alone.find_packages()
    with tempfile.TemporaryDirectory(prefix="openinfer-oldest-core-") as scratch:
        chosen = {name: each for name, each in alone.choose(packages, options.names).items() if name != CORE}
        checks = [alone.Check(name, package, Path(scratch) / name) for name, package in chosen.items()]
        wheels = alone.build_wheels(with_core_of(packages, ref, Path(scratch) / "core"), Path(scratch) / "wheels")
        alone.heading(f"with {CORE} of {ref}")
        alone.run_all(checks, wheels, options)
    return alone.summarise(checks)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="distributions to check (default: all but core)")
    parser.add_argument("--ref", metavar="COMMIT", help="the core of this commit or tag")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the empty environments")
    parser.add_argument("--without-tests", action="store_true", help="install, import and weigh only")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="packages at once (default: cores)")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="keep each package's JUnit XML there")
    return parser.parse_args()


def lowest_allowed(root: Path) -> tuple[int, ...]:
    """Return the lower bound by which packages require core: the highest of them, which all can be tested with."""
    bounds: set[tuple[int, ...]] = set()
    for project_file in root.glob("packages/*/pyproject.toml"):
        for line in tomllib.loads(project_file.read_text(encoding="utf-8"))["project"].get("dependencies", []):
            if line.startswith(f"{CORE}>="):
                bounds.add(release_of(line.removeprefix(f"{CORE}>=").partition(",")[0]))
    return max(bounds)


def oldest_tag(names: list[str], bound: tuple[int, ...]) -> str | None:
    """Return the tag of the lowest release of core that is not below a bound; None without one."""
    within = [(release_of(name.removeprefix(TAG)), name) for name in names if name.startswith(TAG)]
    return min((each for each in within if each[0] >= bound), default=(None, None))[1]


def release_of(version: str) -> tuple[int, ...]:
    numbers = tuple(int(each) for each in version.split("."))
    return (*numbers, 0, 0)[:3]


def tags(root: Path) -> list[str]:
    done = subprocess.run(["git", "-C", root, "tag", "--list", f"{TAG}*"], capture_output=True, text=True, check=True)
    return done.stdout.split()


def with_core_of(packages: list[alone.Package], ref: str, folder: Path) -> list[alone.Package]:
    """Return the packages with the core of another commit, unpacked into a folder."""
    source = f"packages/{CORE}"
    archive = subprocess.run(["git", "-C", alone.ROOT, "archive", ref, source], capture_output=True, check=False)
    if archive.returncode:
        raise alone.Failure(f"no {CORE} at {ref}: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as file:
        file.extractall(folder, filter="data")
    project = tomllib.loads((folder / source / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    core = alone.Package(folder / source, project["name"], project["version"])
    return [core if package.name == CORE else package for package in packages]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except alone.Failure as failure:
        sys.exit(f"FAILED: {failure}")

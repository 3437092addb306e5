"""Our packages as an installer would leave them, straight from this checkout: for a machine that has neither network
nor a build backend.

Entry points are read from installed metadata, so each package gets a folder `NAME-VERSION.dist-info` made from its
`pyproject.toml`, beside which its `src` is put on the path. Wheels carried in `.whl/` are installed there too, where
what they bring is missing.
"""

import glob
import importlib.util
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def environment(root: Path = ROOT) -> dict[str, str]:
    """The variables of a process that finds every package of a checkout, by default of this one."""
    given = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    return os.environ | {"PYTHONPATH": os.pathsep.join([*folders(root), *given])}


def folders(root: Path = ROOT) -> list[str]:
    """What has to be on the path of a process that finds every package of a checkout; wheels are this one's."""
    site = Path(tempfile.mkdtemp(prefix="openinfer-site-"))
    wheels = glob.glob(str(ROOT / ".whl" / "*.whl"))
    if wheels and importlib.util.find_spec("msgspec") is None:
        options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--target", str(site)]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *wheels], check=True)
    sources = []
    for file in sorted([*root.glob("packages/*/pyproject.toml"), *root.glob("examples/*/pyproject.toml")]):
        _write_metadata(site, tomllib.loads(file.read_text(encoding="utf-8"))["project"])
        sources.append(str(file.parent / "src"))
    return [*sources, str(site)]


def _write_metadata(site: Path, project: dict) -> None:
    folder = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    folder.mkdir()
    header = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (folder / "METADATA").write_text(header, encoding="utf-8")
    lines = [
        line
        for group, entries in project.get("entry-points", {}).items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()))
    ]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")

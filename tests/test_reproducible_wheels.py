"""A package built twice, by other people in other folders, is the same to the last byte."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import uv

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "tools" / "workspace" / "locks" / "workspace.txt"
UMASKS = (0o022, 0o077)
EPOCHS_S = (1_500_000_000, 1_600_000_000)  # when the files were written


def build(package: str, folder: Path, *, umask: int, written_s: int, epoch: str) -> dict[str, str]:
    """Copy a package and build it; return the digest of each archive."""
    source = folder / "somewhere" / package
    shutil.copytree(ROOT / "packages" / package, source, ignore=shutil.ignore_patterns("__pycache__", "tests"))
    for path in source.rglob("*"):
        path.chmod(path.stat().st_mode & ~umask)
        os.utime(path, (written_s, written_s))
    command = [
        uv.find_uv_bin(),
        "build",
        "--quiet",
        "--build-constraint",
        str(LOCK),
        "--out-dir",
        str(folder),
        str(source),
    ]
    subprocess.run(command, check=True, umask=umask, env=os.environ | {"SOURCE_DATE_EPOCH": epoch})
    archives = [path for path in folder.iterdir() if path.name.endswith((".whl", ".tar.gz"))]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in archives}


@pytest.mark.parametrize("package", ["openinfer-kernels", "openinfer-server"])
def test_two_builds_are_byte_equal(package: str, tmp_path: Path) -> None:
    first, second = (
        build(package, tmp_path / str(umask), umask=umask, written_s=written_s, epoch="1700000000")
        for umask, written_s in zip(UMASKS, EPOCHS_S, strict=True)
    )
    assert len(first) == 2
    assert first == second


def test_date_of_the_release_is_in_the_archives(tmp_path: Path) -> None:
    builds = [
        build("openinfer-tiny-model", tmp_path / epoch, umask=0o022, written_s=EPOCHS_S[0], epoch=epoch)
        for epoch in ("1700000000", "1700086400")
    ]
    assert builds[0].keys() == builds[1].keys()
    assert set(builds[0].values()).isdisjoint(builds[1].values())

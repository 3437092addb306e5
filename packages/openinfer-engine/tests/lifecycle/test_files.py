"""Where weights of an update come from: folders below a root, and files that are copied."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from openinfer_core import InvalidCheckpoint, Refused
from openinfer_engine.lifecycle.folders import file_below, folder_below, identity_of
from openinfer_engine.lifecycle.memory import give_back
from openinfer_engine.weights.copied_file import CopiedSafetensorsFile


def write(path: Path, *, values: int = 4) -> Path:
    array = np.arange(values, dtype=np.float32)
    header = json.dumps({"x": {"dtype": "F32", "shape": [values], "data_offsets": [0, array.nbytes]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + array.tobytes())
    return path


def test_file_is_read_by_copies(tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors")
    file = CopiedSafetensorsFile.open(path)
    first = file.read("x")
    assert first.tolist() == [0, 1, 2, 3]
    first[0] = 9
    assert file.read("x").tolist() == [0, 1, 2, 3]
    file.close()
    file.close()
    with pytest.raises(InvalidCheckpoint, match="cannot be read"):
        file.read("x")


def test_file_that_is_cut_off_is_an_error_and_no_signal(tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", values=100_000)
    file = CopiedSafetensorsFile.open(path)
    os.truncate(path, 5000)
    with pytest.raises(InvalidCheckpoint, match="cut off while it was read"):
        file.read("x")
    with pytest.raises(InvalidCheckpoint, match="written to while it was read"):
        file.check_unwritten()
    file.close()


def test_file_that_is_written_to_is_found_out_and_one_that_is_removed_is_not_missed(tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors")
    os.utime(path, ns=(1, 1))
    file = CopiedSafetensorsFile.open(path)
    moved = path.rename(tmp_path / "moved")
    file.check_unwritten()
    with moved.open("r+b") as writing:
        writing.seek(-1, os.SEEK_END)
        writing.write(b"1")
    with pytest.raises(InvalidCheckpoint, match="written to while it was read"):
        file.check_unwritten()
    file.close()


@pytest.mark.parametrize("data", [b"", b"1234567", b"\xff" * 9, (1 << 20).to_bytes(8, "little") + b"{}"])
def test_file_that_is_none_is_refused_and_closed(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(InvalidCheckpoint):
        CopiedSafetensorsFile.open(path)


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory has names in /dev/shm on Linux")
def test_link_in_the_place_of_shared_memory_is_refused(tmp_path: Path) -> None:
    link = Path("/dev/shm", f"openinfer-test-{os.getpid()}")
    link.symlink_to(write(tmp_path / "model.safetensors"))
    try:
        with pytest.raises(InvalidCheckpoint, match="cannot be opened"):
            CopiedSafetensorsFile.open_segment(link.name)
    finally:
        link.unlink()


def test_folders_lie_below_the_root_links_resolved(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "inner").mkdir(parents=True)
    outside.mkdir()
    (root / "out").symlink_to(outside)
    (root / "in").symlink_to(root / "inner")
    (tmp_path / "alias").symlink_to(root)
    for name in ("inner", "in", str(root / "inner"), str(tmp_path / "alias" / "inner"), "inner/../in"):
        assert folder_below(str(tmp_path / "alias"), name) == (root / "inner").resolve()
    assert folder_below(str(root), ".") == root.resolve()
    for name in ("out", "..", "../outside", str(outside), "/", str(tmp_path / "root2")):
        with pytest.raises(Refused, match=r"not below|cannot be found"):
            folder_below(str(root), name)
    write(root / "file")
    with pytest.raises(Refused, match="no folder"):
        folder_below(str(root), "file")
    with pytest.raises(Refused, match="started without one"):
        folder_below(None, "inner")


def test_root_of_another_name_that_begins_alike_is_outside(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root-2").mkdir()
    with pytest.raises(Refused, match="not below"):
        folder_below(str(tmp_path / "root"), "../root-2")
    path = write(tmp_path / "root-2" / "x")
    with pytest.raises(Refused, match="leads out"):
        file_below(str(tmp_path / "root"), path)
    assert file_below(None, path) is path


def test_identity_of_a_folder_follows_its_weights(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors")
    before = identity_of(tmp_path)
    (tmp_path / "notes.txt").write_text("nothing")
    assert identity_of(tmp_path) == before
    other = write(tmp_path / "other")
    os.replace(other, tmp_path / "model.safetensors")
    assert identity_of(tmp_path) != before


@pytest.mark.skipif(sys.platform != "linux", reason="pages are given back on Linux")
@pytest.mark.parametrize("size", [1, 100, 4096, 5000, 100_000, 5_000_000])
def test_memory_that_was_given_back_is_zero_and_nothing_next_to_it_is_touched(size: int) -> None:
    memory = np.ones(size + 200, np.float32)
    inner = memory[100:-100]
    give_back(inner)
    assert not inner.any()
    assert memory[:100].all()
    assert memory[-100:].all()
    inner[:] = 2
    assert inner.sum() == 2 * size

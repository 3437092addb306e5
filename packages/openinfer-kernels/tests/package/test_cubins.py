"""Keys, cache and compilers of CUDA sources; compiling all of them is slow and done once, by the compiler at hand."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from openinfer_kernels import KernelBuildError
from openinfer_kernels.cubins import (
    ARCHITECTURES,
    Nvcc,
    Nvrtc,
    Source,
    architecture_of,
    build_cubins,
    cache_dir,
    find_compiler,
    require_cubins,
    sources,
)


class Recorder:
    """A compiler whose cubins are the source's name; it refuses the stem `broken`."""

    name = "recorder"

    def __init__(self) -> None:
        self.compiled: list[tuple[str, str]] = []

    def compile(self, source: Source, architecture: str) -> bytes:
        self.compiled.append((source.stem, architecture))
        if source.stem == "broken":
            raise KernelBuildError("recorder failed on broken.cu")
        return source.stem.encode()


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("OPENINFER_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cubins"


def source(folder: Path, stem: str, text: str = "") -> Source:
    path = folder / f"{stem}.cu"
    path.write_text(text)
    return Source(path)


def test_architecture_of_hopper_has_its_own_instructions():
    assert [architecture_of(8, 6), architecture_of(9, 0), architecture_of(12, 0)] == ["sm_86", "sm_90a", "sm_120"]


def test_sources_that_need_hopper_are_for_hopper_alone(tmp_path):
    needy = source(tmp_path, "needy", '#include "vectors.cuh"\n#include "hopper.cuh"\n')
    plain = source(tmp_path, "plain", '#include "vectors.cuh"\n')
    assert [needy.is_for(each) for each in ARCHITECTURES] == [each == "sm_90a" for each in ARCHITECTURES]
    assert all(plain.is_for(each) for each in ARCHITECTURES)
    assert {each.stem for each in sources("sm_80")} < {each.stem for each in sources("sm_90a")}


def test_cubin_name_changes_with_text_and_architecture_alone(tmp_path):
    one = source(tmp_path, "one", "a")
    name = one.cubin_name("sm_80")
    assert name.startswith("one.sm_80.")
    assert name.endswith(".cubin")
    assert one.cubin_name("sm_86").split(".")[2] != name.split(".")[2]
    os.utime(one.path, (0, 0))
    assert one.cubin_name("sm_80") == name
    assert source(tmp_path, "one", "b").cubin_name("sm_80") != name


def test_cache_dir_is_where_the_environment_says(monkeypatch):
    monkeypatch.setenv("OPENINFER_CACHE_DIR", "/somewhere")
    assert cache_dir() == Path("/somewhere")
    monkeypatch.delenv("OPENINFER_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/users/cache")
    assert cache_dir() == Path("/users/cache/openinfer")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "openinfer"


def test_require_cubins_compiles_once_and_only_what_is_missing(cache, capsys):
    compiler = Recorder()
    found = require_cubins("sm_90a", compiler=lambda: compiler)
    stems = {each.stem for each in sources("sm_90a")}
    assert {stem: path.read_text() for stem, path in found.items()} == {stem: stem for stem in stems}
    assert {path.parent for path in found.values()} == {cache}
    assert sorted(compiler.compiled) == sorted((stem, "sm_90a") for stem in stems)
    assert f"{len(stems)}/{len(stems)}" in capsys.readouterr().err

    def never() -> Recorder:
        raise AssertionError("nothing is missing")

    assert require_cubins("sm_90a", compiler=never) == found
    assert capsys.readouterr().err == ""
    found["norm"].unlink()
    require_cubins("sm_90a", compiler=lambda: compiler)
    assert compiler.compiled[len(stems) :] == [("norm", "sm_90a")]


def test_build_cubins_refused_source_raises_and_leaves_no_part_of_it(tmp_path, capsys):
    given = [source(tmp_path, stem) for stem in ("good", "broken")]
    with pytest.raises(KernelBuildError, match=r"broken\.cu"):
        build_cubins(given, "sm_80", target=tmp_path / "out", compiler=Recorder())
    assert [path.name.split(".")[0] for path in (tmp_path / "out").iterdir()] == ["good"]
    assert "compiling CUDA kernels for sm_80 (recorder)" in capsys.readouterr().err


@pytest.mark.parametrize("compiler", [Nvcc, Nvrtc])
def test_compiler_makes_a_cubin_or_says_what_it_refuses(tmp_path, compiler):
    found = compiler.find()
    if found is None:
        pytest.skip(f"{compiler.__name__} is not on this machine")
    text = '#include <cstdint>\n#include "vectors.cuh"\nextern "C" __global__ void twice(bf16* x) { x[0] += x[0]; }\n'
    shutil.copy(sources("sm_80")[0].path.with_name("vectors.cuh"), tmp_path)
    assert found.compile(source(tmp_path, "good", text), "sm_80").startswith(b"\x7fELF")
    with pytest.raises(KernelBuildError, match=r"failed on bad\.cu for sm_80:(.|\n)*undefined_thing"):
        found.compile(source(tmp_path, "bad", "__global__ void f() { undefined_thing(); }"), "sm_80")


def test_without_any_compiler_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(Nvcc, "find", classmethod(lambda cls: None))
    monkeypatch.setattr(Nvrtc, "find", classmethod(lambda cls: None))
    with pytest.raises(KernelBuildError, match=r"openinfer-kernels\[cuda13\]"):
        find_compiler()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_source_compiles_for_every_architecture(architecture):
    """Into the user's own cache, as a start-up does: only what changed is compiled again."""
    if Nvcc.find() is None and Nvrtc.find() is None:
        pytest.skip("no compiler of CUDA sources on this machine: neither nvcc nor NVRTC")
    cubins = require_cubins(architecture)
    assert set(cubins) == {each.stem for each in sources(architecture)}
    assert all(path.read_bytes().startswith(b"\x7fELF") for path in cubins.values())


def test_every_source_compiles_with_nvrtc(monkeypatch):
    """The compiler of all who have no toolkit; it takes less than nvcc, and the fastest GPU has all sources."""
    if Nvrtc.find() is None:
        pytest.skip("NVRTC is not on this machine")
    if Nvcc.find() is not None:  # whose cubins the user's own cache has; without it, they are NVRTC's already
        monkeypatch.setenv("OPENINFER_CACHE_DIR", str(cache_dir() / "nvrtc"))
    cubins = require_cubins("sm_90a", compiler=Nvrtc)
    assert set(cubins) == {each.stem for each in sources("sm_90a")}


def test_command_compiles_into_the_folder_asked_for(tmp_path):
    if Nvcc.find() is not None:
        pytest.skip("compiling everything is another test's")
    command = [sys.executable, "-m", "openinfer_kernels.cubins", "--out", str(tmp_path), "--compiler", "nvcc"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "nvcc is not on this machine\n"

"""Keys, cache and compilers of CUDA sources; compiling all of them is slow and done once, by the compiler at hand."""

import fcntl
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
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
from openinfer_kernels.cubins.__main__ import main

HOPPERS = {
    "adapted_decode_gemm",
    "adapted_gemm",
    "adapted_gemm_one_tile",
    "adapted_heads",
    "adapted_heads_fp8",
    "adapted_norm",
    "adapted_swiglu",
    "attention_decode_hopper",
    "attention_decode_hopper_fp8",
    "attention_decode_hopper_variant",
    "attention_prefill_hopper",
    "attention_prefill_hopper_fp8",
    "attention_prefill_hopper_variant",
    "decode_gemm",
    "decode_gemm_beside_adapters",
    "gemm",
    "gemm_beside_adapters",
    "grouped_gemm_hopper",
    "latent_prefill_hopper",
    "lowbit_experts_fp4",
    "lowbit_experts_fp8",
    "lowbit_experts_int4",
    "lowbit_gemm_fp4",
    "lowbit_gemm_fp8",
    "lowbit_gemm_fp8_head",
    "lowbit_gemm_int4",
    "lowbit_gemm_int4_min",
    "lowbit_gemm_int8",
    "lowbit_gemm_nvfp4",
    "prompt_gemm",
    "prompt_shrink",
    "shrink_halves",
}
"""Stems of the sources that use Hopper's own instructions."""


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
    """A source with the headers of the package."""
    path = folder / f"{stem}.cu"
    path.write_text(text)
    return Source(path)


@pytest.fixture
def tree(tmp_path) -> dict[str, Source]:
    """Three sources: `needy` reads `hopper.cuh` through `b/wide.cuh`, `plain` reads `a/one.cuh`, `alone` nothing."""
    texts = {
        "a/one.cuh": "#include <cstdint>\n",
        "b/wide.cuh": '#pragma once\n  #  include "a/one.cuh"\n#include "common/hopper.cuh"\n',
        "common/hopper.cuh": '// see #include "nowhere.cuh"\n#include "b/wide.cuh"\n',
        "a/plain.cu": '#include "a/one.cuh"\n',
        "b/needy.cu": '#include "b/wide.cuh"\n',
        "alone.cu": "#include <cuda_bf16.h>\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return {path.stem: Source(path, tmp_path) for path in tmp_path.rglob("*.cu")}


def test_architecture_of_hopper_has_its_own_instructions():
    assert [architecture_of(8, 6), architecture_of(9, 0), architecture_of(12, 0)] == ["sm_86", "sm_90a", "sm_120"]


def test_headers_are_those_that_are_read_directly_or_through_others(tree):
    assert list(tree["needy"].headers()) == ["a/one.cuh", "b/wide.cuh", "common/hopper.cuh"]
    assert list(tree["plain"].headers()) == ["a/one.cuh"]
    assert tree["alone"].headers() == {}


def test_missing_header_is_named_with_who_includes_it(tree):
    tree["plain"].path.write_text('#include "a/other.cuh"\n')
    with pytest.raises(KernelBuildError, match=r"plain\.cu includes a/other\.cuh"):
        tree["plain"].headers()


def test_changed_header_changes_the_keys_of_the_sources_that_read_it_alone(tree):
    def moved(header: str) -> set[str]:
        before = {stem: each.cubin_key("sm_90a") for stem, each in tree.items()}
        path = tree["alone"].root / header
        path.write_text(path.read_text() + "\n")
        return {stem for stem, each in tree.items() if each.cubin_key("sm_90a") != before[stem]}

    assert moved("a/one.cuh") == {"needy", "plain"}
    assert moved("common/hopper.cuh") == {"needy"}


def test_sources_that_read_hoppers_header_are_for_hopper_alone(tree):
    needy = [tree["needy"].is_for(each) for each in ARCHITECTURES]
    assert needy == [each == "sm_90a" for each in ARCHITECTURES]
    assert all(tree["plain"].is_for(each) for each in ARCHITECTURES)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_has_all_sources_but_hoppers(architecture):
    stems = [each.stem for each in sources("sm_90a")]
    assert len(stems) == len(set(stems))
    hoppers = set() if architecture == "sm_90a" else HOPPERS
    assert {each.stem for each in sources(architecture)} == set(stems) - hoppers


def test_headers_are_those_that_a_preprocessor_reads():
    """As `nvcc -MM` has the host's compiler list them, but for CUDA's own headers: reading those took 40 s."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not on this machine")
    preprocess = ["g++", "-MM", "-MG", "-x", "c++", "-std=c++17", "-D__CUDACC__"]  # -MG: CUDA's headers may be missing

    for each in sources("sm_90a"):
        command = [*preprocess, "-I", str(each.root), str(each.path)]
        rule = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        theirs = {Path(name).resolve() for name in rule.replace("\\\n", " ").split()[1:]}
        ours = {path for path in theirs if each.root in path.parents}
        headers = set(each.headers().values())
        assert each.path in ours, each.stem
        assert ours - {each.path} <= headers, each.stem
        # A header that a template takes under a condition counts for every source of the template.
        assert {path.stem for path in headers - ours} <= {"attention_prefill_staging"}, each.stem


def test_key_of_a_cubin_changes_with_text_and_architecture_alone(tmp_path):
    one = source(tmp_path, "one", "a")
    key = one.cubin_key("sm_80")
    assert key.startswith("one.sm_80.")
    assert one.cubin_key("sm_86").split(".")[2] != key.split(".")[2]
    os.utime(one.path, (0, 0))
    assert one.cubin_key("sm_80") == key
    assert source(tmp_path, "one", "b").cubin_key("sm_80") != key


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


def test_of_two_that_start_at_once_one_compiles(cache, monkeypatch):
    """The second one comes while the first compiles; each has a lock of its own, as two processes have."""
    begun, second_came, go_on = threading.Event(), threading.Event(), threading.Event()
    flock = fcntl.flock

    class Slow(Recorder):
        def compile(self, source: Source, architecture: str) -> bytes:
            begun.set()
            assert go_on.wait(60)
            return super().compile(source, architecture)

    def watched(descriptor: int, operation: int) -> None:
        if begun.is_set():
            second_came.set()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", watched)
    compiler, others = Slow(), Recorder()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(require_cubins, "sm_90a", compiler=lambda: compiler)
        assert begun.wait(60)
        second = threads.submit(require_cubins, "sm_90a", compiler=lambda: others)
        came = second_came.wait(60)
        go_on.set()
        assert came
        assert second.result() == first.result()
    assert len(compiler.compiled) == len(sources("sm_90a"))
    assert not others.compiled


def test_cached_cubin_that_was_spoilt_is_compiled_again(cache, caplog):
    compiler = Recorder()
    found = require_cubins("sm_90a", compiler=lambda: compiler)
    compiler.compiled.clear()
    found["norm"].write_bytes(b"norM")
    assert require_cubins("sm_90a", compiler=lambda: compiler) == found
    assert compiler.compiled == [("norm", "sm_90a")]
    assert f"{found['norm']} is not what was compiled" in caplog.text


@pytest.mark.parametrize("which", ["folder", "file"])
def test_cache_that_others_may_write_to_is_refused(which, cache):
    path = next(iter(require_cubins("sm_90a", compiler=Recorder).values()))
    changed = cache if which == "folder" else path
    mode = changed.stat().st_mode
    changed.chmod(mode | 0o002)
    with pytest.raises(KernelBuildError, match=f"{changed} belongs to another user, or others may write to it"):
        require_cubins("sm_90a", compiler=Recorder)
    changed.chmod(mode)
    if os.geteuid() == 0:
        os.chown(changed, 4711, 4711)
        with pytest.raises(KernelBuildError, match="OPENINFER_CACHE_DIR"):
            require_cubins("sm_90a", compiler=Recorder)


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
    text = '#include "common/vectors.cuh"\nextern "C" __global__ void twice(bf16* x) { x[0] += x[0]; }\n'
    assert found.compile(source(tmp_path, "good", text), "sm_80").startswith(b"\x7fELF")
    with pytest.raises(KernelBuildError, match=r"failed on bad\.cu for sm_80:(.|\n)*undefined_thing"):
        found.compile(source(tmp_path, "bad", "__global__ void f() { undefined_thing(); }"), "sm_80")


def test_without_any_compiler_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(Nvcc, "find", classmethod(lambda cls: None))
    monkeypatch.setattr(Nvrtc, "find", classmethod(lambda cls: None))
    with pytest.raises(KernelBuildError, match=r"\./run install --cuda13"):
        find_compiler()


@pytest.mark.parametrize("architecture", ["sm_90a", "sm_80"])
def test_every_source_compiles_with_hoppers_instructions_and_without(architecture):
    """Into the user's own cache, as a start-up does: only what changed is compiled. `./run cubins` does all of them."""
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


def test_command_compiles_what_the_folder_lacks(tmp_path, monkeypatch, capsys):
    compiler = Recorder()
    monkeypatch.setattr("openinfer_kernels.cubins.__main__.find_compiler", lambda: compiler)
    arguments = ["--out", str(tmp_path), "--architecture", "sm_80"]
    assert main(arguments) == 0
    assert len(compiler.compiled) == len(sources("sm_80"))
    next(tmp_path.glob(f"{sources('sm_80')[0].cubin_key('sm_80')}.*")).unlink()
    assert main(arguments) == 0
    assert compiler.compiled[len(sources("sm_80")) :] == [(sources("sm_80")[0].stem, "sm_80")]
    assert main(arguments) == 0
    assert len(compiler.compiled) == len(sources("sm_80")) + 1

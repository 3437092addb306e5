"""`openinfer kernels`: building ahead, and saying which kernel serves what."""

import importlib.util

import pytest

from openinfer_kernels.catalogue import WITHOUT_GPU_KERNEL
from openinfer_kernels.command import run
from openinfer_kernels.cubins import Nvcc, Nvrtc, Source, sources


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """nvcc that makes a cubin at once, into a cache of this test's own."""
    monkeypatch.setenv("OPENINFER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(Nvcc, "find", classmethod(lambda cls: cls(tmp_path)))
    monkeypatch.setattr(Nvcc, "compile", lambda self, source, architecture: source.stem.encode())
    return tmp_path


def test_build_says_what_was_there_and_compiles_the_rest(compiler, capsys):
    total = len(sources("sm_80"))
    assert run(["build", "--arch", "sm_80"]) == 0
    said = capsys.readouterr()
    assert said.out == f"sm_80: {total} sources, 0 found, {total} compiled now; in {compiler}/cubins\n"
    assert f"{total}/{total}" in said.err
    assert run(["build", "--arch", "sm_80"]) == 0
    assert f"{total} found, none had to be compiled" in capsys.readouterr().out


def test_build_of_all_architectures_names_each_once(compiler, capsys):
    assert run(["build", "--arch", "sm_80", "all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"]


def test_build_that_the_compiler_refuses_is_one_message_and_code_two(compiler, capsys, monkeypatch):
    def refuse(self: Nvcc, source: Source, architecture: str) -> bytes:
        from openinfer_kernels import KernelBuildError

        raise KernelBuildError(f"nvcc failed on {source.path.name}")

    monkeypatch.setattr(Nvcc, "compile", refuse)
    assert run(["build", "--arch", "sm_80"]) == 2
    assert "openinfer kernels build: nvcc failed on " in capsys.readouterr().err


def test_build_without_a_compiler_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OPENINFER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(Nvcc, "find", classmethod(lambda cls: None))
    monkeypatch.setattr(Nvrtc, "find", classmethod(lambda cls: None))
    assert run(["build", "--arch", "sm_80"]) == 2
    assert "./run install --cuda13" in capsys.readouterr().err


def test_without_a_gpu_the_message_says_what_is_missing_and_how_to_name_one(capsys):
    if importlib.util.find_spec("cupy") is not None:
        pytest.skip("CuPy is installed here")
    assert run(["build"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "the module cupy" in said
    assert "--arch sm_90a" in said


def test_list_says_which_kernel_serves_each_operator_and_phase(compiler, capsys):
    assert run(["list", "--arch", "sm_90a"]) == 0
    said = capsys.readouterr().out
    (prefill,) = [line for line in said.splitlines() if line.split()[:2] == ["attention", "prefill"]]
    assert prefill.split()[2:5] == ["attention_prefill_hopper", "no", "paged_attention"]
    assert "FlashInfer's FA3 613 TFLOP/s (docs/notes/kernels.md)" in said
    (alone,) = [line for line in said.splitlines() if "on the CPU alone" in line]
    assert alone.endswith(", ".join(WITHOUT_GPU_KERNEL) or "none")
    run(["build", "--arch", "sm_90a"])
    capsys.readouterr()
    run(["list", "--arch", "sm_90a"])
    assert "attention_prefill_hopper   yes" in capsys.readouterr().out


def test_unknown_architecture_is_refused_with_those_that_there_are(capsys):
    with pytest.raises(SystemExit):
        run(["build", "--arch", "sm_75"])
    assert "sm_80" in capsys.readouterr().err

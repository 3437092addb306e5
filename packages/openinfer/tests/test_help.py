"""Help, refusals of unknown flags, and completion: all from the parsers themselves."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from openinfer.commands import completion
from openinfer.commands.flag_parser import COMMON, first_sentence
from openinfer.commands.main import main
from openinfer.commands.vllm_flags import OF_VLLM


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(argv))
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def tree() -> completion.Tree:
    return completion.flags_of_commands()


def test_help_has_each_flag_on_one_line_and_the_common_ones_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tree: completion.Tree
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    said = printed(capsys, "serve", "--model", "tiny", "--help")
    common, _, advanced = said.partition("advanced:")
    listed = re.findall(r"^  (--[a-z-]+)", common, re.MULTILINE)
    assert listed == [name for name in COMMON if name in tree["serve"]]
    assert listed == list(COMMON)
    lines = [line for line in advanced.splitlines() if line]
    assert [line for line in lines if not line.startswith("  --")] == []
    assert all(len(line) <= 100 for line in lines)
    assert {*listed, *(line.split()[0] for line in lines)} >= set(tree["serve"])


def test_the_whole_texts_are_there_too(capsys: pytest.CaptureFixture[str]) -> None:
    said = printed(capsys, "serve", "--model", "tiny", "--help-all")
    assert "or put a proxy in front that has both" in " ".join(said.split())
    assert "\n      Address to listen on." in said


def test_first_sentence_keeps_the_default() -> None:
    assert first_sentence("One. Two; three (default: 3)") == "One (default: 3)"
    assert first_sentence("one; two") == "one"
    assert first_sentence("TOML file (SECURITY.md); empty: none") == "TOML file (SECURITY.md)"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-model-len", "4096"], "--max-model-len: here it is --max-model-tokens"),
        (["--gpu-memory-utilization=0.9"], "--gpu-memory-utilization: here it is --gpu-memory-fraction"),
        (["--served-model-name", "x", "-tp", "2"], "--model-name; -tp: here it is --tensor-parallel-size"),
        (["--porr", "1"], "--porr: did you mean --port?"),
        (["--zzz", "1"], "--zzz: --help lists all flags"),
    ],
)
def test_an_unknown_flag_is_refused_with_the_name_that_it_has_here(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--model", "tiny", *flags])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_what_stands_in_the_table_of_vllms_flags_is_none_of_ours_and_names_ours(tree: completion.Tree) -> None:
    ours = set(tree["serve"])
    assert not ours & OF_VLLM.keys()
    assert {name for text in OF_VLLM.values() for name in re.findall(r"--[a-z-]+", text)} <= ours


def test_bash_completes_commands_flags_and_values(tree: completion.Tree, tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not here")
    script = tmp_path / "completion.bash"
    script.write_text(completion.for_bash(tree))

    def completed(*words: str) -> set[str]:
        typed = " ".join(f"'{word}'" for word in words)
        code = f"source {script}; COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _openinfer; echo ${{COMPREPLY[@]}}"
        done = subprocess.run([bash, "-euc", code], capture_output=True, text=True, check=True, timeout=60)
        return set(done.stdout.split())

    assert completed("openinfer", "ser") == {"serve"}
    assert completed("openinfer", "serve", "--max-model") == {"--max-model-tokens"}
    assert completed("openinfer", "serve", "--device", "") == {"cpu", "cuda"}
    assert completed("openinfer", "generate", "--temp") == {"--temperature"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    said = capsys.readouterr().out
    assert "max-model-tokens" in said
    program = shutil.which(shell)
    if program is not None:
        subprocess.run([program, "-n"], input=said, text=True, check=True, timeout=60)

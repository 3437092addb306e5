"""The README's program runs, and prints what its comments say."""

import re
from importlib.metadata import metadata
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "README.md"


def read_readme() -> str:
    """The source tree's file; beside an installed wheel it is the distribution's description."""
    if SOURCE.exists():
        return SOURCE.read_text(encoding="utf-8")
    description = metadata("openinfer-kv-offload").get_payload()
    assert isinstance(description, str)
    return description


PROGRAMS = re.findall(r"```python\n(.*?)```", read_readme(), flags=re.DOTALL)


@pytest.mark.parametrize(
    ("program", "printed"),
    [*zip(PROGRAMS, (["completed", "(2, 1.5)"], ["(0, 0)", "(0, 96)"]), strict=True)],
)
def test_readme_program_prints_what_it_says(capsys, tmp_path, monkeypatch, program, printed):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    exec(compile(program, "README.md", "exec"), {})
    promised = re.findall(r"^print\(.*\)  # (.*)$", program, flags=re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == promised == printed


def test_readme_use_has_about_forty_lines():
    assert len([line for line in PROGRAMS[0].splitlines() if line.strip()]) <= 40

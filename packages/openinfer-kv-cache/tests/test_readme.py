"""The README's programs run, and print what their comments say."""

import re
from importlib.metadata import metadata
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "README.md"


def read_readme() -> str:
    """The source tree's file; beside an installed wheel it is the distribution's description."""
    if SOURCE.exists():
        return SOURCE.read_text(encoding="utf-8")
    description = metadata("openinfer-kv-cache").get_payload()
    assert isinstance(description, str)
    return description


PROGRAMS = re.findall(r"```python\n(.*?)```", read_readme(), flags=re.DOTALL)


@pytest.mark.parametrize("program", PROGRAMS, ids=["use", "slots", "layout", "tables", "windows"])
def test_readme_program_prints_what_it_says(program, capsys):
    exec(compile(program, "README.md", "exec"), {})
    promised = re.findall(r"^print\(.*\)\s+# (.*)$", program, flags=re.MULTILINE)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(promised) > 0
    for line, promise in zip(printed, promised, strict=True):
        if re.match(r"[\d(]", promise):
            assert line == promise.split(":")[0]


def test_readme_use_has_about_twenty_lines():
    lines = [line for line in PROGRAMS[0].splitlines() if line.strip()]
    assert len(lines) <= 22

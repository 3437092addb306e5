"""The package itself: its names, what importing it costs, and that its README's programs run."""

import ast
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import openinfer_core


def run_python(code: str) -> str:
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def readme() -> str:
    """The one of the checkout, or, tested from a wheel, the one in the distribution's metadata."""
    path = Path(__file__).parents[1] / "README.md"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    message = importlib.metadata.metadata("openinfer-core")
    return message["Description"] or str(message.get_payload())


def test_all_is_sorted_complete_and_importable() -> None:
    names = openinfer_core.__all__
    assert names == sorted(names)
    assert len(set(names)) == len(names)
    for name in names:
        assert getattr(openinfer_core, name) is not None
    source = Path(openinfer_core.__file__).read_text(encoding="utf-8")
    imports = [node for node in ast.parse(source).body if isinstance(node, ast.ImportFrom)]
    assert sorted(alias.name for node in imports for alias in node.names) == names


def test_import_loads_neither_numpy_nor_a_network_stack() -> None:
    heavy = ("numpy", "asyncio", "socket", "ssl", "selectors", "subprocess", "email", "http", "logging")
    code = f"import sys, openinfer_core; print([name for name in {heavy!r} if name in sys.modules])"
    assert run_python(code).strip() == "[]"


def test_hosts_of_an_engine_load_no_numpy() -> None:
    code = "import sys, openinfer_core.process.remote, openinfer_core.simulated; print('numpy' in sys.modules)"
    assert run_python(code).strip() == "False"


def test_readme_programs_run() -> None:
    programs = re.findall(r"```python\n(.*?)```", readme(), flags=re.DOTALL)
    assert [run_python(program) for program in programs] == ["4 tokens\n", ""]

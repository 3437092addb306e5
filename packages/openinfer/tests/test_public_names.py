"""The package's face."""

import re
import subprocess
import sys
from pathlib import Path

import openinfer


def test_all_is_sorted_and_there() -> None:
    capitals_first = sorted(openinfer.__all__, key=lambda name: (not name.isupper(), name))
    assert list(openinfer.__all__) == capitals_first
    assert all(hasattr(openinfer, name) for name in openinfer.__all__)
    assert {*openinfer.__all__, "__all__"} <= {*dir(openinfer)}


def test_importing_the_umbrella_loads_no_numpy_and_no_engine() -> None:
    script = "import sys, openinfer; print(sorted({'numpy', 'openinfer_engine', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_readmes_python_runs() -> None:
    readme = Path(__file__).parent.parent / "README.md"
    if not readme.exists():  # the wheel's tests run without the checkout
        return
    for block in re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL):
        done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=60, check=True)
        assert "Paris" in done.stdout

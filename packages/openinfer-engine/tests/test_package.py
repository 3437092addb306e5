"""The package's face: names, README."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import openinfer_engine


def test_all_is_sorted_and_there() -> None:
    assert list(openinfer_engine.__all__) == sorted(openinfer_engine.__all__)
    assert all(hasattr(openinfer_engine, name) for name in openinfer_engine.__all__)


def test_the_readmes_engine_runs() -> None:
    readme = Path(__file__).parent.parent / "README.md"
    if not readme.exists():
        pytest.skip("the tests run without the checkout around them")
    (block,) = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.count("[(") == 8

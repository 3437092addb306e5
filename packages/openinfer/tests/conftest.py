"""Fixtures: one tiny model for all tests that need one."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from openinfer import LLM

sys.path.insert(0, str(Path(__file__).parent))  # the helpers of these tests are imported by name


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    with LLM("tiny", num_blocks=512, max_num_seqs=16) as loaded:
        yield loaded

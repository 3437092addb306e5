"""Fixtures: one tiny model for all tests that need one."""

from collections.abc import Iterator

import pytest

from openinfer import LLM


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    with LLM("tiny", num_blocks=512, max_num_seqs=16) as loaded:
        yield loaded

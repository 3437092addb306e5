"""The recorded models, and a harness that runs one with batches made by hand."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from openinfer_engine.testing import FamilyHarness
from openinfer_qwen3.family import Qwen3Definition

sys.path.insert(0, str(Path(__file__).parent))  # the helpers of these tests are imported by name
FIXTURES = Path(__file__).parent / "fixtures"
FIXTURE_NAMES = sorted(path.name for path in FIXTURES.iterdir())


@pytest.fixture(scope="session", params=FIXTURE_NAMES)
def model_dir(request: pytest.FixtureRequest) -> Path:
    """Each recorded model in turn."""
    return FIXTURES / request.param


@pytest.fixture
def fixtures() -> Path:
    """The folder of recorded models."""
    return FIXTURES


@pytest.fixture
def harness() -> partial[FamilyHarness]:
    """Takes the folder of a model, and what else `FamilyHarness` does."""
    return partial(FamilyHarness, Qwen3Definition())


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One for each graph that was captured."""
    pytest.importorskip("cupy", reason="graphs are CUDA's")
    from openinfer_kernels.cuda.common.graphs import Stream

    found: list[None] = []
    capture = Stream.capture

    def counted(stream: Any, work: Any) -> Any:
        found.append(None)
        return capture(stream, work)

    monkeypatch.setattr(Stream, "capture", counted)
    return found

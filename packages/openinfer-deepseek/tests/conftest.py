"""The recorded models, and a harness that runs one with batches made by hand."""

import sys
from functools import partial
from pathlib import Path

import pytest

from openinfer_deepseek.family import DeepseekV2Definition
from openinfer_engine.testing import FamilyHarness

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
    return partial(FamilyHarness, DeepseekV2Definition())

"""The recorded models, and a harness that runs one with batches made by hand."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from openinfer_engine.testing import FamilyHarness
from openinfer_gemma import Gemma

FIXTURES = Path(__file__).parent / "fixtures"
"""`tools/golden/gemma.py` recorded them."""
TINY = ("gemma2", "gemma3", "gemma3_images")
OF_REAL_WIDTHS = ("gemma2_2b_widths", "gemma3_1b_widths")
"""Two layers of the published sizes, with the weights of `--load-format dummy`."""


@pytest.fixture(scope="session", params=TINY)
def model_dir(request: pytest.FixtureRequest) -> Path:
    """Each tiny model in turn."""
    return FIXTURES / request.param


@pytest.fixture(scope="session", params=OF_REAL_WIDTHS)
def wide_dir(request: pytest.FixtureRequest) -> Path:
    """Each model of real widths in turn."""
    return FIXTURES / request.param


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """The folder of recorded models."""
    return FIXTURES


@pytest.fixture(scope="session")
def harness() -> Any:
    """Takes the folder of a model, and what else `FamilyHarness` does."""
    return partial(FamilyHarness, Gemma.definition)

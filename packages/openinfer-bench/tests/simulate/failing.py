"""A scenario that fails and leaves a folder, as one does whose tasks never end; see test_simulate.py."""

import tempfile
from typing import Any, NoReturn

from openinfer_core.testing.simulation.world import World


def main(world: World, **options: Any) -> NoReturn:
    del world, options
    raise RuntimeError(f"this one fails, and leaves {tempfile.mkdtemp()}")

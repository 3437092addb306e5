"""Where a model's folder is on this node, if not where the command has it."""

import os
from collections.abc import Mapping
from pathlib import Path

from openinfer_core import Refused

VARIABLE = "OPENINFER_RAY_MODEL_PATHS"
"""Of a node, given to its `ray start`: `PATH=PATH HERE`, several with `:` between."""


def path_here(path: str, variables: Mapping[str, str]) -> Path:
    """The path on this node: the longest of those in the variable that is the path or above it is replaced.

    Raises:
        Refused: the variable cannot be read.
    """
    found, there = Path(path), Path()
    for pair in variables.get(VARIABLE, "").split(os.pathsep):
        given, separator, here = pair.partition("=")
        if not pair:
            continue
        if not separator or not Path(given).is_absolute() or not Path(here).is_absolute():
            raise Refused(f"{VARIABLE} has {pair!r}, which is not of the form /PATH=/PATH HERE")
        if Path(path).is_relative_to(given) and len(Path(given).parts) > len(there.parts):
            there = Path(given)
            found = Path(here) / Path(path).relative_to(given)
    return found

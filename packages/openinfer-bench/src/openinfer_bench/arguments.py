"""Checks of what a benchmark is asked, before it measures anything: a run may take hours."""

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from openinfer_core import InvalidRequest


def check_least(arguments: argparse.Namespace, least: Mapping[str, float]) -> None:
    """Whether numbers are finite and not below their least.

    Raises:
        InvalidRequest: one is; those that are not given are None.
    """
    for name, bound in least.items():
        value: float | None = getattr(arguments, name)
        if value is not None and not (value >= bound and math.isfinite(value)):
            raise InvalidRequest(f"{_flag(name)} is {value}; it must be a number from {bound} on", field=name)


def check_folders(arguments: argparse.Namespace, files: Sequence[str]) -> None:
    """Whether the folders of files are there that will be written.

    Raises:
        InvalidRequest: one is not.
    """
    for name in files:
        path: str | None = getattr(arguments, name)
        if path is not None and not Path(path).parent.is_dir():
            raise InvalidRequest(f"{_flag(name)} {path}: there is no folder {Path(path).parent}", field=name)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"

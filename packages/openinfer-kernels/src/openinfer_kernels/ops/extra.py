"""Operators that no method of `Ops` is: a family's own, which a `KernelProvider` adds."""

from collections.abc import Callable
from typing import Any

from openinfer_kernels.errors import OperatorMissingError


class ExtraOperators(dict[str, Callable[..., Any]]):
    """By name; asking for one that nothing added raises `OperatorMissingError`."""

    def __missing__(self, name: str) -> Callable[..., Any]:
        there = f"there are {', '.join(sorted(self))}" if self else "none was added"
        raise OperatorMissingError(
            f"no extra operator {name!r}: {there}; a family names its providers in ModelDefinition.extra_operators, a "
            f"user says --kernel-providers {name}=PROVIDER"
        )

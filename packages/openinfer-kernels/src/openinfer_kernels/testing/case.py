"""`Case`: what one operator is called with once by the conformance kit."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Arguments of one call, in host memory. Arrays of floats come to the compute dtype, others stay as they are."""

    name: str
    positional: tuple[Any, ...]
    keywords: Mapping[str, Any]
    mutated: tuple[int | str, ...] = ()
    """Arguments that the operator changes, by position or keyword; `KEYWORD.FIELD` is an array inside of one."""
    exact: tuple[int | str, ...] = ()
    """Arrays of floats that stay as they are: tables in float32."""
    unrounded: tuple[int | str, ...] = ()
    """Of those that are changed, what is float32 whatever the compute dtype, and as exact."""
    in_float32: tuple[int, ...] = ()
    """Arrays of the result that are float32 whatever the compute dtype, in order; one array is 0."""
    rounded_inside: bool = False
    """Whether such arrays are sums of what was rounded to the compute dtype, and as far off."""

"""The tables of `CpuOps` and `CudaOps` are the contract's: as many operators, with its parameters and defaults."""

import ctypes
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import cached_property
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest

from openinfer_kernels import Ops
from openinfer_kernels.cpu import BatchInvariantCpuOps, CpuOps
from openinfer_kernels.providers import operators_of

OPERATORS = operators_of(Ops)
TUNABLE = {"chunk_tokens", "multiply", "tokens_at_once", "weights_first"}
"""Keywords with defaults that an implementation adds for its own callers."""


def parameters(function: Callable[..., Any], *, skip: int = 0) -> list[tuple[str, Any, Any]]:
    """Name, kind and default of each, without the `skip` first."""
    found = list(inspect.signature(function).parameters.values())[skip:]
    return [(each.name, each.kind, each.default) for each in found if each.name not in TUNABLE]


def mismatch(operator: str, implemented: list[tuple[str, Any, Any]]) -> str | None:
    declared = parameters(getattr(Ops, operator), skip=1)
    own_default = {name for name, _, default in declared if default is ...}  # any default will do
    with_it = [
        (name, kind, ... if name in own_default and default is not inspect.Parameter.empty else default)
        for name, kind, default in implemented
    ]
    return None if with_it == declared else f"{operator} is declared with {declared} and implemented with {implemented}"


@pytest.fixture
def cuda_ops(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """`openinfer_kernels.cuda.ops`, also where CUDA's packages are not installed: its tables call none of them."""
    if importlib.util.find_spec("cupy") is not None:
        yield importlib.import_module("openinfer_kernels.cuda.ops")
        return
    before = set(sys.modules)
    for name in ("cupy", "cuda.bindings.driver", "cuda.pathfinder"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    monkeypatch.setattr(ctypes, "CDLL", MagicMock())
    yield importlib.import_module("openinfer_kernels.cuda.ops")
    for name in set(sys.modules) - before:
        if name.startswith("openinfer_kernels.cuda"):
            del sys.modules[name]


@pytest.mark.parametrize("ops", [CpuOps(), BatchInvariantCpuOps()], ids=lambda ops: type(ops).__name__)
def test_operators_of_the_cpu_are_as_declared(ops: CpuOps) -> None:
    wrong = [mismatch(name, parameters(getattr(ops, name))) for name in OPERATORS]
    assert [each for each in wrong if each] == []
    assert {name for name in dir(ops) if not name.startswith("_")} == {*OPERATORS, "extra", "fused_adapters", "name"}


def test_operators_of_a_gpu_are_as_declared(cuda_ops: ModuleType) -> None:
    table = {name: each for name, each in vars(cuda_ops.CudaOps).items() if not name.startswith("_")}
    assert set(table) == {*OPERATORS, "extra", "fused_adapters", "name", "close", "tuning"}
    wrong = [mismatch(name, parameters(table[name].method, skip=1)) for name in OPERATORS]
    assert [each for each in wrong if each] == []


def test_family_is_made_at_the_first_lookup_and_never_again(cuda_ops: ModuleType) -> None:
    made = []

    class Doubling:
        def double(self, x: int) -> int:
            return 2 * x

    class Tripling(Doubling):
        def double(self, x: int) -> int:
            return 3 * x

    class Table:
        @cached_property
        def _family(self) -> Doubling:
            made.append(self)
            return Doubling()

        double = cuda_ops.served_by(_family, Doubling.double)
        twice = cuda_ops.served_by(_family, Doubling.double)

    class Other(Table):
        @cached_property
        def _family(self) -> Doubling:
            return Tripling()

        def twice(self, x: int) -> int:
            return super().twice(x) + 1

    table = Table()
    assert made == []
    assert (table.double(2), table.double(3), table.twice(4)) == (4, 6, 8)
    assert made == [table]
    assert vars(table)["double"] == table.double
    other = Other()
    assert (other.double(2), other.twice(2), other.twice(2)) == (6, 7, 7)

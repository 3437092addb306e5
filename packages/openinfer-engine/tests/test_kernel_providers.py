"""Operators of other packages, chosen by an option: what a model is handed, and what is refused."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openinfer_core import InvalidRequest, Refused
from openinfer_core.contracts import CONTRACTS
from openinfer_core.errors import UnknownPlugin
from openinfer_core.plugins import KERNEL_PROVIDERS
from openinfer_engine.kernel_providers import ChosenProvider, choose_providers, with_providers
from openinfer_kernels import KernelProviderError, Ops
from openinfer_kernels.cpu import CpuOps
from openinfer_kernels.testing.paged import make_batch


class Negative:
    """Negates what `linear` gives; counts how often it was bound."""

    operators = ("linear",)
    architectures = ("cpu",)

    def __init__(self) -> None:
        self.bound = 0

    def bind(self, own: Ops) -> Mapping[str, Callable[..., Any]]:
        self.bound += 1
        return {"linear": lambda *given: -own.linear(*given)}


class Broken(Negative):
    def bind(self, own: Ops) -> Mapping[str, Callable[..., Any]]:
        raise KernelProviderError("its library is missing")


class FakePlugin:
    name = "negative"
    origin = "third-party 1.0"


def chosen(provider: Any) -> ChosenProvider:
    return ChosenProvider("linear", FakePlugin(), provider)  # pyright: ignore[reportArgumentType]


def test_nothing_asked_for_changes_nothing() -> None:
    own = CpuOps()
    assert choose_providers({}, architecture="cpu") == ()
    assert with_providers(own, ()) is own


def test_model_is_handed_the_providers_operator() -> None:
    provider = Negative()
    ops = with_providers(CpuOps(), [chosen(provider)])
    x = np.eye(2, dtype=np.float32)
    np.testing.assert_array_equal(ops.linear(x, x, make_batch(2)), -x)
    assert provider.bound == 1
    assert chosen(provider).origin == "negative (third-party 1.0)"


def test_provider_that_cannot_be_used_refuses_the_start() -> None:
    with pytest.raises(Refused, match=r"negative \(third-party 1\.0\): its library is missing"):
        with_providers(CpuOps(), [chosen(Broken())])


def test_unknown_name_says_which_are_installed() -> None:
    with pytest.raises(UnknownPlugin, match=r"no installed package offers 'none' in openinfer\.kernel_providers"):
        choose_providers({"linear": "none"}, architecture="cpu")


def test_added_operator_is_asked_for_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(tmp_path, monkeypatch, "cpu_twins = {'fold': staticmethod(lambda x: x.sum())}; operators = ('fold',)")
    (found,) = choose_providers({"fold": "folding"}, architecture="cpu")
    ops = with_providers(CpuOps(), [found])
    assert ops.extra["fold"](np.ones(3, np.float32)) == 3
    assert found.origin == "folding (folding 1.0)"
    with pytest.raises(InvalidRequest, match=r"the operator 'bend'; possible are add_rms_norm, .*, fold$"):
        choose_providers({"bend": "folding"}, architecture="cpu")
    with pytest.raises(Refused, match=r"fold=folding \(folding 1\.0\): it serves fold on cpu, .* is sm_90a"):
        choose_providers({"fold": "folding"}, architecture="sm_90a")


def test_added_operator_without_a_twin_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(tmp_path, monkeypatch, "operators = ('fold',)")
    with pytest.raises(Refused, match="it adds 'fold' without a twin for the CPU: its cpu_twins has to have one"):
        choose_providers({"fold": "folding"}, architecture="cpu")


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """A package `folding` with a provider of the same name, whose class has such a body."""
    contract = f"OPENINFER_CONTRACT = {CONTRACTS[KERNEL_PROVIDERS]}"
    common = "architectures = ('cpu',)\n    bind = lambda self, own: {}"
    (folder / "folding.py").write_text(f"{contract}\n\n\nclass Folding:\n    {common}\n    {body}\n")
    distribution = folder / "folding-1.0.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: folding\nVersion: 1.0\n")
    (distribution / "entry_points.txt").write_text("[openinfer.kernel_providers]\nfolding = folding:Folding\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "folding", raising=False)

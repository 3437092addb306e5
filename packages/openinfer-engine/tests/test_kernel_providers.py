"""Operators of other packages, chosen by an option: what a model is handed, and what is refused."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from openinfer_core import Refused
from openinfer_core.errors import UnknownPlugin
from openinfer_engine.kernel_providers import ChosenProvider, choose_providers, with_providers
from openinfer_kernels import KernelProviderError, Ops
from openinfer_kernels.cpu import CpuOps


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
    np.testing.assert_array_equal(ops.linear(x, x), -x)
    assert provider.bound == 1
    assert chosen(provider).origin == "negative (third-party 1.0)"


def test_provider_that_cannot_be_used_refuses_the_start() -> None:
    with pytest.raises(Refused, match=r"negative \(third-party 1\.0\): its library is missing"):
        with_providers(CpuOps(), [chosen(Broken())])


def test_unknown_name_says_which_are_installed() -> None:
    with pytest.raises(UnknownPlugin, match=r"no installed package offers 'none' in openinfer\.kernel_providers"):
        choose_providers({"linear": "none"}, architecture="cpu")

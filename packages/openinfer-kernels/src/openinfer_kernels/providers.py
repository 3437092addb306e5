"""Operators of other packages: a `KernelProvider` serves some of `Ops` on some devices, in the place of our own.

    own ops ──► provider.bind(own) ──► {"rms_norm": function, ...}
        └────────────► provide(own, chosen) ──► Ops, which a model is handed

A provider is the object (or the class without arguments) of an entry point in the group `openinfer.kernel_providers`.
It is used for the operators that a user names, never because it is installed. `openinfer_kernels.testing.providers`
has the conformance kit.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, TypeAlias, cast

from openinfer_kernels.errors import KernelProviderError
from openinfer_kernels.ops import MemoryOps, Ops, RoutingOps, SamplingOps

Operator: TypeAlias = Callable[..., Any]
"""Has the parameters, result and effects of the method of `Ops` in whose place it stands."""

_NOT_PROVIDABLE = (MemoryOps, RoutingOps, SamplingOps)


def operators_of(*protocols: type) -> tuple[str, ...]:
    """The operators that parts of the contract declare, sorted."""
    names = {name for each in protocols for name, _ in inspect.getmembers(each, inspect.isfunction)}
    return tuple(sorted(name for name in names if not name.startswith("_")))


PROVIDABLE = tuple(name for name in operators_of(Ops) if name not in operators_of(*_NOT_PROVIDABLE))
"""The methods of `Ops` that models call, and a provider may serve.

Memory and sampling are not among them: a seeded draw is promised to be the same everywhere. Nor are routers, which
answer by a choice.
"""


class KernelProvider(Protocol):
    """Some operators, for some devices."""

    @property
    def operators(self) -> Collection[str]:
        """Those it can serve, of `PROVIDABLE`."""
        ...

    @property
    def architectures(self) -> Collection[str]:
        """Where: `cpu`, or GPUs as compilers name them: `sm_90a`."""
        ...

    def bind(self, own: Ops) -> Mapping[str, Operator]:
        """Every operator that it can serve, ready for one rank; called once, before the first step.

        What has to be compiled or loaded is compiled or loaded here: on a GPU, steps are captured into graphs.

        Args:
            own: our operators on that device, for whatever the provider leaves to them; `own.device` is the GPU's.
        """
        ...


def why_not(provider: KernelProvider, operator: str, *, architecture: str) -> str | None:
    """Why a provider cannot serve an operator on a device, as the end of a sentence; None if it can."""
    if operator not in PROVIDABLE:
        return f"{operator!r} is not an operator that can be provided; possible: {', '.join(PROVIDABLE)}"
    if operator not in provider.operators:
        return f"it does not serve {operator}, but {', '.join(sorted(provider.operators))}"
    if architecture not in provider.architectures:
        return f"it serves {', '.join(sorted(provider.architectures))}, and this device is {architecture}"
    return None


def provide(own: Ops, chosen: Mapping[str, KernelProvider]) -> Ops:
    """`own` with some operators of providers.

    Args:
        own: the device's operators.
        chosen: operator -> provider; empty gives `own` itself.

    Raises:
        KernelProviderError: a provider did not bind an operator that it says it serves.
    """
    if not chosen:
        return own
    bound = {id(provider): provider.bind(own) for provider in chosen.values()}
    operators: dict[str, Operator] = {}
    for operator, provider in chosen.items():
        if operator not in bound[id(provider)]:
            raise KernelProviderError(f"{type(provider).__name__}.bind returned no {operator}, which it says it serves")
        operators[operator] = bound[id(provider)][operator]
    return cast("Ops", _ProvidedOps(own, operators))


class _ProvidedOps:
    """Looks an operator up among those provided, then in the device's own."""

    def __init__(self, own: Ops, operators: Mapping[str, Operator]) -> None:
        self._own = own
        self._operators = operators

    def __getattr__(self, name: str) -> Any:
        operator = self._operators.get(name)
        return getattr(self._own, name) if operator is None else operator

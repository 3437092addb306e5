"""Operators of other packages: a `KernelProvider` serves some of `Ops` on some devices, in the place of our own.

    own ops ──► provider.bind(own) ──► {"rms_norm": function, ...}
        └────────────► provide(own, chosen) ──► Ops, which a model is handed

A provider may also add operators that the contract has not, which a family calls as `ops.extra["name"]`.

A provider is the object (or the class without arguments) of an entry point in the group `openinfer.kernel_providers`.
It is used for the operators that a user names, never because it is installed. `openinfer_kernels.testing.providers`
has the conformance kit.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

from openinfer_kernels.errors import KernelProviderError
from openinfer_kernels.ops import DraftingOps, KeptInputs, MemoryOps, NgramOps, Ops, ReplayOps, RoutingOps, SamplingOps
from openinfer_kernels.ops.extra import ExtraOperators

Operator: TypeAlias = Callable[..., Any]
"""Has the parameters, result and effects of the method of `Ops` in whose place it stands."""

_NOT_PROVIDABLE = (DraftingOps, MemoryOps, NgramOps, ReplayOps, RoutingOps, SamplingOps)
_KEEPING = ("causal_conv_silu", "gated_delta_rule")
"""Operators that keep inputs of `AttentionBatch.kept_rows`."""
_CPU = "cpu"


def operators_of(*protocols: type) -> tuple[str, ...]:
    """The operators that parts of the contract declare, sorted."""
    names = {name for each in protocols for name, _ in inspect.getmembers(each, inspect.isfunction)}
    return tuple(sorted(name for name in names if not name.startswith("_")))


PROVIDABLE = tuple(name for name in operators_of(Ops) if name not in operators_of(*_NOT_PROVIDABLE))
"""The methods of `Ops` that models call, and a provider may serve.

Memory and sampling are not among them: a seeded draw is promised to be the same everywhere. Nor are routers, which
answer by a choice, what drafters ask for, which is copies and choices, and what reads inputs that our own kernels kept.
"""


class KernelProvider(Protocol):
    """Some operators, for some devices."""

    @property
    def operators(self) -> Collection[str]:
        """Those it can serve, of `PROVIDABLE` and of those it adds (`ExtendsOperators`)."""
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


@runtime_checkable
class ExtendsOperators(Protocol):
    """What a `KernelProvider` has as well if it adds operators to the contract.

    Each has a twin in NumPy, so that whatever a family calls runs everywhere and has a truth to be compared with.
    """

    @property
    def cpu_twins(self) -> Mapping[str, Operator]:
        """Name -> the operator on arrays in host memory, float32: what serves the CPU.

        No method of `Ops` has that name. `bind` returns the same for the device, of `architectures` other than `cpu`.
        """
        ...


def cpu_twins(provider: KernelProvider) -> Mapping[str, Operator]:
    """Of the operators that a provider adds; none of one that adds none."""
    return provider.cpu_twins if isinstance(provider, ExtendsOperators) else {}


def why_not(provider: KernelProvider, operator: str, *, architecture: str) -> str | None:
    """Why a provider cannot serve an operator on a device, as the end of a sentence; None if it can."""
    if operator not in PROVIDABLE:
        return _why_not_extra(provider, operator, architecture)
    if operator not in provider.operators:
        return f"it does not serve {operator}, but {', '.join(sorted(provider.operators))}"
    if architecture not in provider.architectures:
        return f"it serves {', '.join(sorted(provider.architectures))}, and this device is {architecture}"
    return None


def _why_not_extra(provider: KernelProvider, operator: str, architecture: str) -> str | None:
    if hasattr(Ops, operator):
        return f"{operator!r} is not an operator that can be provided; possible: {', '.join(PROVIDABLE)}"
    if operator not in cpu_twins(provider):
        if operator in provider.operators:
            return f"it adds {operator!r} without a twin for the CPU: its cpu_twins has to have one"
        return f"{operator!r} is not an operator that can be provided; possible: {', '.join(PROVIDABLE)}"
    if architecture == _CPU:
        return None
    if operator not in provider.operators or architecture not in provider.architectures:
        there = sorted({*provider.architectures} - {_CPU}) if operator in provider.operators else []
        return f"it serves {operator} on {', '.join([_CPU, *there])}, and this device is {architecture}"
    return None


def provide(own: Ops, chosen: Mapping[str, KernelProvider]) -> Ops:
    """`own` with some operators of providers.

    Args:
        own: the device's operators.
        chosen: operator -> provider; empty gives `own` itself.

    Raises:
        KernelProviderError: a provider did not bind an operator that it says it serves, or binds a function that the
            operator's arguments do not fit.
    """
    if not chosen:
        return own
    bound: dict[int, Mapping[str, Operator]] = {}
    operators: dict[str, Operator] = {}
    extra = ExtraOperators(own.extra)
    for operator, provider in chosen.items():
        if own.name == _CPU and operator in cpu_twins(provider):
            extra[operator] = _naming_its_provider(cpu_twins(provider)[operator], operator, provider)
            continue
        if id(provider) not in bound:
            bound[id(provider)] = provider.bind(own)
        if operator not in bound[id(provider)]:
            raise KernelProviderError(f"{type(provider).__name__}.bind returned no {operator}, which it says it serves")
        function = bound[id(provider)][operator]
        added = extra if operator in cpu_twins(provider) else operators
        if added is operators:
            _check_arguments(provider, operator, function)
        added[operator] = _naming_its_provider(function, operator, provider)
    return cast("Ops", _ProvidedOps(own, operators, extra))


def _check_arguments(provider: KernelProvider, operator: str, function: Operator) -> None:
    """Refuses a function that would fail in a step, which does not say whose it is; keywords with defaults may lack."""
    _, *declared = inspect.signature(getattr(Ops, operator)).parameters.values()
    needed = [each for each in declared if each.default is inspect.Parameter.empty]
    by_name = {each.name: None for each in needed if each.kind is inspect.Parameter.KEYWORD_ONLY}
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a function of C, which says nothing of its arguments
    try:
        found.bind(*(len(needed) - len(by_name)) * (None,), **by_name)
    except TypeError as error:
        has, wants = _without_annotations(found.parameters.values()), _without_annotations(declared)
        message = (
            f"{type(provider).__name__}.bind returned {operator}{has}; the contract's is {operator}{wants}: {error}"
        )
        raise KernelProviderError(message) from error


def _naming_its_provider(function: Operator, operator: str, provider: KernelProvider) -> Operator:
    """The same function; what it raises in a step ends the engine, and its log shall say whose it was."""

    @functools.wraps(function)
    def named(*given: Any, **keywords: Any) -> Any:
        try:
            return function(*given, **keywords)
        except Exception as error:
            whose = f"{type(provider).__module__}.{type(provider).__qualname__}"
            error.add_note(f"raised in {operator} of the kernel provider {whose}")
            raise

    return named


def _without_annotations(parameters: Iterable[inspect.Parameter]) -> inspect.Signature:
    return inspect.Signature([each.replace(annotation=inspect.Parameter.empty) for each in parameters])


class _ProvidedOps:
    """Looks an operator up among those provided, then in the device's own."""

    def __init__(self, own: Ops, operators: Mapping[str, Operator], extra: Mapping[str, Operator]) -> None:
        self._own = own
        self._operators = operators
        self.extra = extra

    def keep_inputs(self, **given: Any) -> KeptInputs | None:
        """None where an operator that keeps inputs is another's: it has states take in all tokens."""
        return None if self._operators.keys() & {*_KEEPING} else self._own.keep_inputs(**given)

    def __getattr__(self, name: str) -> Any:
        operator = self._operators.get(name)
        return getattr(self._own, name) if operator is None else operator

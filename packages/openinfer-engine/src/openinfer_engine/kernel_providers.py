"""Operators of other packages, as an option or a family asks for them: found, checked, put in place."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openinfer_core import BrokenPlugin, InvalidRequest, OpenInferError, Plugin, Refused, find_plugin
from openinfer_core.plugins import KERNEL_PROVIDERS
from openinfer_engine.backends import Backend
from openinfer_engine.model import ModelDefinition
from openinfer_engine.options import EngineOptions
from openinfer_kernels import KernelsError, Ops
from openinfer_kernels.providers import PROVIDABLE, KernelProvider, cpu_twins, provide, why_not


@dataclass(frozen=True, slots=True)
class ChosenProvider:
    """One operator and who serves it."""

    operator: str
    plugin: Plugin
    provider: KernelProvider

    @property
    def origin(self) -> str:
        """`NAME (DISTRIBUTION VERSION)`, for `openinfer plan` and its lock files."""
        return f"{self.plugin.name} ({self.plugin.origin})"


def choose_providers(asked: Mapping[str, str], *, architecture: str) -> tuple[ChosenProvider, ...]:
    """The providers of an option's operators, by operator; one object for each name.

    Raises:
        InvalidRequest: no such operator, neither in the contract nor added by the provider.
        PluginError: no installed package has a provider of that name, or it failed to load.
        Refused: the provider does not serve that operator on this device.
    """
    plugins = {name: find_plugin(KERNEL_PROVIDERS, name) for name in sorted({*asked.values()})}
    providers: dict[str, KernelProvider] = {name: plugin.instance(KernelProvider) for name, plugin in plugins.items()}
    for operator, name in asked.items():
        added = cpu_twins(providers[name])
        if operator not in PROVIDABLE and operator not in {*added, *providers[name].operators}:
            possible = ", ".join([*PROVIDABLE, *sorted(added)])
            raise InvalidRequest(
                f"kernel_providers names the operator {operator!r}; possible are {possible}", field="kernel_providers"
            )
        reason = why_not(providers[name], operator, architecture=architecture)
        if reason is not None:
            raise Refused(f"kernel_providers {operator}={name} ({plugins[name].origin}): {reason}")
    return tuple(ChosenProvider(operator, plugins[name], providers[name]) for operator, name in sorted(asked.items()))


def choose_providers_of_model(
    definition: ModelDefinition[Any], options: EngineOptions, backend: Backend
) -> tuple[ChosenProvider, ...]:
    """Those that were asked for, and those of the family's extra operators for which none was."""
    own = {name: each for name, each in definition.extra_operators.items() if name not in options.kernel_providers}
    if own and options.batch_invariant:
        raise Refused(
            f"--batch-invariant is kept by our own operators; the family {definition.name} calls "
            f"{', '.join(sorted(own))} of other packages"
        )
    try:
        of_family = choose_providers(own, architecture=backend.architecture)
    except InvalidRequest as error:
        raise Refused(f"the family {definition.name} calls what its providers do not add: {error}") from error
    return (*choose_providers(options.kernel_providers, architecture=backend.architecture), *of_family)


def with_providers(own: Ops, chosen: Sequence[ChosenProvider]) -> Ops:
    """Raises `Refused` if a provider cannot be used on this machine, `BrokenPlugin` if it fails otherwise."""
    try:
        return provide(own, {each.operator: each.provider for each in chosen})
    except KernelsError as error:
        names = ", ".join(sorted({each.origin for each in chosen}))
        raise Refused(f"kernel_providers {names}: {error}") from error
    except OpenInferError:
        raise
    except Exception as error:
        names = ", ".join(sorted({each.plugin.described for each in chosen}))
        raise BrokenPlugin(f"{names} cannot be bound: {type(error).__name__}: {error}") from error

"""Discovery of plug-ins through entry points. Names are listed without importing; one is loaded when chosen."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from openinfer_core.contracts import misfit_of, require_contract, require_one_release
from openinfer_core.errors import (
    AmbiguousPlugin,
    BrokenPlugin,
    InvalidRequest,
    MixedReleases,
    OpenInferError,
    Refused,
    UnknownPlugin,
)

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

MODELS = "openinfer.models"
CHECKPOINTS = "openinfer.checkpoints"
SCHEDULERS = "openinfer.schedulers"
QUEUE_POLICIES = "openinfer.queue_policies"
DRAFTERS = "openinfer.drafters"
KERNEL_PROVIDERS = "openinfer.kernel_providers"
GRAMMAR_COMPILERS = "openinfer.grammar_compilers"
TOKENIZERS = "openinfer.tokenizers"
MODEL_FILES = "openinfer.model_files"

PLUGIN_ERRORS = (Exception, SystemExit)
"""What a plug-in's code may raise; one that calls `sys.exit` ends no process of ours without a word."""


def place_of(part: type) -> str:
    """Where a plug-in's class is, as an entry point names it: a reader of the log finds the package by it."""
    return f"{part.__module__}:{part.__qualname__}"


Lister = Callable[[str], "Iterable[EntryPoint]"]
"""Lists the entry points of a group; the default reads the installed distributions."""


def installed(group: str) -> "Iterable[EntryPoint]":
    from importlib.metadata import entry_points  # pulls in `email` and `socket`, a third of this package's import time

    return entry_points(group=group)


@dataclass(frozen=True, slots=True)
class Plugin:
    """One entry point of a group, not loaded."""

    group: str
    name: str
    entry_point: "EntryPoint"

    @property
    def origin(self) -> str:
        """The distribution that offers it, with its version: `openinfer-engine 0.1.0`."""
        distribution = self.entry_point.dist
        return f"{distribution.name} {distribution.version}" if distribution else self.entry_point.value

    @property
    def distribution(self) -> str | None:
        """The name of the distribution that offers it; None for an entry point that belongs to none."""
        return self.entry_point.dist.name if self.entry_point.dist else None

    @property
    def described(self) -> str:
        """For the beginning of a message: group, name, distribution and where in it."""
        return f"{self.group} plug-in {self.name!r} of {self.origin} ({self.entry_point.value})"

    def load(self) -> Any:
        """The plug-in's object, imported after its contract's number has been compared.

        Raises:
            ContractMismatch: it was written for another contract of its group.
            MixedReleases: it needs packages of openinfer that are not installed in one release.
            BrokenPlugin: its import failed, with its own exception as the cause.
        """
        require_contract(self)
        if self.entry_point.dist is not None:
            require_one_release(self.entry_point.dist.name)
        try:
            return self.entry_point.load()
        except PLUGIN_ERRORS as error:
            sentence = misfit_of(error)
            if sentence is not None:
                raise MixedReleases(f"{self.described} failed to load: {sentence}") from error
            raise BrokenPlugin(
                f"{self.described} failed to load: {type(error).__name__}: {error}; repair or uninstall that package"
            ) from error

    def make(self, *arguments: Any, contract: type | None = None) -> Any:
        """What the plug-in's factory makes of the arguments, with the members that the Protocol `contract` declares.

        Raises:
            PluginError: as `load` does; `BrokenPlugin` also if the factory fails, or makes something else.
            Refused: the factory refuses what it is made with; the message names the plug-in.
        """
        factory = self.load()
        try:
            made = factory(*arguments)
            self.require(made, contract)
        except (Refused, InvalidRequest) as error:
            raise Refused(f"{self.described}: {error}") from error
        except OpenInferError:
            raise  # it has a sentence of its own
        except PLUGIN_ERRORS as error:
            raise BrokenPlugin(f"{self.described} cannot be made: {type(error).__name__}: {error}") from error
        return made

    def instance(self, contract: type) -> Any:
        """The plug-in's object, or an instance of its class, with the members that `contract` declares.

        Raises:
            PluginError: as `load` does; `BrokenPlugin` also if there can be no instance, or it lacks a member.
        """
        found = self.load()
        try:
            made = found() if isinstance(found, type) else found
            self.require(made, contract)
        except OpenInferError:
            raise
        except PLUGIN_ERRORS as error:
            raise BrokenPlugin(f"{self.described} cannot be made: {type(error).__name__}: {error}") from error
        return made

    def callable_with(self, num_arguments: int) -> Any:
        """The plug-in's object, which a call with so many arguments fits; it is not called.

        Raises:
            PluginError: as `load` does; `BrokenPlugin` also if it takes no such call.
        """
        found = self.load()
        try:
            _signature(found).bind(*[None] * num_arguments)
        except TypeError as error:
            raise BrokenPlugin(
                f"{self.described} cannot be called with {num_arguments} argument(s): {error}"
            ) from error
        return found

    def require(self, made: object, contract: type | None) -> None:
        """Raises `BrokenPlugin` if what was made is None, or lacks a member that the Protocol `contract` declares."""
        if made is None:
            raise BrokenPlugin(f"{self.described} makes nothing: it returned None")
        missing = [] if contract is None else [name for name in members_of(contract) if not hasattr(made, name)]
        if missing and contract is not None:
            raise BrokenPlugin(f"{self.described} is no {contract.__name__}: it lacks {', '.join(missing)}")


def members_of(contract: type) -> tuple[str, ...]:
    """The public members that a Protocol and its bases declare, sorted."""
    declared = [{*vars(base), *vars(base).get("__annotations__", ())} for base in contract.__mro__[:-1]]
    return tuple(sorted(name for name in set[str]().union(*declared) if not name.startswith("_")))


def _signature(found: Any) -> Any:
    from inspect import signature  # is not needed to list or load

    try:
        return signature(found)
    except ValueError:  # of what is written in C and says nothing of its parameters
        return signature(lambda *arguments: arguments)


def list_plugins(group: str, *, lister: Lister = installed) -> list[Plugin]:
    """Every plug-in of a group, sorted by name; one that its distribution lists twice is one. Nothing is imported."""
    found = [Plugin(group, entry_point.name, entry_point) for entry_point in lister(group)]
    by_place = {(plugin.name, plugin.entry_point.value, plugin.origin): plugin for plugin in found}
    return [plugin for _, plugin in sorted(by_place.items(), key=lambda item: item[0])]


def find_plugin(group: str, name: str, *, lister: Lister = installed) -> Plugin:
    """The one plug-in of that name.

    Raises:
        UnknownPlugin: none has it; the message lists those that are there.
        AmbiguousPlugin: more than one distribution offers it.
    """
    plugins = list_plugins(group, lister=lister)
    matches = [plugin for plugin in plugins if plugin.name == name]
    if not matches:
        names = ", ".join(sorted({plugin.name for plugin in plugins})) or "none"
        raise UnknownPlugin(f"no installed package offers {name!r} in {group}; installed: {names}")
    if len(matches) > 1:
        origins = "; ".join(f"{plugin.origin} ({plugin.entry_point.value})" for plugin in matches)
        raise AmbiguousPlugin(f"{name!r} in {group} is offered more than once: {origins}; uninstall all but one")
    return matches[0]

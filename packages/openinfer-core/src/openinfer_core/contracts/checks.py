"""Whether a plug-in was written for the contract that is installed, asked before it is imported."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from openinfer_core.contracts.declared import NAME, declared_contract
from openinfer_core.contracts.numbers import CONTRACTS
from openinfer_core.errors import BrokenPlugin, ContractMismatch

if TYPE_CHECKING:
    from openinfer_core.plugins import Plugin


def require_contract(plugin: "Plugin", *, contracts: Mapping[str, int] = CONTRACTS) -> None:
    """Refuses a plug-in that was written for another contract of its group than `contracts` has.

    A group that is not among them is another project's, and is not asked.

    Raises:
        ContractMismatch: it was written for another; the message says which of the two packages to upgrade.
        BrokenPlugin: its module is not there, or cannot be read.
    """
    number = contracts.get(plugin.group)
    if number is None:
        return
    try:
        declared = declared_contract(plugin.entry_point.module)
    except (ImportError, OSError, SyntaxError, ValueError) as error:
        raise BrokenPlugin(
            f"{plugin.described} cannot be read: {type(error).__name__}: {error}; repair or uninstall that package"
        ) from error
    if declared == number:
        return
    from importlib.metadata import version

    absent = "" if declared else f" (its module says no {NAME})"
    distribution = plugin.entry_point.dist
    package = distribution.name if distribution else f"the package of {plugin.entry_point.module}"
    upgrade, wanted = (package, number) if declared < number else ("openinfer-core", declared)
    raise ContractMismatch(
        f"{plugin.described} is written for contract {declared} of {plugin.group}{absent}, and openinfer-core "
        f"{version('openinfer-core')} has contract {number}: upgrade {upgrade} to a release for contract {wanted}"
    )

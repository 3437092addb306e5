"""Contract numbers: which contract a plug-in was written for, and whether our own packages are of one release.

    CONTRACTS                     group of entry points -> the number of its contract, as this release has it
    declared_contract(module)     what a plug-in's module says of itself, read from its source: `OPENINFER_CONTRACT = 1`
    require_contract(plugin)      the two compared, before the plug-in is imported
    require_one_release(name)     a package of ours, and those of ours that it requires, by their metadata
    one_release()                 what only shows when one of our packages uses another: a module, a field that is gone

A number goes up when code written for the one before would no longer work. Each plug-in says the number it was written
for in the module that its entry point names; a module that says none was written for contract 0.
"""

from openinfer_core.contracts.checks import require_contract
from openinfer_core.contracts.declared import declared_contract
from openinfer_core.contracts.numbers import CONTRACTS
from openinfer_core.contracts.releases import OUR_PACKAGES, misfit_of, one_release, require_one_release

__all__ = [
    "CONTRACTS",
    "OUR_PACKAGES",
    "declared_contract",
    "misfit_of",
    "one_release",
    "require_contract",
    "require_one_release",
]

"""What a rank computes with, told by ranks whose packages and files may be others than the engine's, and compared."""

import sys
from collections.abc import Mapping

from openinfer_core import Refused, find_plugin
from openinfer_core.contracts.installed import recorded_digests
from openinfer_core.plugins import MODELS
from openinfer_engine.engine_plan import EnginePlan

_MOST_NAMED = 3


def composition_of(engine_plan: EnginePlan) -> dict[str, str]:
    """The plan's parts, the checkpoint's fingerprint, the kernels' architecture, and each distribution that has a part.

    Distributions are told by a digest over their RECORD, or over the files of an editable one; wheels are not read.
    """
    family = find_plugin(MODELS, engine_plan.definition.name).distribution
    names = {*engine_plan.distributions, *([] if family is None else [family])}
    return {
        "python": "{}.{}".format(*sys.version_info[:2]),
        "architecture": engine_plan.backend.architecture,
        "checkpoint and KV layout": engine_plan.layouts[0].digest,
        **{f"part {name}": text for name, text in engine_plan.parts.items()},
        **{f"distribution {name}": digest for name, digest in recorded_digests(names).items()},
    }


def require_same(here: Mapping[str, str], there: Mapping[str, str], *, rank: int, place: str) -> None:
    """Raises `Refused`, in one sentence, if a rank computes with anything else than rank 0."""
    differences = [
        f"{name} is {there.get(name, 'absent')} there and {here.get(name, 'absent')} here"
        for name in sorted({*here, *there})
        if here.get(name) != there.get(name)
    ]
    if not differences:
        return
    more = len(differences) - _MOST_NAMED
    named = "; ".join(differences[:_MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
    raise Refused(
        f"rank {rank} ({place}) is not composed as rank 0 is: {named}; install the same wheels and the same checkpoint "
        "on all nodes"
    )

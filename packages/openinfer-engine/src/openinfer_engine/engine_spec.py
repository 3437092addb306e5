"""`EngineSpec`: what a process of an engine is told to build, and how it composes that."""

from pathlib import Path
from typing import Any

import msgspec

from openinfer_core import find_plugin, load_family
from openinfer_core.plugins import MODELS
from openinfer_core.timeline import Timeline
from openinfer_engine.composition import Composition, resolve
from openinfer_engine.model import ModelDefinition
from openinfer_engine.options import EngineOptions


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a process of an engine is told to build."""

    family: str
    """Name in the group `openinfer.models`; its object has a `definition`."""
    model_dir: str
    options: msgspec.Raw
    """The family's own options type, as JSON."""

    @classmethod
    def of(cls, definition: ModelDefinition[Any], model_dir: Path, options: EngineOptions) -> "EngineSpec":
        """The spec of a model that this process could compose itself."""
        raw = msgspec.Raw(msgspec.json.encode(options))
        return cls(family=definition.name, model_dir=str(model_dir.resolve()), options=raw)


def compose(spec: EngineSpec, *, timeline: Timeline, rank: int = 0) -> Composition:
    """Finds the family of a spec and resolves its model for one rank; see `resolve` for what it raises."""
    family: Any = load_family(find_plugin(MODELS, spec.family))
    options = msgspec.json.decode(spec.options, type=family.options_type)
    timeline.mark("imports")
    return resolve(family.definition, Path(spec.model_dir), options, timeline=timeline, rank=rank)

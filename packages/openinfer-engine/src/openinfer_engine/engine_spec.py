"""`EngineSpec`: what a process of an engine is told to build."""

from pathlib import Path
from typing import Any

import msgspec

from openinfer_core import find_plugin, load_family
from openinfer_core.plugins import MODELS
from openinfer_engine.model import ModelDefinition
from openinfer_engine.options import EngineOptions


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a process of an engine is told to build."""

    family: str  # name in the group `openinfer.models`; its object has a `definition`
    model_dir: str
    options: msgspec.Raw  # the family's own options type, as JSON

    @classmethod
    def of(cls, definition: ModelDefinition[Any], model_dir: Path, options: EngineOptions) -> "EngineSpec":
        raw = msgspec.Raw(msgspec.json.encode(options))
        return cls(family=definition.name, model_dir=str(model_dir.resolve()), options=raw)

    def read(self) -> tuple[ModelDefinition[Any], EngineOptions]:
        """The family's definition and options; raises `PluginError` if it is not installed here, or failed to load."""
        family: Any = load_family(find_plugin(MODELS, self.family))
        return family.definition, msgspec.json.decode(self.options, type=family.options_type)

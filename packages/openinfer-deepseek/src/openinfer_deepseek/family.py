"""`DeepseekV2Lite`: the family's entry point. It brings a definition; everything else is the engine's."""

from collections.abc import Mapping
from typing import Any

from openinfer_deepseek.definition import DeepseekV2LiteDefinition
from openinfer_deepseek.refusals import refusal
from openinfer_engine.family import EngineFamily


class DeepseekV2Lite(EngineFamily):
    """Implements `openinfer_core.ModelFamily` for DeepSeek-V2-Lite and its relatives."""

    definition = DeepseekV2LiteDefinition()

    def refusal(self, config: Mapping[str, Any]) -> str | None:
        """None if this family serves the model of this `config.json`, else why not."""
        return refusal(config)

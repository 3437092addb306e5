"""`DeepseekV4`: the family's entry point. It brings a definition; everything else is the engine's."""

from collections.abc import Mapping
from typing import Any

from openinfer_deepseek_v4.definition import DeepseekV4Definition
from openinfer_deepseek_v4.refusals import refusal
from openinfer_engine.family import EngineFamily


class DeepseekV4(EngineFamily):
    """Implements `openinfer_core.ModelFamily` for DeepSeek-V4-Flash."""

    definition = DeepseekV4Definition()

    def refusal(self, config: Mapping[str, Any]) -> str | None:
        """None if this family serves the model of this `config.json`, else why not."""
        return refusal(config)

"""`Qwen35`: the family's entry point. It brings a definition; everything else is the engine's."""

from collections.abc import Mapping
from typing import Any

from openinfer_engine.family import EngineFamily
from openinfer_qwen35.definition import Qwen35Definition
from openinfer_qwen35.refusals import refusal


class Qwen35(EngineFamily):
    """Implements `openinfer_core.ModelFamily` for every dense Qwen3.5."""

    definition = Qwen35Definition()

    def refusal(self, config: Mapping[str, Any]) -> str | None:
        """None if this family serves the model of this `config.json`, else why not."""
        return refusal(config)

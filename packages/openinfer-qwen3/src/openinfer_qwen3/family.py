"""`Qwen3`: the family's entry point. It brings a definition; everything else is the engine's."""

from collections.abc import Mapping
from typing import Any

from openinfer_engine.family import EngineFamily
from openinfer_qwen3.definition import Qwen3Definition
from openinfer_qwen3.refusals import refusal


class Qwen3(EngineFamily):
    """Implements `openinfer_core.ModelFamily` for every dense Qwen3."""

    definition = Qwen3Definition()

    def refusal(self, config: Mapping[str, Any]) -> str | None:
        """None if this family serves the model of this `config.json`, else why not."""
        return refusal(config)

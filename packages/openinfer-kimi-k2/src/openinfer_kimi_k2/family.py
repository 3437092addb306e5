"""`KimiK2`: the family's entry point. It brings a definition; everything else is the engine's."""

from collections.abc import Mapping
from typing import Any

from openinfer_engine.family import EngineFamily
from openinfer_kimi_k2.definition import KimiK2Definition
from openinfer_kimi_k2.refusals import refusal


class KimiK2(EngineFamily):
    """Implements `openinfer_core.ModelFamily` for all text models of Kimi-K2."""

    definition = KimiK2Definition()

    def refusal(self, config: Mapping[str, Any]) -> str | None:
        """None if this family serves the model of this `config.json`, else why not."""
        return refusal(config)

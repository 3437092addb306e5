"""`KimiK2`: the family's entry point, and which configs it serves."""

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from openinfer_deepseek.family import V3_ROUTER, LatentDefinition, v3_reasons
from openinfer_deepseek.model import DeepseekConfig
from openinfer_engine.family import EngineFamily
from openinfer_engine.refusals import PLAIN_DECODER, architecture_reasons, key_reasons
from openinfer_engine.weights.quantization_config import quantisation_reasons
from openinfer_kimi_k2 import model

OPENINFER_CONTRACT = 1

CHANGES_THE_MODEL: Mapping[str, str] = MappingProxyType(
    {**PLAIN_DECODER, "compression_config": "compressed weights are served as quantization_config says them"}
)


class KimiK2Definition(LatentDefinition):
    """Kimi-K2, and the text model of K2.5."""

    name = "kimi_k2"
    config_type = model.KimiK2Config

    def refusal(self, config: Mapping[str, Any]) -> str | None:
        text = model.text_config(config)
        if text is None:
            known = f"{model.TEXT} or {model.VISION_LANGUAGE}"
            return f"not a {known} model: its model_type is {config.get('model_type')!r}"
        return "; ".join(_reasons(config, text)) or None

    def text_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**V3_ROUTER, **(model.text_config(config) or {})}

    def ignorable_tensors(self, config: DeepseekConfig) -> Collection[str]:
        """Also the vision tower."""
        return {*super().ignorable_tensors(config), *model.VISION_PARTS}


class KimiK2(EngineFamily):
    """Implements `openinfer_core.ModelFamily` for Kimi-K2."""

    definition = KimiK2Definition()


def _reasons(config: Mapping[str, Any], text: Mapping[str, Any]) -> Iterator[str]:
    yield from architecture_reasons(config, "DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration")
    yield from key_reasons(text, CHANGES_THE_MODEL)
    yield from v3_reasons(text)
    yield from quantisation_reasons(text)

"""DeepSeek-V2 and V3: found by openinfer through the entry points `deepseek_v2` and `deepseek_v3`."""

from openinfer_deepseek.family import DeepseekV2, DeepseekV3

__all__ = ["DeepseekV2", "DeepseekV3"]

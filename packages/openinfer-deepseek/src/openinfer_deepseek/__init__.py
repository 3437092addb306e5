"""DeepSeek-V2: found by openinfer through the entry point `deepseek_v2` of the group `openinfer.models`."""

from openinfer_deepseek.family import DeepseekV2

__all__ = ["DeepseekV2"]

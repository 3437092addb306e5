"""DeepSeek-V4-Flash: found by openinfer through the entry point `deepseek_v4` of `openinfer.models`."""

from openinfer_deepseek_v4.family import DeepseekV4

__all__ = ["DeepseekV4"]

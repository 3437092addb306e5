"""What folders of drafters for Qwen3 are checked for, whichever kind they are."""

from collections.abc import Iterator, Mapping
from typing import Any

from openinfer_core import Refused
from openinfer_engine.drafters.contract import DrafterSetting
from openinfer_engine.refusals import PLAIN_WEIGHTS, key_reasons
from openinfer_kv_cache import KvDtype
from openinfer_qwen3.model import Qwen3Config


def key_reasons_of_folder(config: Mapping[str, Any], changes: Mapping[str, str]) -> Iterator[str]:
    """Why a folder is not served, by its keys; quantised weights are not."""
    yield from key_reasons(config, {**PLAIN_WEIGHTS, **changes})


def check_same_shape(num_kv_heads: int, head_dim: int, *, model: Qwen3Config, setting: DrafterSetting) -> None:
    """Raises `Refused` for KV that cannot lie in the model's blocks."""
    if (num_kv_heads, head_dim) != (model.num_key_value_heads, model.head_dim):
        raise Refused(
            f"its KV has {num_kv_heads} heads of {head_dim}, and the model's {model.num_key_value_heads} of "
            f"{model.head_dim}: only KV of one shape is served"
        )
    if setting.kv_dtype is KvDtype.FLOAT8_E4M3:
        raise Refused("it keeps hidden states with KV, and FP8 holds none: leave --kv-cache-dtype at auto")

"""What `--kv-cache-dtype` means for a model on a device: the dtype of its paged tensors, and who refuses it."""

from typing import Any

from openinfer_core import Refused
from openinfer_engine.backends import Backend
from openinfer_engine.model import ModelDefinition
from openinfer_engine.options import EngineOptions, KvCacheDtype
from openinfer_engine.worker.paged_tensors import is_fp8
from openinfer_kernels import CacheFormat
from openinfer_kv_cache import FP8_SCALE_BYTES, KvDtype, KvLayout

BYTES_PER_GIB = 1 << 30


def choose_kv_dtype(definition: ModelDefinition[Any], options: EngineOptions, backend: Backend) -> KvDtype:
    """What `ModelDefinition.kv_spec` is asked for.

    Raises:
        Refused: the family does not keep its KV so, or the device computes in another dtype than BF16.
    """
    if options.kv_cache_dtype is KvCacheDtype.FP8:
        definition.check_cache_format(CacheFormat.FP8)
        return KvDtype.FLOAT8_E4M3
    if options.kv_cache_dtype is KvCacheDtype.BF16 and backend.dtype is not KvDtype.BFLOAT16:
        raise Refused(
            f"kv_cache_dtype: the device {options.device} keeps KV in {backend.dtype}, or in fp8; leave it at auto"
        )
    return backend.dtype


def check_scales(layout: KvLayout) -> None:
    """Raises `Refused` where scales of FP8 would begin inside a number."""
    if not is_fp8(layout):
        return
    _, _, _, block_tokens, width = layout.block_shape()
    if block_tokens * (width - FP8_SCALE_BYTES) % FP8_SCALE_BYTES:
        raise Refused(
            f"kv_cache_dtype fp8: blocks of {block_tokens} tokens with heads of {width - FP8_SCALE_BYTES} values leave "
            f"their scales at no multiple of {FP8_SCALE_BYTES} bytes; choose another block_size_tokens"
        )


def described_kv_dtype(layout: KvLayout, dtype: KvDtype) -> str:
    """For `openinfer plan`, and among an engine's parts."""
    return "fp8 (E4M3, a float32 scale for each token and head)" if is_fp8(layout) else str(dtype)

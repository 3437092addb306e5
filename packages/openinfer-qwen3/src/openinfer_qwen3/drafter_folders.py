"""What folders of drafters for Qwen3 are checked for, whichever kind they are."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from openinfer_core import InvalidCheckpoint, Refused
from openinfer_engine.drafters.contract import DrafterSetting
from openinfer_engine.model import WeightSource
from openinfer_engine.refusals import PLAIN_WEIGHTS, key_reasons
from openinfer_engine.weights.stored_tensor import Repeated, StoredTensor, TensorSpec
from openinfer_kernels import HostArray
from openinfer_qwen3.model import Qwen3Config


def key_reasons_of_folder(config: Mapping[str, Any], changes: Mapping[str, str]) -> Iterator[str]:
    """Why a folder is not served, by its keys; quantised weights are not."""
    yield from key_reasons(config, {**PLAIN_WEIGHTS, **changes})


def folder_and_model(setting: DrafterSetting, name: str) -> tuple[Path, Qwen3Config]:
    """What a drafter that is a folder is asked of.

    Raises:
        Refused: no folder, or another family's model.
    """
    if not isinstance(setting.model_config, Qwen3Config):
        raise Refused("it drafts for Qwen3 models, and this model is none")
    if setting.drafter_dir is None:
        raise Refused(no_folder(name))
    return setting.drafter_dir, setting.model_config


def no_folder(name: str) -> str:
    """Why a drafter that is a folder is refused without one."""
    return f"name the folder of its weights: --speculative {name},model=DIR"


def check_same_shape(num_kv_heads: int, head_dim: int, *, model: Qwen3Config) -> None:
    """Raises `Refused` for KV that cannot lie in the model's blocks."""
    if (num_kv_heads, head_dim) != (model.num_key_value_heads, model.head_dim):
        raise Refused(
            f"its KV has {num_kv_heads} heads of {head_dim}, and the model's {model.num_key_value_heads} of "
            f"{model.head_dim}: only KV of one shape is served"
        )


class VocabularyMap(Protocol):
    """What a folder says of the ids of its head."""

    @property
    def vocab_size(self) -> int:
        """Of the model."""
        ...

    @property
    def draft_vocab_size(self) -> int:
        """Rows of the head."""
        ...

    @property
    def has_map(self) -> bool:
        """`d2t`: how far each id of the head is from the model's id of the same token."""
        ...

    @property
    def has_mask(self) -> bool:
        """`t2d`: whether each token of the model is one of the head's, which `d2t` says, too."""
        ...


def map_tensors(config: VocabularyMap) -> dict[str, TensorSpec]:
    """Those of the map that the folder has."""
    tensors: dict[str, TensorSpec] = {}
    if config.has_map:
        zeros = Repeated(values=(0.0,))
        tensors["d2t"] = StoredTensor(shape=(config.draft_vocab_size,), dtypes=("I64",), dummy=zeros)
    if config.has_mask:
        ones = Repeated(values=(1.0,))
        tensors["t2d"] = StoredTensor(shape=(config.vocab_size,), dtypes=("BOOL",), dummy=ones)
    return tensors


def target_ids(config: VocabularyMap, weights: WeightSource) -> HostArray:
    """`[draft_vocab_size]` int32: the model's token id of each id of the head.

    Raises:
        InvalidCheckpoint: the map names a token twice, or one that the model has not.
    """
    ids = np.arange(config.draft_vocab_size, dtype=np.int64)
    if config.has_map:
        ids = ids + np.asarray(weights.read_stored("d2t"), np.int64)
    if ids.min() < 0 or ids.max() >= config.vocab_size or len(np.unique(ids)) != len(ids):
        raise InvalidCheckpoint(
            f"d2t maps {config.draft_vocab_size} ids to {ids.min()} .. {ids.max()}, {len(np.unique(ids))} different "
            f"ones: each must be another token of 0 .. {config.vocab_size - 1}"
        )
    if config.has_mask:
        named = np.flatnonzero(np.asarray(weights.read_stored("t2d")))
        if not np.array_equal(named, np.sort(ids)):
            both = len(np.intersect1d(named, ids))
            raise InvalidCheckpoint(f"t2d names {len(named)} tokens, and d2t {both} of them: they must be the same")
    return ids.astype(np.int32)

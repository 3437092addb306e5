"""`DeepseekV4Definition`: what the engine asks about the architecture before it loads a weight."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec

from openinfer_core import InvalidCheckpoint, Refused
from openinfer_deepseek_v4.config import DeepseekV4Config, LayerKind
from openinfer_deepseek_v4.model import ENTRIES, INDEX, DeepseekV4Model, load
from openinfer_deepseek_v4.published import MODEL_TYPE, normalised
from openinfer_deepseek_v4.refusals import refusal
from openinfer_deepseek_v4.tensors import MTP_PREFIX, as_stored, stored_name, tensors
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.model import ModelLimits, WeightSource
from openinfer_engine.weights.safetensors_file import TensorInfo
from openinfer_engine.weights.stored_tensor import TensorSpec
from openinfer_kernels import Ops
from openinfer_kv_cache import KvDtype, KvSpec, PagedGroup, PagedTensor, StateSlotGroup, StateTensor


class DeepseekV4Definition:
    """Implements `openinfer_engine.model.ModelDefinition`, which describes every method."""

    @property
    def name(self) -> str:
        """The family's name."""
        return MODEL_TYPE

    def parse(self, config: Mapping[str, Any]) -> DeepseekV4Config:
        """The typed config.

        Raises:
            Refused: the config asks for what this family does not compute.
            InvalidCheckpoint: a key is missing or out of range.
        """
        reason = refusal(config)
        if reason is not None:
            raise Refused(reason)
        try:
            return msgspec.convert(normalised(config), DeepseekV4Config)
        except msgspec.ValidationError as error:
            raise InvalidCheckpoint(f"config.json is no valid {MODEL_TYPE} config: {error}") from error

    def as_stored(self, config: DeepseekV4Config, tensors: Mapping[str, TensorInfo]) -> DeepseekV4Config:
        """Names and formats are those of the checkpoint."""
        return as_stored(config, tensors)

    def limits(self, config: DeepseekV4Config) -> ModelLimits:
        """The context that it was trained for, and the index scores of a step."""
        is_indexed = config.num_layers_of(LayerKind.SPARSE) > 0
        return ModelLimits(
            max_model_tokens=config.max_position_embeddings,
            vocab_size=config.vocab_size,
            tokens_per_score=config.sparse_ratio if is_indexed else None,
        )

    def tensors(self, config: DeepseekV4Config) -> Mapping[str, TensorSpec]:
        """Every tensor that `load` reads."""
        return tensors(config)

    def ignorable_tensors(self, config: DeepseekV4Config) -> Collection[str]:
        """The block that drafts tokens: nothing drafts yet."""
        return {f"{MTP_PREFIX}.", stored_name(config, f"{MTP_PREFIX}.")}

    def kv_spec(
        self, config: DeepseekV4Config, *, model_tag: str, dtype: KvDtype, num_ranks: int, rank_index: int
    ) -> KvSpec:
        """Compressed entries and index keys in blocks; windows and open windows of compressors in slots.

        All ranks have all of them: heads share them.
        """
        return KvSpec(
            model_tag=model_tag,
            paged=tuple(_paged(config, dtype)),
            slots=tuple(_slots(config, dtype)),
            num_ranks=num_ranks,
            rank_index=rank_index,
        )

    def check_ranks(self, config: DeepseekV4Config, ranks: int) -> None:
        """Each rank has equally many heads of both kinds, output groups and experts, and an equal piece of a width."""
        names = ("o_groups", "index_n_heads", "n_routed_experts", "moe_intermediate_size")
        shared = {name: int(getattr(config, name)) for name in names}
        possible = [n for n in range(1, config.o_groups + 1) if not any(size % n for size in shared.values())]
        if ranks not in possible:
            sizes = ", ".join(f"{name} is {size}" for name, size in shared.items())
            raise Refused(
                f"{ranks} ranks cannot share the model: {sizes}; possible are {', '.join(map(str, possible))}"
            )

    def load(
        self,
        config: DeepseekV4Config,
        weights: WeightSource,
        *,
        ops: Ops,
        communicator: Communicator,
        max_model_tokens: int,
    ) -> DeepseekV4Model:
        """Uploads this rank's weights."""
        return load(config, weights, ops=ops, communicator=communicator, max_model_tokens=max_model_tokens)


def _paged(config: DeepseekV4Config, dtype: KvDtype) -> Iterator[PagedGroup]:
    for name, kind, dim in _entry_groups(config):
        ratio = config.sparse_ratio if kind is LayerKind.SPARSE else config.heavy_ratio
        tensor = PagedTensor(name="kv", num_heads=1, head_dim=dim, dtype=dtype, tokens_per_row=ratio)
        yield PagedGroup(
            name=name,
            num_layers=config.num_layers_of(kind),
            tensors=(tensor,),
            rope_tag=f"last {config.qk_rope_head_dim} dimensions in pairs, at the window's first token: "
            f"{config.ropes[1]}",
        )


def _slots(config: DeepseekV4Config, dtype: KvDtype) -> Iterator[StateSlotGroup]:
    window = StateTensor(name="kv", shape=(config.sliding_window, config.head_dim), dtype=dtype)
    yield StateSlotGroup(name="window", num_layers=config.num_hidden_layers, tensors=(window,))
    for name, kind, dim in _entry_groups(config):
        shape = (2 * config.sparse_ratio, 4 * dim) if kind is LayerKind.SPARSE else (3, dim)
        tensor = StateTensor(name="tokens", shape=shape, dtype=KvDtype.FLOAT32)
        yield StateSlotGroup(name=f"open_{name}", num_layers=config.num_layers_of(kind), tensors=(tensor,))


def _entry_groups(config: DeepseekV4Config) -> Iterator[tuple[str, LayerKind, int]]:
    """Name, layers and dimension of each paged group."""
    groups = (
        (ENTRIES[LayerKind.SPARSE], LayerKind.SPARSE, config.head_dim),
        (INDEX, LayerKind.SPARSE, config.index_head_dim),
        (ENTRIES[LayerKind.HEAVY], LayerKind.HEAVY, config.head_dim),
    )
    return (group for group in groups if config.num_layers_of(group[1]))

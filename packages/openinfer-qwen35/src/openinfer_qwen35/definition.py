"""`Qwen35Definition`: what the engine asks about the architecture before it loads a weight."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from openinfer_core import InvalidCheckpoint, Refused
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.model import ModelLimits, WeightSource
from openinfer_kernels import Ops
from openinfer_kv_cache import KvDtype, KvSpec, PagedGroup, PagedTensor, StateSlotGroup, StateTensor
from openinfer_qwen35.model import LINEAR_ATTENTION, LayerKind, Qwen35Config, Qwen35Model, load, tensors
from openinfer_qwen35.published import text_config
from openinfer_qwen35.refusals import refusal


class Qwen35Definition:
    """Implements `openinfer_engine.model.ModelDefinition`, which describes every method."""

    @property
    def name(self) -> str:
        """The family's name."""
        return "qwen35"

    def parse(self, config: Mapping[str, Any]) -> Qwen35Config:
        """The typed config of the text model.

        Raises:
            Refused: the config asks for what this family does not compute.
            InvalidCheckpoint: a key is missing or out of range.
        """
        reason = refusal(config)
        if reason is not None:
            raise Refused(reason)
        try:
            return msgspec.convert(text_config(config), Qwen35Config)
        except msgspec.ValidationError as error:
            raise InvalidCheckpoint(f"config.json is no valid {self.name} config: {error}") from error

    def limits(self, config: Qwen35Config) -> ModelLimits:
        """The context that it was trained for."""
        return ModelLimits(max_model_tokens=config.max_position_embeddings, vocab_size=config.vocab_size)

    def tensors(self, config: Qwen35Config) -> Mapping[str, tuple[int, ...]]:
        """Every tensor that `load` reads."""
        return tensors(config)

    def ignorable_tensors(self, config: Qwen35Config) -> Collection[str]:
        """The vision tower, the layer that drafts tokens, and the head of a tied model, which is its embedding."""
        names = {"model.visual.", "mtp."}
        return names | {"lm_head.weight"} if config.tie_word_embeddings else names

    def kv_spec(
        self, config: Qwen35Config, *, model_tag: str, dtype: KvDtype, num_ranks: int, rank_index: int
    ) -> KvSpec:
        """K after norm and RoPE, and V, of full attention; states and convolution inputs of linear attention."""
        heads = config.num_key_value_heads // num_ranks
        attention = PagedGroup(
            name="attention",
            num_layers=config.num_layers_of(LayerKind.FULL),
            tensors=tuple(
                PagedTensor(name=name, num_heads=heads, head_dim=config.head_dim, dtype=dtype) for name in "kv"
            ),
            rope_tag=f"half layout of the first {config.rotary_dim} dimensions: {config.rope}",
        )
        channels = sum(config.linear_heights) // num_ranks
        value_heads = config.linear_num_value_heads // num_ranks
        linear_attention = StateSlotGroup(
            name=LINEAR_ATTENTION,
            num_layers=config.num_layers_of(LayerKind.LINEAR),
            tensors=(
                StateTensor(name="conv", shape=(channels, config.linear_conv_kernel_dim - 1), dtype=dtype),
                StateTensor(
                    name="state",
                    shape=(value_heads, config.linear_key_head_dim, config.linear_value_head_dim),
                    dtype=KvDtype.FLOAT32,
                ),
            ),
        )
        return KvSpec(
            model_tag=model_tag,
            paged=(attention,),
            slots=(linear_attention,),
            num_ranks=num_ranks,
            rank_index=rank_index,
        )

    def check_ranks(self, config: Qwen35Config, ranks: int) -> None:
        """Each rank has equally many heads of each kind, and an equal piece of the MLP's width."""
        shared = {
            name: getattr(config, name) for name in ("num_key_value_heads", "linear_num_key_heads", "intermediate_size")
        }
        possible = [
            n for n in range(1, config.num_key_value_heads + 1) if not any(size % n for size in shared.values())
        ]
        if ranks not in possible:
            sizes = ", ".join(f"{name} is {size}" for name, size in shared.items())
            raise Refused(
                f"{ranks} ranks cannot share the model: {sizes}; possible are {', '.join(map(str, possible))}"
            )

    def load(
        self,
        config: Qwen35Config,
        weights: WeightSource,
        *,
        ops: Ops,
        communicator: Communicator,
        max_model_tokens: int,
    ) -> Qwen35Model:
        """Uploads this rank's weights."""
        return load(config, weights, ops=ops, communicator=communicator, max_model_tokens=max_model_tokens)

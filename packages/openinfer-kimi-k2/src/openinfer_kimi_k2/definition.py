"""`KimiK2Definition`: what the engine asks about the architecture before it loads a weight."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from openinfer_core import InvalidCheckpoint, Refused
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.model import ModelLimits, WeightSource
from openinfer_engine.weights.stored_tensor import TensorSpec
from openinfer_kernels import Ops
from openinfer_kimi_k2.model import KimiK2Config, KimiK2Model, load, tensors
from openinfer_kimi_k2.published import TEXT, VISION_PARTS, text_config
from openinfer_kimi_k2.refusals import refusal
from openinfer_kv_cache import KvDtype, KvSpec, PagedGroup, PagedTensor


class KimiK2Definition:
    """Implements `openinfer_engine.model.ModelDefinition`, which describes every method."""

    @property
    def name(self) -> str:
        """The family's name."""
        return TEXT

    def parse(self, config: Mapping[str, Any]) -> KimiK2Config:
        """The typed config.

        Raises:
            Refused: the config asks for what this family does not compute.
            InvalidCheckpoint: a key is missing or out of range.
        """
        reason = refusal(config)
        if reason is not None:
            raise Refused(reason)
        try:
            return msgspec.convert(text_config(config), KimiK2Config)
        except msgspec.ValidationError as error:
            raise InvalidCheckpoint(f"config.json is no valid {TEXT} config: {error}") from error

    def limits(self, config: KimiK2Config) -> ModelLimits:
        """YaRN reaches its factor times the context of the pre-training, whatever `max_position_embeddings` says."""
        yarn = config.rope.yarn
        reach = config.max_position_embeddings
        if yarn is not None:
            reach = int(yarn.factor * yarn.original_max_position_embeddings)
        return ModelLimits(max_model_tokens=reach, vocab_size=config.vocab_size)

    def tensors(self, config: KimiK2Config) -> Mapping[str, TensorSpec]:
        """Every tensor that `load` reads."""
        return tensors(config)

    def ignorable_tensors(self, config: KimiK2Config) -> Collection[str]:
        """The vision tower, RoPE frequencies, layers that draft tokens, and the head of a tied model, its embedding."""
        prefix, layers = config.tensor_prefix, config.num_hidden_layers
        names = {*VISION_PARTS, f"{prefix}model.rotary_emb.inv_freq"}
        names |= {f"{prefix}model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(layers)}
        names |= {f"{prefix}model.layers.{layers + i}." for i in range(config.num_nextn_predict_layers)}
        return names | {f"{prefix}lm_head.weight"} if config.tie_word_embeddings else names

    def kv_spec(
        self, config: KimiK2Config, *, model_tag: str, dtype: KvDtype, num_ranks: int, rank_index: int
    ) -> KvSpec:
        """The latent after its norm beside the shared key after RoPE: the same on every rank, as all heads read it."""
        group = PagedGroup(
            name="attention",
            num_layers=config.num_hidden_layers,
            tensors=(
                PagedTensor(
                    name="latent", num_heads=1, head_dim=config.kv_lora_rank + config.qk_rope_head_dim, dtype=dtype
                ),
            ),
            rope_tag=f"pairs of the last {config.qk_rope_head_dim} dimensions: {config.rope}",
        )
        return KvSpec(model_tag=model_tag, paged=(group,), num_ranks=num_ranks, rank_index=rank_index)

    def check_ranks(self, config: KimiK2Config, ranks: int) -> None:
        """Each rank has equally many heads and experts, and an equal piece of the width of what is no routed expert."""
        shared = {
            name: getattr(config, name)
            for name in ("num_attention_heads", "n_routed_experts", "intermediate_size", "shared_size")
        }
        possible = [
            n for n in range(1, config.num_attention_heads + 1) if not any(size % n for size in shared.values())
        ]
        if ranks not in possible:
            sizes = ", ".join(f"{name} is {size}" for name, size in shared.items())
            raise Refused(
                f"{ranks} ranks cannot share the model: {sizes}; possible are {', '.join(map(str, possible))}"
            )

    def load(
        self,
        config: KimiK2Config,
        weights: WeightSource,
        *,
        ops: Ops,
        communicator: Communicator,
        max_model_tokens: int,
    ) -> KimiK2Model:
        """Uploads this rank's weights."""
        return load(config, weights, ops=ops, communicator=communicator, max_model_tokens=max_model_tokens)

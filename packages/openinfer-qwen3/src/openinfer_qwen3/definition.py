"""`Qwen3Definition`: what the engine asks about the architecture before it loads a weight."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from openinfer_core import InvalidCheckpoint, Refused
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.model import ModelLimits, WeightSource
from openinfer_kernels import Ops
from openinfer_kv_cache import KvDtype, KvSpec, PagedGroup, PagedTensor
from openinfer_qwen3.model import Qwen3Config, Qwen3Model, load, tensors
from openinfer_qwen3.refusals import MODEL_TYPE, refusal


class Qwen3Definition:
    """Implements `openinfer_engine.model.ModelDefinition`, which describes every method."""

    @property
    def name(self) -> str:
        """The family's name."""
        return MODEL_TYPE

    def parse(self, config: Mapping[str, Any]) -> Qwen3Config:
        """The typed config.

        Raises:
            Refused: the config asks for what this family does not compute.
            InvalidCheckpoint: a key is missing or out of range.
        """
        reason = refusal(config)
        if reason is not None:
            raise Refused(reason)
        try:
            return msgspec.convert(config, Qwen3Config)
        except msgspec.ValidationError as error:
            raise InvalidCheckpoint(f"config.json is no valid {MODEL_TYPE} config: {error}") from error

    def limits(self, config: Qwen3Config) -> ModelLimits:
        """YaRN reaches its factor times the context of the pre-training, whatever `max_position_embeddings` says."""
        yarn = config.rope.yarn
        reach = config.max_position_embeddings
        if yarn is not None:
            reach = int(yarn.factor * yarn.original_max_position_embeddings)
        return ModelLimits(max_model_tokens=reach, vocab_size=config.vocab_size)

    def tensors(self, config: Qwen3Config) -> Mapping[str, tuple[int, ...]]:
        """Every tensor that `load` reads."""
        return tensors(config)

    def ignorable_tensors(self, config: Qwen3Config) -> Collection[str]:
        """RoPE frequencies, which follow from the config, and the head of a tied model, which is its embedding."""
        layers = range(config.num_hidden_layers)
        names = {"model.rotary_emb.inv_freq", *(f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in layers)}
        return names | {"lm_head.weight"} if config.tie_word_embeddings else names

    def kv_spec(
        self, config: Qwen3Config, *, model_tag: str, dtype: KvDtype, num_ranks: int, rank_index: int
    ) -> KvSpec:
        """K after norm and RoPE, and V, of this rank's KV heads."""
        heads = config.num_key_value_heads // num_ranks
        group = PagedGroup(
            name="attention",
            num_layers=config.num_hidden_layers,
            tensors=tuple(
                PagedTensor(name=name, num_heads=heads, head_dim=config.head_dim, dtype=dtype) for name in "kv"
            ),
            rope_tag=f"half layout: {config.rope}",
        )
        return KvSpec(model_tag=model_tag, paged=(group,), num_ranks=num_ranks, rank_index=rank_index)

    def check_ranks(self, config: Qwen3Config, ranks: int) -> None:
        """Each rank has equally many KV heads with their query heads, and an equal piece of the MLP's width."""
        heads, width = config.num_key_value_heads, config.intermediate_size
        possible = [n for n in range(1, heads + 1) if heads % n == 0 and width % n == 0]
        if ranks not in possible:
            raise Refused(
                f"{ranks} ranks cannot share the model: num_key_value_heads is {heads} and intermediate_size {width}; "
                f"possible are {', '.join(map(str, possible))}"
            )

    def load(
        self,
        config: Qwen3Config,
        weights: WeightSource,
        *,
        ops: Ops,
        communicator: Communicator,
        max_model_tokens: int,
    ) -> Qwen3Model:
        """Uploads this rank's weights."""
        return load(config, weights, ops=ops, communicator=communicator, max_model_tokens=max_model_tokens)

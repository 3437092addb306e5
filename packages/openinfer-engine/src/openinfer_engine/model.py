"""What a model family gives the engine: a `ModelDefinition`, and the `Model` it loads on each rank.

The engine owns memory, batches and sampling; a model owns its equations. A model sees operators, a communicator
and a batch, and never asks which device or how many ranks there are.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar, cast, runtime_checkable

import msgspec
import numpy as np

from openinfer_core import InvalidCheckpoint, Refused
from openinfer_core.errors import ContractViolation
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.options import DeviceKind
from openinfer_engine.weights.stored_tensor import TensorSpec
from openinfer_kernels import (
    Array,
    AttentionBatch,
    CacheFormat,
    KeptInputs,
    Ops,
    PagedCache,
    RopeParameters,
    WeightPart,
)
from openinfer_kv_cache import KvDtype, KvSpec

if TYPE_CHECKING:
    from openinfer_engine.weights.quantised import StoredMatrix

Config = TypeVar("Config")
KvLayers: TypeAlias = Mapping[str, Sequence[PagedCache]]
"""Name of a paged group -> the cache of each of its layers, made once per worker."""


class Shard(IntEnum):
    """Which shard of a tensor a rank has; the value is the axis along which it is sharded."""

    WHOLE = -1
    """Every rank has all of it."""
    COLUMN_PARALLEL = 0
    """Each rank has a piece of the outputs: rows of `[out, in]`."""
    ROW_PARALLEL = 1
    """Each rank has a piece of the inputs: columns of `[out, in]`; the results are summed."""


class WeightSource(Protocol):
    """The tensors of one checkpoint as one rank sees them."""

    def read(self, name: str, shard: Shard = Shard.WHOLE) -> WeightPart:
        """This rank's piece of a tensor, for `Ops.upload_weight`: nothing is copied yet.

        Raises:
            InvalidCheckpoint: no such tensor, or its size does not divide by the ranks.
        """
        ...

    def read_stored(self, name: str, shard: Shard = Shard.WHOLE) -> Any:
        """This rank's piece of a tensor that `ModelDefinition.tensors` calls a `StoredTensor`, in its own dtype.

        An array in host memory, F8_E4M3 and F8_E8M0 as their bits in uint8, F4 as pairs in uint8; codes may be
        `RandomCodes`. `weights.quantised.read_quantised` brings codes and scales together.

        Raises:
            InvalidCheckpoint: no such tensor, or its size does not divide by the ranks.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What a config bounds."""

    max_model_tokens: int
    """Longest context its position encoding allows."""
    vocab_size: int
    """Rows of the embedding; the tokenizer may have fewer ids."""
    tokens_per_score: int | None = None
    """A step holds, for each of its tokens, a float32 score of each so many tokens of the context; None: none."""


class Model(Protocol):
    """A loaded model on one rank."""

    def forward(self, token_ids: Array, *, batch: AttentionBatch, kv_cache: KvLayers) -> Array:
        """Hidden states after the final norm, `[T, h]`; appends this step's K and V to `kv_cache`.

        A model whose `KvSpec` has slot groups finds its recurrent states in `batch.states`, by `GROUP.TENSOR`. One
        whose blocks are no dense array finds its paged tensors in `batch.caches`, likewise; `kv_cache` is then empty.
        """
        ...

    def logits(self, hidden: Array) -> Array:
        """`[n, V]` float32 for `hidden [n, h]`, whole vocabulary on every rank."""
        ...


def checked_hidden(model: Model, hidden: Array, *, num_tokens: int) -> Array:
    """What `forward` gave, `[T, h]`; raises `ContractViolation` if it has not a row for each token."""
    if getattr(hidden, "ndim", None) != 2 or len(hidden) != num_tokens:
        raise ContractViolation(
            f"{_described(model)}.forward gave {_shown(hidden)} for {num_tokens} tokens, not [T, h]"
        )
    return hidden


def checked_logits(model: Model, logits: Array, *, num_rows: int, vocab_size: int) -> Array:
    """What `logits` gave, `[n, V]` float32; raises `ContractViolation` if it is anything else."""
    if getattr(logits, "shape", None) != (num_rows, vocab_size) or logits.dtype != np.float32:
        expected = f"[{num_rows}, {vocab_size}] float32, the whole vocabulary on every rank"
        raise ContractViolation(f"{_described(model)}.logits gave {_shown(logits)}, not {expected}")
    return logits


def _described(model: Model) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"


def _shown(array: object) -> str:
    shape, dtype = getattr(array, "shape", None), getattr(array, "dtype", None)
    return type(array).__name__ if shape is None else f"{[*shape]} {dtype}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsIndices:
    """The tokens whose logits are computed, each the last one of its row."""

    tokens: Array
    """`[n]` int32, ascending indices into the tokens of the step; n may be 0."""
    batch: AttentionBatch
    """Where they stand: n rows of one token each. Of no use where n is 0."""


@runtime_checkable
class LastTokenModel(Protocol):
    """A `Model` with last-token selection: of a prefill chunk only the last token is sampled from.

    It may leave out what its last layer would compute for the others, beside their keys and values: 2 % of a prompt.
    """

    def forward_last_tokens(
        self, token_ids: Array, *, batch: AttentionBatch, kv_cache: KvLayers, last: LogitsIndices
    ) -> Array:
        """As `Model.forward`, but for these tokens alone: `[n, h]`."""
        ...


@runtime_checkable
class ModelOfDealtExperts(Protocol):
    """A `Model` whose data-parallel ranks share nothing but experts (`distributed/expert_group.py`)."""

    def join_step(self) -> None:
        """Of a rank without rows in a step: computes its experts' part of the other ranks' rows."""
        ...


@runtime_checkable
class ReplayedModel(Protocol):
    """A `Model` all of whose recurrent states can take in tokens of a row once it is known which of them count.

    A forward pass then leaves the states of the rows that `AttentionBatch.kept_rows` names as they are, and keeps what
    these tokens would change them by.
    """

    def keep_inputs(self, states: Mapping[str, Array], *, most_tokens: int) -> KeptInputs | None:
        """Memory for `AttentionBatch.kept` of `states [slots, ...]`; None where states of this shape are not replayed.

        Args:
            states: by name, as in a batch; those of sequence slots alone.
            most_tokens: of a row.
        """
        ...

    def replay(self, states: Mapping[str, Array], kept: KeptInputs, *, slots: Array, counts: Array) -> None:
        """Has states of `slots [n]` int32 take in the first `counts [n]` int32 tokens that were kept of them."""
        ...


@runtime_checkable
class TappedModel(Protocol):
    """A `Model` that hands over the inputs of some of its layers, for drafters that read them."""

    def forward_tapped(
        self, token_ids: Array, *, batch: AttentionBatch, kv_cache: KvLayers, taps: Sequence[int]
    ) -> tuple[Array, tuple[Array, ...]]:
        """As `Model.forward`, and of each tap `i`, ascending, the residual stream `[T, h]` before layer `i`.

        The stream before layer `num_hidden_layers` is what the last layer gives, before the final norm.
        """
        ...


@runtime_checkable
class LastTokenTappedModel(TappedModel, Protocol):
    """A `TappedModel` with last-token selection, for drafters that read taps alone."""

    def forward_tapped_last_tokens(
        self,
        token_ids: Array,
        *,
        batch: AttentionBatch,
        kv_cache: KvLayers,
        taps: Sequence[int],
        last: LogitsIndices,
    ) -> tuple[Array, tuple[Array, ...]]:
        """As `forward_tapped`, all tokens' taps but the hidden states of these tokens alone: `[n, h]`."""
        ...


class RotaryConfig(Protocol):
    """What the defaults of `ModelDefinition` read of a config: names of `config.json`, and its rotary embedding."""

    vocab_size: int
    num_hidden_layers: int
    max_position_embeddings: int
    tie_word_embeddings: bool

    @property
    def rope(self) -> RopeParameters:
        """From either spelling."""
        ...


class ModelModule(Protocol):
    """What a family's `model.py` offers, a Python module, beside its config type."""

    def tensors(self, config: Any) -> Mapping[str, TensorSpec]:
        """Every tensor of the checkpoint that `load` reads, with its whole shape.

        A plain shape is that of a weight in BF16, float16 or float32; whatever else is stored is a `StoredTensor`.
        """
        ...

    def load(
        self, config: Any, weights: WeightSource, *, ops: Ops, communicator: Communicator, max_model_tokens: int
    ) -> Model:
        """Uploads this rank's weights, and a RoPE table for positions below `max_model_tokens`."""
        ...


class ModelDefinition(ABC, Generic[Config]):
    """A family's architecture, before any weight is read.

    What most families would repeat is here; `limits` and `ignorable_tensors` read the config as `RotaryConfig`, and a
    family whose config is another overrides them.
    """

    name: ClassVar[str]
    """The family's, as its entry point names it."""
    module: ClassVar[ModelModule]
    """Its equations, and the tensors they take."""
    config_type: ClassVar[type[msgspec.Struct]]
    """What `parse` makes of a config: a Struct of the keys that shape the model, under their own names."""
    rank_sizes: ClassVar[tuple[str, ...]]
    """Numbers of the config that the ranks share equally, so that their number divides each; 0 is nothing to share."""
    dealt_sizes: ClassVar[tuple[str, ...]] = ()
    """Numbers of experts in the config that data-parallel ranks share equally; the model is a `ModelOfDealtExperts`.
    None: `--data-parallel-size` is refused."""
    devices: ClassVar[frozenset[DeviceKind]] = frozenset(DeviceKind)
    """What its operators are there for; the engine refuses it on any other."""
    cache_formats: ClassVar[frozenset[CacheFormat]] = frozenset({CacheFormat.COMPUTE})
    """What its KV may be kept in: FP8 where all that reads it is `paged_attention`, and its layers say so in
    `kv_spec`."""
    extra_operators: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Operators that it calls as `ops.extra[NAME]` -> who adds each, by its name in `openinfer.kernel_providers`;
    `--kernel-providers NAME=OTHER` puts another in its place."""

    def adapted_matrices(self, config: Config) -> "Sequence[tuple[StoredMatrix, Shard]]":
        """The matrices that LoRA adapters may change, and how each is cut; none: `--lora` is refused.

        All that are loaded by `WeightLoader.linear` and `stacked_linear` inside of layers, and no others.
        """
        del config
        return ()

    @abstractmethod
    def refusal(self, config: Mapping[str, Any]) -> str | None:
        """None if this family serves the model of this `config.json`, else why not, as `ModelFamily` says."""

    def text_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """What `config_type` is read from; a family with several layouts of `config.json` brings them to one here."""
        return config

    def parse(self, config: Mapping[str, Any]) -> Config:
        """The typed config.

        Raises:
            Refused: the config asks for what this family does not compute.
            InvalidCheckpoint: a key is missing or out of range.
        """
        reason = self.refusal(config)
        if reason is not None:
            raise Refused(reason)
        try:
            return cast("Config", msgspec.convert(self.text_config(config), self.config_type))
        except msgspec.ValidationError as error:
            raise InvalidCheckpoint(f"config.json is no valid {self.name} config: {error}") from error

    def limits(self, config: Config) -> ModelLimits:
        """What the config bounds.

        YaRN reaches its factor times the context of the pre-training, whatever `max_position_embeddings` says.
        """
        rotary = cast("RotaryConfig", config)
        reach, yarn = rotary.max_position_embeddings, rotary.rope.yarn
        if yarn is not None:
            reach = int(yarn.factor * yarn.original_max_position_embeddings)
        return ModelLimits(max_model_tokens=reach, vocab_size=rotary.vocab_size)

    def tensors(self, config: Config) -> Mapping[str, TensorSpec]:
        """The module's; a checkpoint is checked against it before any tensor is read."""
        return self.module.tensors(config)

    def ignorable_tensors(self, config: Config) -> Collection[str]:
        """Names of tensors that `load` does not read and that a checkpoint may have: derived or redundant ones.

        One that ends with a dot stands for all that begin with it: `model.visual.`, a part that is not served. Here:
        RoPE frequencies, which follow from the config, and the head of a tied model, which is its embedding.
        """
        rotary = cast("RotaryConfig", config)
        layers = range(rotary.num_hidden_layers)
        names = {"model.rotary_emb.inv_freq", *(f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in layers)}
        return names | {"lm_head.weight"} if rotary.tie_word_embeddings else names

    def check_device(self, device: DeviceKind) -> None:
        """Raises `Refused` if the model does not run on such a device."""
        if device not in self.devices:
            possible = ", ".join(sorted(self.devices)) or "none"
            raise Refused(f"the family {self.name} does not run on the device {device}; possible: {possible}")

    def check_cache_format(self, cache_format: CacheFormat) -> None:
        """Raises `Refused` if the model's KV is not kept in such a format."""
        if cache_format not in self.cache_formats:
            raise Refused(
                f"kv_cache_dtype: the family {self.name} does not keep its KV in {cache_format}; leave it at auto"
            )

    @abstractmethod
    def kv_spec(
        self,
        config: Config,
        *,
        model_tag: str,
        kv_dtype: KvDtype,
        state_dtype: KvDtype,
        num_ranks: int,
        rank_index: int,
    ) -> KvSpec:
        """What one rank asks of the KV cache.

        Args:
            config: the model's.
            model_tag: fingerprint of the checkpoint.
            kv_dtype: what paged tensors are stored in: the operators' compute dtype, or `FLOAT8_E4M3` for a family
                whose `cache_formats` have FP8 (`openinfer_kv_cache.attention_group` lays it out).
            state_dtype: what states are stored in that are not float32 whatever the device: the compute dtype.
            num_ranks: ranks the model is cut into.
            rank_index: this one.
        """

    def check_ranks(self, config: Config, ranks: int) -> None:
        """Raises `Refused` if the model cannot be cut into so many ranks."""
        sizes = {name: int(getattr(config, name)) for name in self.rank_sizes}
        shared = {name: size for name, size in sizes.items() if size}
        possible = [n for n in range(1, min(shared.values()) + 1) if not any(size % n for size in shared.values())]
        if ranks not in possible:
            listed = ", ".join(f"{name} is {size}" for name, size in shared.items())
            raise Refused(
                f"{ranks} ranks cannot share the model: {listed}; possible are {', '.join(map(str, possible))}"
            )

    def check_data_parallel(self, config: Config, ranks: int) -> None:
        """Raises `Refused` if the experts cannot be dealt out to so many ranks with attention of their own."""
        if not self.dealt_sizes:
            raise Refused(
                f"data_parallel_size: the family {self.name} has no experts that data-parallel ranks share; for copies "
                "of a model there is `openinfer ray serve --replicas`"
            )
        for name in self.dealt_sizes:
            if (size := int(getattr(config, name))) % ranks:
                raise Refused(f"data_parallel_size: {ranks} ranks cannot share experts equally: {name} is {size}")

    def load(
        self, config: Config, weights: WeightSource, *, ops: Ops, communicator: Communicator, max_model_tokens: int
    ) -> Model:
        return self.module.load(config, weights, ops=ops, communicator=communicator, max_model_tokens=max_model_tokens)

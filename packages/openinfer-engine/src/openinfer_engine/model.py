"""What a model family gives the engine: a `ModelDefinition`, and the `Model` it loads on each rank.

The engine owns memory, batches and sampling; a model owns its equations. A model sees operators, a communicator
and a batch, and never asks which device or how many ranks there are.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Generic, Protocol, TypeVar

from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.weights.stored_tensor import TensorSpec
from openinfer_kernels import Array, AttentionBatch, Ops, WeightPart
from openinfer_kv_cache import KvDtype, KvSpec

Config = TypeVar("Config")


class Cut(IntEnum):
    """How a tensor is cut across ranks; the value is the axis."""

    WHOLE = -1
    """Every rank has all of it."""
    ROWS = 0
    """Column-parallel layers: each rank has a piece of the outputs."""
    COLUMNS = 1
    """Row-parallel layers: each rank has a piece of the inputs; the results are summed."""


class WeightSource(Protocol):
    """The tensors of one checkpoint as one rank sees them."""

    def read(self, name: str, cut: Cut = Cut.WHOLE) -> WeightPart:
        """This rank's piece of a tensor, for `Ops.upload_weight`: nothing is copied yet.

        Raises:
            InvalidCheckpoint: no such tensor, or its size does not divide by the ranks.
        """
        ...

    def read_stored(self, name: str, cut: Cut = Cut.WHOLE) -> Any:
        """This rank's piece of a tensor that `ModelDefinition.tensors` calls a `StoredTensor`, in its own dtype.

        An array in host memory, F8_E4M3 and F8_E8M0 as their bits in uint8, F4 as pairs in uint8; codes may be
        `RandomCodes`. `quantised_weights.read_quantised` brings codes and scales together.

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

    def forward(self, token_ids: Array, *, batch: AttentionBatch, kv_cache: Array) -> Array:
        """Hidden states after the final norm, `[T, h]`; appends this step's K and V to `kv_cache`.

        A model whose `KvSpec` has slot groups finds its recurrent states in `batch.states`, by `GROUP.TENSOR`. One
        whose blocks are no dense array finds its paged tensors in `batch.caches`, likewise; `kv_cache` is their pool.
        """
        ...

    def logits(self, hidden: Array) -> Array:
        """`[n, V]` float32 for `hidden [n, h]`, whole vocabulary on every rank."""
        ...


class ModelDefinition(Protocol, Generic[Config]):
    """A family's architecture, before any weight is read."""

    @property
    def name(self) -> str:
        """The family's name."""
        ...

    def parse(self, config: Mapping[str, Any]) -> Config:
        """The typed config.

        Raises:
            InvalidCheckpoint: a key is missing or out of range.
        """
        ...

    def limits(self, config: Config) -> ModelLimits:
        """What the config bounds."""
        ...

    def tensors(self, config: Config) -> Mapping[str, TensorSpec]:
        """Every tensor that `load` reads, with its whole shape; the checkpoint is checked against it first.

        A plain shape is that of a weight in BF16, float16 or float32; whatever else is stored is a `StoredTensor`.
        """
        ...

    def ignorable_tensors(self, config: Config) -> Collection[str]:
        """Names of tensors that `load` does not read and that a checkpoint may have: derived or redundant ones.

        One that ends with a dot stands for all that begin with it: `model.visual.`, a part that is not served.
        """
        ...

    def kv_spec(self, config: Config, *, model_tag: str, dtype: KvDtype, num_ranks: int, rank_index: int) -> KvSpec:
        """What one rank asks of the KV cache.

        Args:
            config: the model's.
            model_tag: fingerprint of the checkpoint.
            dtype: the operators' compute dtype.
            num_ranks: ranks the model is cut into.
            rank_index: this one.
        """
        ...

    def check_ranks(self, config: Config, ranks: int) -> None:
        """Raises `Refused` if the model cannot be cut into so many ranks."""
        ...

    def load(
        self, config: Config, weights: WeightSource, *, ops: Ops, communicator: Communicator, max_model_tokens: int
    ) -> Model:
        """Uploads this rank's weights."""
        ...

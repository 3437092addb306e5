"""Experts of a checkpoint, and a rank's share of them: experts are spread whole over the ranks.

    experts = StoredExperts(prefix="model.layers.3.mlp.experts", routing=..., hidden_size=h, width=M)
    experts.tensors() ─► part of `ModelDefinition.tensors`
    experts.load(loader, communicator) ─► what `Ops.experts` multiplies with

Checkpoints have them one by one, `PREFIX.0.gate_proj.weight` and so on, plain or quantised, or stacked in two plain
tensors, `PREFIX.gate_up_proj [E, 2 M, h]`, of each expert gate rows, then up rows, and `PREFIX.down_proj [E, h, M]`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from openinfer_core import Refused
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.weights.loader import WeightLoader
from openinfer_engine.weights.quantised import StoredMatrix
from openinfer_engine.weights.stored_format import StoredFormat
from openinfer_engine.weights.stored_tensor import TensorSpec
from openinfer_kernels import LinearWeight, Routing


def experts_of_rank(num_experts: int, *, rank: int, size: int) -> range:
    """Ids of the experts that a rank has; the ranks' numbers differ by one at most, and rank 0 has the most."""
    begin, end = (-(-edge * num_experts // size) for edge in (rank, rank + 1))
    return range(begin, end)


def check_expert_ranks(num_experts: int, ranks: int) -> None:
    """Raises `Refused` if there are ranks that would have no expert."""
    if ranks > num_experts:
        raise Refused(f"{ranks} ranks cannot share {num_experts} experts, which are spread whole")


FormatOf: TypeAlias = Callable[[str], StoredFormat | None]
"""How the matrix of a name is stored, the name without `.weight`: `QuantisedConfig.format_of`."""


def is_plain(name: str) -> None:
    """Of every matrix: it is in BF16, float16 or float32."""
    del name


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMlp:
    """The matrices of an MLP."""

    gate: StoredMatrix
    up: StoredMatrix
    down: StoredMatrix

    @classmethod
    def of(cls, prefix: str, *, width: int, h: int, format_of: FormatOf = is_plain) -> "StoredMlp":
        def matrix(name: str, rows: int, columns: int) -> StoredMatrix:
            whole = f"{prefix}.{name}"
            return StoredMatrix(name=whole, shape=(rows, columns), format=format_of(whole))

        return cls(
            gate=matrix("gate_proj", width, h), up=matrix("up_proj", width, h), down=matrix("down_proj", h, width)
        )

    @property
    def matrices(self) -> tuple[StoredMatrix, StoredMatrix, StoredMatrix]:
        return self.gate, self.up, self.down

    def tensors(self) -> dict[str, TensorSpec]:
        return {name: spec for matrix in self.matrices for name, spec in matrix.tensors().items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """The experts of a layer that one rank has."""

    first_expert: int
    """Id of its first one."""
    gate_up_proj: LinearWeight
    """`[E, 2 M, h]`: of each expert gate rows, then up rows."""
    down_proj: LinearWeight
    """`[E, h, M]`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredExperts:
    """The experts of one layer."""

    prefix: str
    routing: Routing
    """How some of them are chosen for a token."""
    hidden_size: int
    width: int
    format_of: FormatOf = is_plain
    is_stacked: bool = False
    """In two tensors; else one by one."""
    shared: StoredMlp | None = None
    """An expert of the same width and format whose tensors have other names; its id is that after the last one's."""

    def tensors(self) -> dict[str, TensorSpec]:
        found = {name: spec for each in self._one_by_one for name, spec in each.tensors().items()}
        if self.is_stacked:
            found[self._gate_up] = (self.routing.num_experts, 2 * self.width, self.hidden_size)
            found[self._down] = (self.routing.num_experts, self.hidden_size, self.width)
        return found

    def load(self, loader: WeightLoader, communicator: Communicator) -> ExpertWeights:
        """A rank's share; no rank may be without (`check_expert_ranks`)."""
        num_experts = self.routing.num_experts + (self.shared is not None)
        ids = experts_of_rank(num_experts, rank=communicator.rank, size=communicator.size)
        return self._load_stacked(loader, ids) if self.is_stacked else self._load_one_by_one(loader, ids)

    def _load_stacked(self, loader: WeightLoader, ids: range) -> ExpertWeights:
        routed = range(ids.start, min(ids.stop, self.routing.num_experts))
        shared = self.shared if self.routing.num_experts in ids else None
        gate_up, down = ((), ()) if shared is None else ((shared.gate, shared.up), (shared.down,))
        return ExpertWeights(
            first_expert=ids.start,
            gate_up_proj=loader.of_stack(self._gate_up, routed, *gate_up, num_matrices=len(ids)),
            down_proj=loader.of_stack(self._down, routed, *down, num_matrices=len(ids)),
        )

    def _load_one_by_one(self, loader: WeightLoader, ids: range) -> ExpertWeights:
        own = self._one_by_one[ids.start : ids.stop]
        gate_up = (matrix for each in own for matrix in (each.gate, each.up))
        return ExpertWeights(
            first_expert=ids.start,
            gate_up_proj=loader.stack(*gate_up, num_matrices=len(own)),
            down_proj=loader.stack(*(each.down for each in own), num_matrices=len(own)),
        )

    @property
    def _one_by_one(self) -> tuple[StoredMlp, ...]:
        """By id, but for those that are stacked."""
        count, shared = (
            0 if self.is_stacked else self.routing.num_experts,
            () if self.shared is None else (self.shared,),
        )
        routed = (
            StoredMlp.of(f"{self.prefix}.{expert}", width=self.width, h=self.hidden_size, format_of=self.format_of)
            for expert in range(count)
        )
        return (*routed, *shared)

    @property
    def _gate_up(self) -> str:
        return f"{self.prefix}.gate_up_proj"

    @property
    def _down(self) -> str:
        return f"{self.prefix}.down_proj"

"""Mixtures of experts: which experts a token goes to, and what they make of it."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from openinfer_kernels.ops.arrays import Array
from openinfer_kernels.ops.quantised import LinearWeight


class Scoring(StrEnum):
    """How a router's logits become scores, in float32."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SQRT_SOFTPLUS = "sqrtsoftplus"
    """`sqrt(log(1 + e^x))`."""


class GroupScore(StrEnum):
    """What a group of experts is judged by, where only the best groups are chosen from."""

    MAX = "max"
    """Its largest score: DeepSeek-V2, 2024, section 2.1.3, "device-limited routing"."""
    TOP_TWO_SUM = "top_two_sum"
    """The sum of its two largest, with their biases: DeepSeek-V3, 2024, section 2.1.2, "node-limited routing"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a layer's router chooses.

    Experts are chosen by score + bias, equal ones by the lower id; experts of groups that were not kept are not
    chosen. An expert's weight is its score, without the bias.

    Raises:
        ValueError: the numbers contradict each other.
    """

    scoring: Scoring
    num_experts: int
    num_experts_per_token: int
    num_groups: int = 1
    num_kept_groups: int = 1
    group_score: GroupScore = GroupScore.MAX
    normalised: bool = False
    """Whether the weights of a token are divided by their sum (+ 1e-20)."""
    scale: float = 1.0
    """Multiplies the weights at last."""
    shared_expert: bool = False
    """Whether one more expert, whose id is `num_experts`, is chosen for every token, after the others. Its weight is
    the sigmoid of its logit (`Qwen3_5MoeSparseMoeBlock` of transformers), neither normalised nor scaled."""

    def __post_init__(self) -> None:
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise ValueError(f"{self.num_experts} experts cannot be cut into {self.num_groups} equal groups")
        group_size = self.num_experts // self.num_groups
        if not 1 <= self.num_kept_groups <= self.num_groups:
            raise ValueError(f"of {self.num_groups} groups of experts, {self.num_kept_groups} cannot be kept")
        if not 1 <= self.num_experts_per_token <= self.num_kept_groups * group_size:
            raise ValueError(
                f"{self.num_experts_per_token} experts per token cannot be chosen from {self.num_kept_groups} groups "
                f"of {group_size}"
            )
        if self.num_groups > 1 and self.group_score is GroupScore.TOP_TWO_SUM and group_size < 2:
            raise ValueError("groups of one expert have no two largest scores")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertChoice:
    """The experts of each token."""

    ids: Array
    """`[T, k]` int32, of all experts of the layer, whichever rank has them; -1 names none. A shared one is the last."""
    weights: Array
    """`[T, k]` float32."""
    num_experts: int | None = None
    """Of the layer, if the router says so: how thinly the choices are spread. It changes speed, never a result."""


class RoutingOps(Protocol):
    """Which experts a token goes to."""

    def top_experts(
        self, logits: Array, *, routing: Routing, cache_slots: Array | None = None, bias: Array | None = None
    ) -> ExpertChoice:
        """The best experts of each token, best first.

        Args:
            logits: `[T, C]` float32, of `Ops.logits(x, router)`: `C` is `E`, one more with a shared expert, or more,
                which are not read. A row of NaN chooses some experts with weights NaN.
            routing: how.
            cache_slots: `[T]` int64 of the batch; where it is below 0 the token is padding and chooses none: ids -1,
                weights 0. None: no token is padding.
            bias: `[E]` float32, added to the scores for the choice alone (DeepSeek-V3, 2024, eq. 16).
        """
        ...

    def table_experts(
        self, logits: Array, token_ids: Array, table: Array, *, routing: Routing, cache_slots: Array | None = None
    ) -> ExpertChoice:
        """The experts that a table names for each token's id, in its order, weighted by their scores.

        Args:
            logits: `[T, E]` float32.
            token_ids: `[T]` int32.
            table: `[V, k]` int32.
            routing: how logits become weights; it has one group.
            cache_slots: as in `top_experts`.
        """
        ...


class ExpertOps(Protocol):
    """What experts make of the tokens that were routed to them."""

    def experts(
        self,
        x: Array,
        choice: ExpertChoice,
        gate_up: LinearWeight,
        down: LinearWeight,
        *,
        first_expert: int = 0,
        limit: float | None = None,
        shared: Array | None = None,
    ) -> Array:
        """`sum_j weight_j * down_j (silu(gate_j x) * up_j x)` over the experts of this rank: `[T, h]` float32.

        The products of a token are added in the order of its choice. Experts that this rank does not have, and ids of
        -1, add nothing: with the experts cut across ranks the caller sums the results of all ranks.

        Args:
            x: `[T, h]`.
            choice: the experts of each token.
            gate_up: `[E', 2 F, h]`, of each expert of this rank gate rows, then up rows.
            down: `[E', h, F]`.
            first_expert: id of the first of this rank's `E'` experts.
            limit: `gate` is held below it and `up` within +- it before they are multiplied; None: they are not.
            shared: `[T, h]`, added last: what experts of all tokens made of `x`, or this rank's part of it.
        """
        ...

    def swiglu(self, gate_up: Array, *, limit: float | None = None) -> Array:
        """`silu(gate) * up` for `gate_up [T, 2 F]`, gate values, then up values: `[T, F]`; `limit` as in `experts`."""
        ...

"""Routers: `csrc/moe/routing.cu` chooses experts and weighs them, one warp per token."""

import ctypes

import numpy as np

from openinfer_kernels.cuda.common.arrays import require
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.libraries import cupy
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array, ExpertChoice, GroupScore, Routing, Scoring

_WARP = 32
_MOST_EXPERTS = (64, 256, 384, 1024)
"""Of each kernel, which keeps them in registers."""
_MOST_GROUPS = 32
_SCORINGS = (Scoring.SOFTMAX, Scoring.SIGMOID, Scoring.SQRT_SOFTPLUS)
_GROUP_SCORES = (GroupScore.MAX, GroupScore.TOP_TWO_SUM)
_FLOAT32, _INT32, _INT64 = np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.int64)


class _Routing(ctypes.Structure):
    """`Routing` of the kernel."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("num_experts", "per_token", "num_groups", "num_kept", "scoring")),
        ("group_score", ctypes.c_int),
        ("normalised", ctypes.c_int),
        ("scale", ctypes.c_float),
        ("has_shared", ctypes.c_int),
        ("num_columns", ctypes.c_int),
    )


class Router:
    """The routers on one device."""

    def __init__(self, device: Device) -> None:
        self._kernels = {most: device.kernel("routing", f"route_{most}") for most in _MOST_EXPERTS}

    def top_experts(
        self, logits: Array, *, routing: Routing, cache_slots: Array | None = None, bias: Array | None = None
    ) -> ExpertChoice:
        """At most 1,024 experts, 32 groups and 32 experts per token, the shared one among them."""
        if bias is not None:
            require(bias, _FLOAT32, ndim=1, what="the bias of the router")
            if len(bias) != routing.num_experts:
                raise ArrayMismatchError(f"the bias {bias.shape} is not one of {routing.num_experts} experts")
        return self._choose(logits, routing, cache_slots, bias=bias)

    def table_experts(
        self, logits: Array, token_ids: Array, table: Array, *, routing: Routing, cache_slots: Array | None = None
    ) -> ExpertChoice:
        require(token_ids, _INT32, ndim=1, what="the token ids")
        require(table, _INT32, ndim=2, what="the table of experts")
        if len(token_ids) != len(logits) or table.shape[1] != routing.num_experts_per_token:
            raise ArrayMismatchError(
                f"{len(token_ids)} token ids and a table of {table.shape[1]} experts do not fit {len(logits)} tokens "
                f"of {routing.num_experts_per_token} experts"
            )
        return self._choose(logits, routing, cache_slots, token_ids=token_ids, table=table)

    def _choose(
        self,
        logits: Array,
        routing: Routing,
        cache_slots: Array | None,
        *,
        bias: Array | None = None,
        token_ids: Array | None = None,
        table: Array | None = None,
    ) -> ExpertChoice:
        _check(logits, routing, cache_slots)
        shape = len(logits), routing.num_experts_per_token + routing.shared_expert
        choice = ExpertChoice(
            ids=cupy.empty(shape, np.int32),
            weights=cupy.empty(shape, np.float32),
            num_experts=routing.num_experts + routing.shared_expert,
        )
        if len(logits):
            asked = _structure(routing, num_columns=logits.shape[1])
            arguments = [logits, bias, token_ids, table, cache_slots, choice.ids, choice.weights, asked]
            kernel = next(kernel for most, kernel in self._kernels.items() if routing.num_experts <= most)
            kernel((len(logits), 1, 1), (_WARP, 1, 1), arguments, overlap=True)
        return choice


def _check(logits: Array, routing: Routing, cache_slots: Array | None) -> None:
    require(logits, _FLOAT32, ndim=2, what="the logits of the router")
    if logits.shape[1] < routing.num_experts + routing.shared_expert:
        raise ArrayMismatchError(f"the logits {logits.shape} are not those of {routing.num_experts} experts")
    if cache_slots is not None:
        require(cache_slots, _INT64, ndim=1, what="the cache slots")
        if len(cache_slots) != len(logits):
            raise ArrayMismatchError(f"{len(cache_slots)} cache slots were given for {len(logits)} tokens")
    sizes = routing.num_experts, routing.num_groups, routing.num_experts_per_token + routing.shared_expert
    if any(size > most for size, most in zip(sizes, (_MOST_EXPERTS[-1], _MOST_GROUPS, _WARP), strict=True)):
        raise ArrayMismatchError(
            f"a router over {sizes[0]} experts in {sizes[1]} groups, {sizes[2]} per token, has no kernel: at most "
            f"{_MOST_EXPERTS[-1]}, {_MOST_GROUPS} and {_WARP}"
        )


def _structure(routing: Routing, *, num_columns: int) -> _Routing:
    return _Routing(
        routing.num_experts,
        routing.num_experts_per_token,
        routing.num_groups,
        routing.num_kept_groups,
        _SCORINGS.index(routing.scoring),
        _GROUP_SCORES.index(routing.group_score),
        int(routing.normalised),
        routing.scale,
        int(routing.shared_expert),
        num_columns,
    )

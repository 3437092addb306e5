"""Products whose adapters the operator after them adds: who is asked, and what may not come in between."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from openinfer_kernels import DeferredAdaptersError
from openinfer_kernels.adapted import AdaptedWeights, AdapterWeights, with_adapters
from openinfer_kernels.ops.lora import AddedBy, DeltaOperator

BY_NORM = AddedBy(DeltaOperator.ADD_RMS_NORM)
BY_HEADS = AddedBy(DeltaOperator.QK_NORM_ROPE_APPEND, 64)
HEADS = {"q_norm": None, "k_norm": None, "eps": 1e-6, "rope": None, "cache": None, "batch": None}
X, RESIDUAL, NORM = np.zeros((9, 4)), np.zeros((9, 4)), np.ones(4)


class Operators:
    """Keeps the names of what was asked for; of products, `serves` are deferred."""

    def __init__(self, *, serves: bool = True) -> None:
        self.asked: list[str] = []
        self._serves = serves
        self.fused_adapters = self.deferred = self

    def linear(self, x: Any, *rest: Any, starts: Any = None, added_by: AddedBy | None = None) -> Any:
        self.asked.append("linear" if starts is None else "fused" if added_by is None else "deferred")
        if added_by is None:
            return x.copy()
        return SimpleNamespace(y=x.copy(), added_by=added_by) if self._serves else None

    def linear_swiglu(self, x: Any, *rest: Any, starts: Any = None) -> Any:
        self.asked.append("gates" if starts is None else "adapted gates")
        is_deferred = self.asked == ["adapted gates"]  # which is asked for first
        return None if is_deferred and not self._serves else x.copy()

    def add_rms_norm(self, x: Any, residual: Any, weight: Any, *, eps: float) -> Any:
        self.asked.append("norm" if isinstance(x, np.ndarray) else "deferred norm")
        return RESIDUAL

    def qk_norm_rope_append(self, qkv: Any, **given: Any) -> Any:
        self.asked.append("heads" if isinstance(qkv, np.ndarray) else "deferred heads")
        return X

    def embedding(self, token_ids: Any, table: Any) -> Any:
        self.asked.append("embedding")
        return table


def made(added_by: AddedBy | None, *, serves: bool = True) -> tuple[Any, Operators, Any]:
    """Operators with an adapted weight, what they ask, and the weight."""
    own, weights, weight = Operators(serves=serves), AdaptedWeights(), np.zeros((4, 4))
    slots = np.zeros((1, 1, 8, 4)), np.zeros((1, 4, 8))
    weights.add(
        weight, AdapterWeights(a=slots[0], b=slots[1], columns=np.zeros((4, 64)), starts=(0, 4), added_by=added_by)
    )
    return with_adapters(own, weights), own, weight


ADAPTED, PLAIN = (SimpleNamespace(adapter_slots=each) for each in (np.zeros(9, np.int32), None))


def test_a_product_is_deferred_until_the_operator_that_it_is_for() -> None:
    ops, own, weight = made(BY_NORM)
    y = ops.linear(X, weight, ADAPTED)
    assert ops.add_rms_norm(y, RESIDUAL, NORM, eps=1e-6) is RESIDUAL
    ops.add_rms_norm(y, RESIDUAL, NORM, eps=1e-6)
    assert own.asked == ["deferred", "deferred norm", "norm"]
    ops, own, weight = made(BY_HEADS)
    ops.qk_norm_rope_append(ops.linear(X, weight, ADAPTED), **HEADS)
    ops.qk_norm_rope_append(X, **HEADS)
    assert own.asked == ["deferred", "deferred heads", "heads"]


@pytest.mark.parametrize(
    ("added_by", "serves", "batch", "asked"),
    [
        (None, True, ADAPTED, ["fused", "norm"]),
        (BY_NORM, False, ADAPTED, ["deferred", "fused", "norm"]),
        (BY_NORM, True, PLAIN, ["linear", "norm"]),
    ],
    ids=["not said", "not served", "a batch without adapters"],
)
def test_other_products_are_what_they_were(added_by: Any, serves: bool, batch: Any, asked: list[str]) -> None:
    ops, own, weight = made(added_by, serves=serves)
    ops.add_rms_norm(ops.linear(X, weight, batch), RESIDUAL, NORM, eps=1e-6)
    assert own.asked == asked


def test_gates_are_deferred_where_they_are_served() -> None:
    served = ["adapted gates"]
    for serves, batch, asked in ((True, ADAPTED, served), (False, ADAPTED, served * 2), (True, PLAIN, ["gates"])):
        ops, own, weight = made(None, serves=serves)
        assert ops.linear_swiglu(X, weight, batch) is not None
        assert own.asked == asked


def test_nothing_runs_between_a_deferred_product_and_its_operator() -> None:
    between = (
        lambda ops, weight, y: ops.embedding(X, y),
        lambda ops, weight, y: ops.linear(y, weight, ADAPTED),
        lambda ops, weight, y: ops.linear_swiglu(y, weight, ADAPTED),
        lambda ops, weight, y: ops.linear_geglu(y, weight, PLAIN),
        lambda ops, weight, y: ops.qk_norm_rope_append(y, **HEADS),
        lambda ops, weight, y: ops.add_rms_norm(y.copy(), RESIDUAL, NORM, eps=1e-6),
    )
    for other in between:
        ops, own, weight = made(BY_NORM)
        y = ops.linear(X, weight, ADAPTED)
        with pytest.raises(DeferredAdaptersError, match="add_rms_norm"):
            other(ops, weight, y)
        assert own.asked == ["deferred"]

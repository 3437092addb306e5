"""The limits of a scheduler are checked when they are made; a plan counts its rows and tokens."""

from typing import Any

import msgspec
import numpy as np
import pytest

from openinfer_core import InvalidRequest
from openinfer_core.scheduling import QueuePolicyConfig, SchedulerConfig, StepPlan

LIMITS = {
    "num_blocks": 8,
    "block_size_tokens": 16,
    "max_num_seqs": 4,
    "max_step_tokens": 64,
    "max_model_tokens": 128,
    "max_waiting": 10,
}


@pytest.mark.parametrize("field", LIMITS)
@pytest.mark.parametrize("value", [0, -1, 2**31])
def test_scheduler_config_out_of_range_is_refused_by_name(field: str, value: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SchedulerConfig(**{**LIMITS, field: value})
    assert caught.value.field == field


def test_scheduler_config_whose_step_cannot_hold_every_sequence_is_refused() -> None:
    assert SchedulerConfig(**{**LIMITS, "max_step_tokens": 4}).max_step_tokens == 4
    with pytest.raises(InvalidRequest, match="could not give every sequence one token"):
        SchedulerConfig(**{**LIMITS, "max_step_tokens": 3})


@pytest.mark.parametrize("weight", [0.0, -1.0, 1e7, float("nan"), float("inf")])
def test_queue_policy_weight_out_of_range_is_refused(weight: float) -> None:
    with pytest.raises(InvalidRequest, match="weight of tenant 'a'"):
        QueuePolicyConfig(tenant_weights={"a": weight})


def test_configs_survive_json() -> None:
    for config in (SchedulerConfig(**LIMITS, table_windows=(None, 7)), QueuePolicyConfig(tenant_weights={"a": 2.0})):
        assert msgspec.json.decode(msgspec.json.encode(config), type=type(config)) == config


@pytest.mark.parametrize("windows", [(), (None,) * 257, (0,), (None, -1), (2**31,)])
def test_scheduler_config_with_tables_out_of_range_is_refused(windows: tuple[int | None, ...]) -> None:
    with pytest.raises(InvalidRequest, match="must") as caught:
        SchedulerConfig(**LIMITS, table_windows=windows)
    assert caught.value.field == "table_windows"


@pytest.mark.parametrize(
    ("windows", "blocks"),
    [
        ((None,), [0, 1, 1, 2, 8]),
        ((40,), [0, 1, 1, 2, 5]),
        ((None, 16), [0, 2, 2, 4, 11]),
        ((1, None, 64), [0, 3, 3, 6, 17]),
    ],
)
def test_context_takes_the_blocks_of_all_tables_and_of_windows_no_more_than_they_keep(
    windows: tuple[int | None, ...], blocks: list[int]
) -> None:
    config = SchedulerConfig(**LIMITS, table_windows=windows)
    assert [config.blocks_for_context(num_tokens) for num_tokens in (0, 1, 16, 17, 128)] == blocks


def column(*values: int) -> Any:
    return np.array(values, np.int32)


def make_plan(**columns: Any) -> StepPlan:
    return StepPlan(
        step=0,
        slots=column(2, 0),
        starts=column(0, 7),
        counts=column(5, 1),
        num_host_tokens=column(5, 0),
        max_new=column(0, 1),
        token_ids=column(1, 2, 3, 4, 5),
        new_blocks=column(3),
        **columns,
    )


def test_step_plan_counts_rows_and_tokens() -> None:
    plan = make_plan(new_block_counts=column(1, 0))
    assert (plan.num_rows, plan.num_tokens) == (2, 6)


def test_step_plan_takes_a_row_of_block_counts_as_one_tables() -> None:
    plan = make_plan(new_block_counts=column(1, 0), void_block_counts=column(0, 2))
    assert plan.new_block_counts.tolist() == [[1, 0]]
    assert plan.void_block_counts.tolist() == [[0, 2]]


def test_step_plan_voids_no_block_by_default() -> None:
    plan = make_plan(new_block_counts=np.array([[0, 0], [1, 0], [0, 0]], np.int32))
    assert plan.void_block_counts.tolist() == [[0, 0]] * 3
    assert plan.void_block_counts.dtype == np.int32

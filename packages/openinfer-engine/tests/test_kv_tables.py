"""One block table or several: which an engine has, what its pool holds then, and what the plan and the log say."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from openinfer_core import Refused, find_plugin
from openinfer_engine import EngineOptions, resolve
from openinfer_engine.engine_plan import EnginePlan
from openinfer_engine.memory_plan import kv_cache_tokens
from openinfer_engine.scheduler import TokenBudgetScheduler
from openinfer_engine.served_context import context_of_pool
from openinfer_kv_cache import KvDtype, KvLayout, KvSpec, PagedGroup, PagedTensor, StateSlotGroup, StateTensor

DEFINITION: Any = find_plugin("openinfer.models", "qwen3").load()().definition
MODEL_DIR: Path = find_plugin("openinfer.checkpoints", "tiny").load()()


def group(name: str, num_layers: int, window: int | None, *, num_heads: int = 1) -> PagedGroup:
    tensors = tuple(PagedTensor(name=each, num_heads=num_heads, head_dim=8, dtype=KvDtype.FLOAT32) for each in "kv")
    return PagedGroup(name=name, num_layers=num_layers, tensors=tensors, window_tokens=window)


GROUPS = (group("global", 1, None), group("local", 5, 40))
STATES = StateSlotGroup(
    name="states", num_layers=1, tensors=(StateTensor(name="s", shape=(4,), dtype=KvDtype.FLOAT32),)
)


class Windowed(type(DEFINITION)):  # type: ignore[misc]
    """The tiny model, as if five of its six layers had a window."""

    slots: tuple[StateSlotGroup, ...] = ()

    def kv_spec(self, config: Any, *, model_tag: str, num_ranks: int, rank_index: int, **dtypes: Any) -> KvSpec:
        return KvSpec(model_tag=model_tag, paged=GROUPS, slots=self.slots, num_ranks=num_ranks, rank_index=rank_index)


class WindowedWithStates(Windowed):
    slots = (STATES,)


@pytest.fixture
def frees_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = msgspec.structs.replace(TokenBudgetScheduler.capabilities, frees_windows=True)
    monkeypatch.setattr(TokenBudgetScheduler, "capabilities", declared)


@pytest.fixture
def frees_no_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = msgspec.structs.replace(TokenBudgetScheduler.capabilities, frees_windows=False)
    monkeypatch.setattr(TokenBudgetScheduler, "capabilities", declared)


def resolved(definition: Any = Windowed, **options: Any) -> EnginePlan:
    return resolve(definition(), MODEL_DIR, EngineOptions(block_size_tokens=16, **options))


@pytest.mark.usefixtures("frees_windows")
def test_layers_with_windows_get_tables_of_their_own_and_the_scheduler_knows_their_windows() -> None:
    planned = resolved(num_blocks=100)
    assert planned.scheduler_config.table_windows == (None, 40, 40, 40, 40, 40)
    assert planned.worker_limits.num_tables == 6
    assert planned.info.composition["kv_tables"] == (
        "6 block tables: 1 of layers that see all tokens, 5 of layers that see the last 40 tokens"
    )


@pytest.mark.usefixtures("frees_no_windows")
def test_a_scheduler_that_frees_no_windows_keeps_one_table_and_the_plan_says_why() -> None:
    planned = resolved(num_blocks=100)
    assert planned.scheduler_config.table_windows == (None,)
    assert (
        "1 block table, which keeps the KV of all tokens; some layers see 40 of them, but the scheduler "
        in (planned.parts["kv_tables"])
    )
    assert "does not declare frees_windows" in planned.parts["kv_tables"]


@pytest.mark.usefixtures("frees_windows")
def test_a_model_with_states_and_one_whose_contexts_fit_its_windows_keep_one_table() -> None:
    states = resolved(WindowedWithStates, num_blocks=100)
    assert states.scheduler_config.table_windows == (None,)
    assert "the model has recurrent states" in states.parts["kv_tables"]
    short = resolved(num_blocks=100, max_model_tokens=40)
    assert short.scheduler_config.table_windows == (None,)
    assert "no context is longer than 40" in short.parts["kv_tables"]
    assert resolved(num_blocks=100, max_model_tokens=41).layouts[0].num_tables == 6


def test_a_model_without_windows_says_nothing_of_tables() -> None:
    planned = resolve(DEFINITION, MODEL_DIR, EngineOptions(num_blocks=4))
    assert "kv_tables" not in planned.parts
    assert planned.scheduler_config.table_windows == (None,)


@pytest.mark.usefixtures("frees_windows")
def test_a_pool_of_several_tables_is_no_larger_than_whole_contexts_of_all_slots_need() -> None:
    planned = resolved(max_num_seqs=3, max_model_tokens=160, max_step_tokens=64)
    assert planned.num_blocks == 3 * 6 * 10
    # 10 global blocks, and 3 + 2 in each of five tables: 40 tokens fill 3 blocks of 16.
    assert planned.plan().limits["kv_cache_tokens"] == 180 * 160 // (10 + 5 * 5)


@pytest.mark.usefixtures("frees_windows")
def test_a_pool_with_less_than_a_block_for_each_table_is_refused() -> None:
    with pytest.raises(Refused, match="the KV pool has 5 blocks, and a sequence has 6 block tables"):
        resolved(num_blocks=5)


@pytest.mark.parametrize(
    ("num_blocks", "context"),
    [
        (6, 16),
        (12, 32),  # two blocks in each of six tables
        (17, 32),
        (18, 48),
        (30, 80),  # five of each: the windows' most
        (31, 96),
        (87, 992),
        (88, 1000),  # 63 global blocks and 25
        (900, 1000),
    ],
)
@pytest.mark.usefixtures("frees_windows")
def test_the_context_is_what_the_tables_of_one_sequence_find_room_for(num_blocks: int, context: int) -> None:
    planned = resolved(num_blocks=900, max_model_tokens=1000)
    assert planned.with_num_blocks(num_blocks).info.max_model_tokens == context
    layout = KvLayout.from_spec(KvSpec(model_tag="m", paged=GROUPS), block_size_tokens=16)
    assert context_of_pool(num_blocks, 1000, layout.blocks_for_context) == context


@pytest.mark.usefixtures("frees_windows")
def test_a_context_that_was_asked_for_and_does_not_fit_is_refused_and_the_models_own_is_clipped() -> None:
    with pytest.raises(Refused, match=r"max_model_tokens is 512, and the KV pool holds 496 tokens: .* num_blocks"):
        resolved(num_blocks=56, max_model_tokens=512)
    assert resolved(num_blocks=57, max_model_tokens=512).plan().limits["kv_cache_tokens"] == 512
    clipped = resolved(num_blocks=57)
    assert (clipped.worker_limits.max_model_tokens, clipped.num_blocks) == (512, 57)


def test_kv_tokens_are_those_of_contexts_of_full_length() -> None:
    layout = KvLayout.from_spec(KvSpec(model_tag="m", paged=GROUPS), block_size_tokens=16)
    assert kv_cache_tokens(layout, 88, 1000) == 1000
    assert kv_cache_tokens(layout, 176, 1000) == 2000


def test_kv_tokens_of_one_table_are_its_blocks() -> None:
    layout = KvLayout.from_spec(KvSpec(model_tag="m", paged=GROUPS).without_windows(), block_size_tokens=16)
    assert kv_cache_tokens(layout, 7, 1000) == 112

"""The ledger of a GPU's memory: every purpose grows with what it is for, and with nothing else."""

import dataclasses
from typing import Any

import pytest

from openinfer_core import Refused
from openinfer_engine.cpu.worker import WorkerLimits
from openinfer_engine.cuda.memory_budget import kv_cache_share, workspaces

LIMITS = WorkerLimits(
    max_num_seqs=256, max_model_tokens=4096, block_size_tokens=16, num_token_ids=151_000, vocab_size=151_936
)


def ledger(**changes: Any) -> dict[str, int]:
    limits = dataclasses.replace(
        LIMITS, **{name: changes.pop(name) for name in ("vocab_size", "max_model_tokens") if name in changes}
    )
    given = {"max_step_tokens": 2048, "slot_state_bytes": 1000, "decode_rows": (1, 256), "mixed_tokens": (16, 512)}
    return dict(workspaces(limits, **(given | changes)))


def changed(**changes: Any) -> set[str]:
    before, after = ledger(), ledger(**changes)
    return {purpose for purpose in before if after[purpose] > before[purpose]}


def test_every_purpose_grows_with_what_it_is_for() -> None:
    assert changed(max_step_tokens=4096) == {"activations"}
    assert changed(vocab_size=200_000) == {"logits"}
    assert changed(slot_state_bytes=2000) == {"slots"}
    assert changed(decode_rows=(1, 2, 256)) == {"graphs"}
    assert changed(mixed_tokens=(16, 32, 512)) == {"graphs"}
    assert changed(adapted_tokens=(640,)) == {"graphs"}
    assert changed(max_model_tokens=8192) == {"context", "graphs"}


def test_scores_of_entries_grow_with_tokens_contexts_and_ranks() -> None:
    limits = dataclasses.replace(LIMITS, tokens_per_score=4)
    sizes = {"max_step_tokens": 2048, "slot_state_bytes": 0, "decode_rows": (256,), "mixed_tokens": (512,)}
    assert workspaces(limits, **sizes)["scores"] == (2048 + 512) * 4096
    assert workspaces(limits, **sizes, num_ranks=8)["scores"] == 2 * (2048 + 512) * 4096
    longer = dataclasses.replace(limits, max_model_tokens=8192)
    assert workspaces(longer, **sizes)["scores"] == (2048 + 512) * 8192
    assert "scores" not in workspaces(LIMITS, **sizes)


def test_drafts_take_a_second_bias_and_a_copy_of_the_states_of_every_slot() -> None:
    assert "drafts" not in ledger()
    drafts, more = ledger(max_drafts=4)["drafts"], ledger(max_drafts=20)["drafts"]
    assert more - drafts == 256 * 16 * 4
    sizes = {"max_step_tokens": 2048, "slot_state_bytes": 0, "decode_rows": (), "mixed_tokens": (512,), "max_drafts": 4}
    with_states = workspaces(dataclasses.replace(LIMITS, slot_bytes=1 << 20), **sizes)
    assert with_states["drafts"] - drafts == 256 << 20


def test_nothing_is_kept_for_graphs_that_are_not_captured() -> None:
    assert ledger(decode_rows=(), mixed_tokens=())["graphs"] == 0
    assert sum(ledger().values()) < 3 << 30


def share(**changes: float) -> int:
    given = {"memory_bytes": 24 << 30, "used_bytes": 0, "fraction": 0.5, "weights_bytes": 8 << 30, "workspace_bytes": 0}
    return kv_cache_share("NVIDIA X", **(given | changes))  # pyright: ignore[reportArgumentType]


def test_kv_cache_takes_what_is_left_of_what_was_granted() -> None:
    assert share() == 4 << 30
    assert share(workspace_bytes=1 << 30) == 3 << 30


def test_model_that_does_not_fit_is_refused_with_every_size_and_what_to_do() -> None:
    with pytest.raises(Refused) as said:
        share(weights_bytes=16 << 30, workspace_bytes=2 << 30)
    assert str(said.value) == (
        "the model does not fit into NVIDIA X: weights take 16.0 GiB and workspaces 2.0 GiB of the 12.0 GiB that were "
        "granted (gpu_memory_fraction 0.5 of 24.0 GiB), and nothing is left for the KV cache; a larger GPU or a "
        "smaller model is needed, or lower max_num_seqs and max_step_tokens for smaller workspaces"
    )


def test_memory_that_others_hold_is_refused_with_the_fraction_that_is_left() -> None:
    context = 600 << 20
    assert share(used_bytes=(11 << 30) + context) == 4 << 30
    with pytest.raises(Refused, match=r"hold 1[78]\.. GiB of the 24\.0 GiB of NVIDIA X.*or lower it below 0\.2\d"):
        share(used_bytes=18 << 30)

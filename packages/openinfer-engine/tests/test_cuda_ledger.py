"""The ledger of a GPU's memory: every purpose grows with what it is for, and with nothing else."""

import dataclasses

from openinfer_engine.cuda_ledger import workspaces
from openinfer_engine.rank import RunnerLimits

LIMITS = RunnerLimits(
    max_num_seqs=256, max_model_tokens=4096, block_size_tokens=16, num_token_ids=151_000, vocab_size=151_936
)


def ledger(**changes: int) -> dict[str, int]:
    limits = dataclasses.replace(LIMITS, **{name: changes.pop(name) for name in ("vocab_size",) if name in changes})
    given = {"max_step_tokens": 2048, "slot_state_bytes": 1000, "num_graphs": 23} | changes
    return dict(workspaces(limits, **given))


def changed(**changes: int) -> set[str]:
    before, after = ledger(), ledger(**changes)
    return {purpose for purpose in before if after[purpose] > before[purpose]}


def test_every_purpose_grows_with_what_it_is_for() -> None:
    assert changed(max_step_tokens=4096) == {"activations"}
    assert changed(vocab_size=200_000) == {"logits"}
    assert changed(slot_state_bytes=2000) == {"slots"}
    assert changed(num_graphs=24) == {"graphs"}


def test_nothing_is_kept_for_graphs_that_are_not_captured() -> None:
    assert ledger(num_graphs=0)["graphs"] == 0
    assert sum(ledger().values()) < 3 << 30

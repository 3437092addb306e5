"""The states of a sequence: what is not in the diagram is refused."""

from itertools import product
from typing import Any

import pytest

from openinfer_core.errors import ContractViolation
from openinfer_engine.scheduler.sequence import Sequence, SequenceState, count_final_tokens, count_limit_tokens
from openinfer_kv_cache import KvCache, KvCacheOptions

W, R, P, F, L = SequenceState
ARROWS = {(W, R), (W, F), (R, P), (R, F), (P, R), (P, F), (W, L), (P, L), (L, R), (L, P), (L, F)}


def make_sequence(request: Any) -> Sequence:
    kv = KvCache(KvCacheOptions(num_blocks=4, block_size_tokens=4)).sequence(request.prompt_token_ids)
    return Sequence(request, kv, seed=1, arrived_s=0.0, max_model_tokens=64)


@pytest.mark.parametrize(("source", "target"), list(product(SequenceState, repeat=2)))
def test_move_follows_the_diagram(source: SequenceState, target: SequenceState, make_request: Any) -> None:
    sequence = make_sequence(make_request(3, (1, 2)))
    sequence.state = source
    if (source, target) in ARROWS:
        sequence.transition(target)
        assert sequence.state is target
    else:
        with pytest.raises(ContractViolation, match=f"request 3 cannot go from {source.name} to {target.name}"):
            sequence.transition(target)
        assert sequence.state is source


@pytest.mark.parametrize(
    ("max_tokens", "limit", "final"),
    [(1, 11, 10), (8, 18, 17), (100, 32, 31), (0, 10, 10)],
    ids=["one token", "by max_tokens", "by context", "scored only"],
)
def test_limits_follow_from_prompt_max_tokens_and_context(
    make_request: Any, max_tokens: int, limit: int, final: int
) -> None:
    request = make_request(0, (1,) * 10, max_tokens=max_tokens, prompt_logprobs=0)
    assert count_limit_tokens(request, 32) == limit
    assert count_final_tokens(request, 32) == final

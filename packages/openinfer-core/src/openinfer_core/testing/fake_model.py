"""A model that is a hash: its next token depends on every token before it, and on nothing else.

So the output of a request is known in advance, whatever chunks, batches, cached prefixes and preemptions it is
computed with, and two different prefixes practically never agree.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from openinfer_core.events import FinishReason
from openinfer_core.request import GenerateRequest
from openinfer_core.testing.fake_grammar import matcher_of

NUM_TOKEN_IDS = 64  # the fake model's vocabulary; prompts may use any id

_MASK = (1 << 64) - 1
ALL_TOKENS = (1 << NUM_TOKEN_IDS) - 1


def root(request: GenerateRequest) -> int:
    """The state before the first token: what a KV entry depends on besides the tokens."""
    state = 0x9E3779B97F4A7C15
    for name in (_adapter_of(request), request.cache_salt):
        text = b"\x00" if name is None else b"\x01" + name.encode("utf-8", "surrogatepass")
        for byte in text + b"\xff":
            state = extend(state, byte)
    return state


def _adapter_of(request: GenerateRequest) -> str | None:
    # By content: two adapters may have had one name, one after the other.
    return request.lora if request.adapter is None else request.adapter.digest.hex()


def extend(state: int, token_id: int) -> int:
    """The state after one more token: the content of that token's KV entry."""
    mixed = ((state ^ (token_id + 1)) * 0xD6E8FEB86659FD93) & _MASK
    return ((mixed ^ (mixed >> 32)) * 0xD6E8FEB86659FD93) & _MASK


def states(request: GenerateRequest, token_ids: Iterable[int]) -> list[int]:
    state, found = root(request), list[int]()
    for token_id in token_ids:
        state = extend(state, token_id)
        found.append(state)
    return found


def next_token(request: GenerateRequest, state: int, *, num_outputs: int, allowed: int = ALL_TOKENS) -> int:
    """The token sampled after `state`, the request's output number `num_outputs`, from 0.

    Args:
        request: whose.
        state: of the prefix.
        num_outputs: tokens that were sampled before.
        allowed: bit i: whether the grammar's mask has token i. If it has none of the model's, its first is sampled.
    """
    if not allowed & ALL_TOKENS:
        return (allowed & -allowed).bit_length() - 1
    token_id = (state >> 20) % NUM_TOKEN_IDS
    forbidden = request.sampling.stop_token_ids if num_outputs < request.sampling.min_tokens else ()
    while token_id in forbidden or not allowed >> token_id & 1:
        token_id = (token_id + 1) % NUM_TOKEN_IDS
    return token_id


@dataclass(frozen=True, slots=True)
class ExpectedOutcome:
    """How a request ends that nothing disturbs."""

    token_ids: tuple[int, ...]  # what `Tokens` events carry
    reason: FinishReason
    stop_token_id: int | None


def outcome(request: GenerateRequest, *, max_model_tokens: int) -> ExpectedOutcome:
    """What a scheduler has to deliver for a request that fits."""
    prompt = request.prompt_token_ids
    sampling = request.sampling
    state = states(request, prompt)[-1]
    room_tokens = min(sampling.max_tokens, max_model_tokens - len(prompt))
    token_ids: list[int] = []
    matcher = matcher_of(request)
    while len(token_ids) < room_tokens:
        allowed = ALL_TOKENS if matcher is None else matcher.allowed
        token_id = next_token(request, state, num_outputs=len(token_ids), allowed=allowed)
        if token_id in sampling.stop_token_ids and len(token_ids) >= sampling.min_tokens:
            return ExpectedOutcome(tuple(token_ids), FinishReason.STOP, token_id)
        token_ids.append(token_id)
        state = extend(state, token_id)
        if matcher is not None:
            matcher.accept(token_id)
    return ExpectedOutcome(tuple(token_ids), FinishReason.LENGTH, None)

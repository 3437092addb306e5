"""Which replica gets a request: the one that holds its prefix, within a bound of load."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.replicas import PrefixRouter

KEY = b"k" * 16


def router_of(*names: str, num_blocks: int = 1000, **options: float) -> PrefixRouter:
    router = PrefixRouter(block_size_tokens=4, key=KEY, **options)  # type: ignore[arg-type]
    for name in names:
        router.add(name, num_blocks=num_blocks)
    return router


def ask(*tokens: int, **fields: str) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(0),
        prompt_token_ids=tokens,
        sampling=SamplingParams(max_tokens=1),
        **fields,  # type: ignore[arg-type]
    )


def test_the_next_turn_goes_where_the_conversation_is() -> None:
    router = router_of("a", "b", "c", slack=10)
    for conversation in range(20):
        prompt = [1000 + conversation] * 8
        first = router.choose(ask(*prompt))
        for turn in range(5):
            prompt += [turn] * 4
            assert router.choose(ask(*prompt)) == first


@pytest.mark.parametrize("fields", [{"cache_salt": "other"}, {"lora": "other"}])
def test_salts_and_adapters_share_no_prefix(fields: dict[str, str]) -> None:
    router = router_of("a", "b", slack=10)
    prompt = tuple(range(64))
    name = router.choose(ask(*prompt))
    other = router.choose(ask(*prompt, **fields))  # nothing of it is held: the lesser load
    assert other != name
    assert router.choose(ask(*prompt)) == name


def test_salt_and_adapter_are_not_mixed_up() -> None:
    router = router_of("a", "b", slack=10)
    prompt = tuple(range(64))
    assert router.choose(ask(*prompt, lora="ab")) != router.choose(ask(*prompt, cache_salt="ab"))


def test_what_a_full_replica_forgot_counts_no_more() -> None:
    router = router_of("a", "b", num_blocks=4, slack=10)
    first = router.choose(ask(*range(16)))
    router.choose(ask(*range(100, 116)))
    for begin in range(200, 2000, 100):  # both are filled with other things
        router.choose(ask(*range(begin, begin + 16)))
    loads = router.loads
    lesser = min(loads, key=lambda name: loads[name])
    assert router.choose(ask(*range(16))) == lesser
    assert first in {"a", "b"}


def test_a_replica_that_is_gone_gets_nothing_and_a_new_one_is_not_flooded() -> None:
    router = router_of("a", "b")
    for begin in range(0, 4000, 40):
        router.choose(ask(*range(begin, begin + 40)))
    router.remove("b")
    router.remove("b")
    assert router.choose(ask(*range(40))) == "a"
    router.add("c", num_blocks=1000)
    chosen = Counter(router.choose(ask(*range(begin, begin + 40))) for begin in range(10_000, 14_000, 40))
    assert 30 < chosen["c"] < 70
    for name in ("a", "c"):
        router.remove(name)
    with pytest.raises(LookupError):
        router.choose(ask(1))


def test_a_conversation_stays_where_it_is_while_its_replica_has_nothing_else_to_do() -> None:
    router = router_of("a", "b")
    prompt = [1] * 400
    first = router.choose(ask(*prompt))
    for turn in range(2, 12):  # all of the work is one replica's
        router.ended(first)
        prompt += [turn] * 40
        assert router.choose(ask(*prompt)) == first
    router.ended("gone")
    assert router.choose(ask(*prompt, 1)) != first  # the last turn is open: the other one is far below the mean


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 8), st.integers(0, 2**32), st.floats(0.1, 1.0), st.floats(0, 1))
def test_no_replica_has_more_than_the_bound_and_one_request(
    size: int, seed: int, slack: float, share_of_hot_prefix: float
) -> None:
    generator = random.Random(seed)
    router = router_of(*map(str, range(size)), slack=slack)
    longest = 0
    for _ in range(200):
        hot = [7] * 40 if generator.random() < share_of_hot_prefix else []
        prompt = [*hot, *(generator.randrange(50) for _ in range(generator.randrange(1, 60)))]
        longest = max(longest, len(prompt))
        router.choose(ask(*prompt))
        loads = router.loads.values()
        assert max(loads) <= (1 + slack) * sum(loads) / size + longest


def test_two_runs_of_one_sequence_agree() -> None:
    def run() -> list[str]:
        generator, router = random.Random(3), router_of("a", "b", "c", "d")
        return [router.choose(ask(*(generator.randrange(9) for _ in range(30)))) for _ in range(200)]

    assert run() == run()


@pytest.mark.parametrize("options", [{"block_size_tokens": 0}, {"slack": -1.0}, {"memory_tokens": 0}])
def test_options_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="a block has a token at least"):
        PrefixRouter(**({"block_size_tokens": 4, "key": KEY} | options))  # type: ignore[arg-type]

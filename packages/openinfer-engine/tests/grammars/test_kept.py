"""Grammars that are kept: as many as their memory allows, which is counted as what a process grows by, or more."""

import subprocess
import sys

import pytest

from openinfer_core import InvalidRequest, find_plugin
from openinfer_core.sampling import Grammar, GrammarKind
from openinfer_engine.grammars.guard import GrammarTooCostly
from openinfer_engine.grammars.kept import REFUSAL_KEPT_S, KeptGrammars, bytes_of

MEASURE = """
import json, random, sys
from pathlib import Path
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from openinfer_core.sampling import Grammar, GrammarKind
from openinfer_engine.grammars.guard import LIMITS, GrammarGuard
from openinfer_engine.grammars.kept import bytes_of

TOKENIZER = LLTokenizer(sys.argv[1])
LIMIT = LLParserLimits(**LIMITS, verbose_errors=False)

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

def objects(seed, count):
    names = [f"property_{seed}_{i}" for i in range(count)]
    kinds = [{"type": "string", "maxLength": 40}, {"type": "integer"}, {"type": "array", "items": {"type": "string"}}]
    return {"type": "object", "properties": {n: kinds[i % 3] for i, n in enumerate(names)}, "required": names}

def choices(seed, count):
    pattern = lambda i: {"type": "string", "pattern": f"^[a-z]{{1,{3 + i % 20}}}-{seed}$"}
    return {"anyOf": [{"type": "object", "properties": {f"k{seed}_{i}": pattern(i)}} for i in range(count)]}

def walk(matcher, rng):
    words = np.zeros(-(-TOKENIZER.vocab_size // 32), np.uint32)
    for _ in range(60):
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        ids = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        if matcher.is_error() or not len(ids):
            return
        matcher.consume_token(int(rng.choice(ids)))

guard, rng, kept, counted = GrammarGuard(), random.Random(0), [], 0
for warm in (True, False):
    before = resident()
    for seed in range(2 if warm else 30):
        for schema in (objects(seed, 800), choices(seed, 250)):
            grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema))
            matcher = LLMatcher(TOKENIZER, guard.check(grammar, None), log_level=0, limits=LIMIT)
            matcher.compute_bitmask()
            walk(matcher.deep_copy(), rng)
            kept.append(matcher)
            counted += 0 if warm else bytes_of(grammar)
guard.close()
print(resident() - before, counted)
"""


def test_memory_of_grammars_is_within_what_is_counted() -> None:
    tokenizer = find_plugin("openinfer.checkpoints", "tiny").load()() / "tokenizer.json"
    done = subprocess.run([sys.executable, "-c", MEASURE, str(tokenizer)], capture_output=True, text=True, check=True)
    grown, counted = map(int, done.stdout.split())
    assert counted / 10 < grown < counted


def grammar(length: int) -> Grammar:
    return Grammar(kind=GrammarKind.REGEX, text="a" * length)


OWNER = "a"


def key(number: int) -> bytes:
    return number.to_bytes(16)


def test_least_recently_used_make_room_by_bytes() -> None:
    large, small = grammar(100_000), grammar(10)
    kept = KeptGrammars(3 * bytes_of(large), clock=lambda: 0.0)
    compiled = _Compiled()
    for number in range(3):
        kept.put(key(number), large, compiled, owner=OWNER)
    assert kept.get(key(0), OWNER) is compiled
    kept.put(key(3), small, compiled, owner=OWNER)
    assert [kept.get(key(number), OWNER) for number in range(4)] == [compiled, None, compiled, compiled]
    assert kept.num_bytes == 2 * bytes_of(large) + bytes_of(small)
    kept.put(key(3), large, compiled, owner=OWNER)
    assert kept.num_bytes == 3 * bytes_of(large)
    kept.put(key(9), grammar(400_000), compiled, owner=OWNER)
    assert kept.get(key(9), OWNER) is None
    assert kept.num_bytes <= kept.max_bytes


def test_flood_of_one_tenant_evicts_nothing_of_another_below_its_share() -> None:
    one = bytes_of(grammar(10))
    kept = KeptGrammars(10 * one, clock=lambda: 0.0)
    compiled = _Compiled()
    for number in range(5):  # half of it, which is a share of two
        kept.put(key(number), grammar(10), compiled, owner="victim")
    for number in range(100, 200):
        kept.put(key(number), grammar(10), compiled, owner="flood")
    assert [kept.get(key(number), "victim") for number in range(5)] == 5 * [compiled]
    assert [kept.get(key(number), "flood") for number in (194, 195, 199)] == [None, compiled, compiled]
    assert (kept.num_owners, kept.num_evicted, len(kept), kept.num_bytes) == (2, 95, 10, 10 * one)


def test_tenant_beyond_its_share_makes_room_for_a_newcomer() -> None:
    kept = KeptGrammars(4 * bytes_of(grammar(10)), clock=lambda: 0.0)
    compiled = _Compiled()
    for number in range(4):
        kept.put(key(number), grammar(10), compiled, owner="first")
    for number in range(4, 6):
        kept.put(key(number), grammar(10), compiled, owner="second")
    assert [kept.get(key(number), "first") for number in range(6)] == [None, None, *4 * [compiled]]


def test_refusals_of_a_flood_evict_nothing_of_another() -> None:
    kept = KeptGrammars(2 * bytes_of(grammar(10)), clock=lambda: 0.0)
    compiled = _Compiled()
    kept.put(key(0), grammar(10), compiled, owner="victim")
    for number in range(1, 1000):
        kept.put(key(number), grammar(10), InvalidRequest("malformed"), owner="flood")
    assert kept.num_evicted > 0
    assert kept.get(key(0), "victim") is compiled
    assert kept.num_bytes <= kept.max_bytes


@pytest.mark.parametrize("takes", [True, False])
def test_what_a_flood_asks_for_of_another_is_not_among_what_it_gives_up(takes: bool) -> None:
    kept = KeptGrammars(10 * bytes_of(grammar(10)), clock=lambda: 0.0)
    compiled = _Compiled()
    for number in range(100, 109):
        kept.put(key(number), grammar(10), compiled, owner="flood")
    kept.put(key(0), grammar(10), compiled, owner="victim")
    if takes:
        assert kept.get(key(0), "flood") is compiled
    for number in range(109, 200):
        kept.put(key(number), grammar(10), compiled, owner="flood")
    assert kept.get(key(0), "victim") is compiled


def test_what_several_ask_for_counts_for_the_one_that_has_least() -> None:
    one = bytes_of(grammar(10))
    kept = KeptGrammars(5 * one, clock=lambda: 0.0)
    compiled = _Compiled()
    for number in range(4):
        kept.put(key(number), grammar(10), compiled, owner="first")
    assert kept.get(key(0), "second") is compiled
    assert (len(kept), kept.num_bytes, kept.num_owners) == (4, 4 * one, 2)
    for number in range(10, 30):
        kept.put(key(number), grammar(10), compiled, owner="first")
    assert kept.get(key(0), "second") is compiled
    assert kept.get(key(1), "first") is None


def test_refusal_for_cost_is_forgotten_and_one_for_what_a_grammar_is_is_not() -> None:
    now_s = [0.0]
    kept = KeptGrammars(clock=lambda: now_s[0])
    malformed, costly = InvalidRequest("malformed"), GrammarTooCostly("costly")
    kept.put(key(1), grammar(1), malformed, owner=OWNER)
    kept.put(key(2), grammar(1), costly, owner=OWNER)
    now_s[0] = REFUSAL_KEPT_S - 1
    assert [kept.get(key(1), OWNER), kept.get(key(2), OWNER)] == [malformed, costly]
    now_s[0] = REFUSAL_KEPT_S
    assert [kept.get(key(1), OWNER), kept.get(key(2), OWNER)] == [malformed, None]
    assert len(kept) == 1


class _Compiled:
    """Stands in for a matcher, of which nothing is asked."""

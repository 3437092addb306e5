"""Looked up drafts on the CPU: vLLM's rule token for token, references, and sequences that grow as engines' do."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from openinfer_kernels import NgramHistory, NgramMatch, NgramRule
from openinfer_kernels.cpu import CpuOps

K = 5
RULE = NgramRule(n_min=2, n_max=4, reference_n_max=32, match=NgramMatch.EARLIEST, max_tokens=80)


def history(num_slots: int, *, width: int = 120, k: int = K) -> NgramHistory:
    return NgramHistory(
        ids=np.full((num_slots, width), -1, np.int32),
        known=np.zeros(num_slots, np.int32),
        references=np.zeros(num_slots, np.int32),
        drafts=np.full((num_slots, k), -1, np.int32),
    )


def column(*values: int) -> Any:
    return np.asarray(values, np.int32)


def drafts_of(ids: Sequence[int], rule: NgramRule = RULE, *, reference: Sequence[int] = (), k: int = K) -> list[int]:
    """What a sequence of these ids is drafted, all but the last known before."""
    slots = history(2, k=k)
    slots.ids[1, : len(reference) + len(ids) - 1] = [*reference, *ids[:-1]]
    slots.known[1], slots.references[1] = len(ids) - 1, len(reference)
    found = CpuOps.ngram_drafts(slots, column(1), column(ids[-1]), column(len(ids)), rule=rule)
    return [int(each) for each in found[0] if each >= 0]


def published(ids: Sequence[int], *, n_min: int, n_max: int, max_tokens: int, k: int) -> list[int]:
    """The rule as vLLM computes it: Knuth, Morris and Pratt's failure function over the reversed ids, n_max long.

    Source: `_find_longest_matched_ngram_and_propose_tokens` of `vllm/v1/spec_decode/ngram_proposer.py`.
    """
    num_tokens = len(ids)
    k = min(k, max_tokens - num_tokens)
    if num_tokens < n_min or k <= 0:
        return []
    backwards, failure = list(reversed(ids)), [0] * n_max
    longest = place = matched = 0
    for i in range(1, num_tokens):
        while matched and backwards[matched] != backwards[i]:
            matched = failure[matched - 1]
        if backwards[matched] == backwards[i]:
            matched += 1
            if matched >= longest:
                longest, place = matched, i
        if i < n_max:
            failure[i] = matched
        if matched == n_max:
            matched = failure[n_max - 1]
    if longest < n_min:
        return []
    begin = num_tokens - 1 - place + longest
    return list(ids[begin : begin + k])


def contexts(count: int) -> list[tuple[list[int], NgramRule, int]]:
    """Few different ids, so that matches are many, overlap, and are of every length."""
    rng = np.random.default_rng(3)
    found: list[tuple[list[int], NgramRule, int]] = []
    for _ in range(count):
        n_min = int(rng.integers(1, 4))
        n_max = int(rng.integers(n_min, 7))
        ids: list[int] = rng.integers(0, rng.integers(2, 9), rng.integers(1, 70)).tolist()
        rule = replace(RULE, n_min=n_min, n_max=n_max, max_tokens=len(ids) + int(rng.integers(0, 12)))
        found.append((ids, rule, int(rng.integers(1, 9))))
    return found


def test_drafts_are_those_of_the_published_rule_on_1000_random_contexts() -> None:
    num_drafts = 0
    for ids, rule, k in contexts(1000):
        expected = published(ids, n_min=rule.n_min, n_max=rule.n_max, max_tokens=rule.max_tokens, k=k)
        assert drafts_of(ids, rule, k=k) == expected, (ids, rule, k)
        num_drafts += len(expected)
    assert num_drafts > 1000


@pytest.mark.parametrize("mutant", ["shifted", "latest", "shorter"])
def test_a_mutant_of_the_rule_differs(mutant: str) -> None:
    wrong = 0
    for ids, rule, k in contexts(1000):
        expected = published(ids, n_min=rule.n_min, n_max=rule.n_max, max_tokens=rule.max_tokens, k=k)
        if mutant == "shifted":
            found = drafts_of([*ids[1:], ids[0]], rule, k=k)
        elif mutant == "latest":
            found = drafts_of(ids, replace(rule, match=NgramMatch.LATEST), k=k)
        else:
            found = drafts_of(ids, replace(rule, n_max=rule.n_min), k=k)
        wrong += found != expected
    assert wrong > 100


def test_the_latest_match_goes_on_into_its_own_drafts() -> None:
    rule = replace(RULE, match=NgramMatch.LATEST)
    assert drafts_of([1, 2, 3, 4, 1, 2, 9, 1, 2], rule) == [9, 1, 2, 9, 1]
    assert drafts_of([7, 7, 7], rule) == [7] * K
    assert drafts_of([1, 2, 3, 4, 1, 2, 9, 1, 2]) == [3, 4, 1, 2, 9]


def test_a_reference_is_looked_up_alone_and_drafts_end_with_it() -> None:
    assert drafts_of([5, 6, 7, 8], reference=[7, 8, 1, 2, 3]) == [1, 2, 3]
    assert drafts_of([5, 6, 7, 8, 5, 6], reference=[7, 8, 1, 2, 3]) == []
    # Of two places with the same two tokens, that after more of what came before.
    assert drafts_of([9, 9, 4, 1, 2], reference=[0, 1, 2, 3, 4, 1, 2, 5]) == [5]
    # Where nothing follows, there is no match.
    assert drafts_of([9, 9, 2, 5], reference=[0, 1, 2, 5]) == []


def test_a_sequence_that_grows_by_its_drafts_is_known_whole() -> None:
    slots = history(3)
    slots.ids[2, :6] = [1, 2, 3, 4, 5, 1]
    slots.known[2] = 6
    assert CpuOps.ngram_drafts(slots, column(2), column(2), column(7), rule=RULE).tolist() == [[3, 4, 5, 1, 2]]
    # Two of them were accepted, and 9 was sampled after these.
    CpuOps.ngram_drafts(slots, column(2), column(9), column(10), rule=RULE)
    assert slots.ids[2, :10].tolist() == [1, 2, 3, 4, 5, 1, 2, 3, 4, 9]
    # More than there were drafts: what they are is not known.
    CpuOps.ngram_drafts(slots, column(2), column(8), column(13), rule=RULE)
    assert slots.ids[2, 9:13].tolist() == [9, -1, -1, 8]
    # A row that has not grown, and one that there is no room for.
    before = slots.ids.copy()
    assert (CpuOps.ngram_drafts(slots, column(2, 0), column(8, 8), column(13, 121), rule=RULE) == -1).all()
    np.testing.assert_array_equal(slots.ids, before)


def test_drafts_end_at_the_longest_sequence() -> None:
    ids = [1, 2, 3, 4, 5, 6, 1, 2]
    assert drafts_of(ids, replace(RULE, max_tokens=10)) == [3, 4]
    assert drafts_of(ids, replace(RULE, max_tokens=8)) == []

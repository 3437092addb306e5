import pytest

from openinfer_kv_cache import EvictionPolicyError, LeastRecentlyUsed
from openinfer_kv_cache.testing import check_eviction_policy, measure_bookkeeping


class FirstInFirstOut(LeastRecentlyUsed):
    """By first admission: a block that is reused keeps its place for the next time it is idle."""

    def __init__(self):
        super().__init__()
        self.arrivals = {}

    def admit(self, block_ids):
        for block_id in block_ids:
            self.arrivals.setdefault(block_id, len(self.arrivals))
        super().admit(block_ids)

    def select(self, num_blocks):
        victims = sorted(self._order, key=self.arrivals.__getitem__)[:num_blocks]
        self.forget(victims)
        for victim in victims:
            del self.arrivals[victim]
        return victims


class KeepsWhatItSelects(LeastRecentlyUsed):
    def select(self, num_blocks):
        return list(self._order)[:num_blocks]


class IgnoresReuse(LeastRecentlyUsed):
    def reuse(self, block_ids):
        pass


class IgnoresForget(LeastRecentlyUsed):
    def forget(self, block_ids):
        pass


class SelectsTooFew(LeastRecentlyUsed):
    def select(self, num_blocks):
        return super().select(max(num_blocks - 1, 1))


class ForgetsWhatWasReused(LeastRecentlyUsed):
    def __init__(self):
        super().__init__()
        self.reused = set()

    def reuse(self, block_ids):
        super().reuse(block_ids)
        self.reused.update(block_ids)

    def admit(self, block_ids):
        super().admit([block_id for block_id in block_ids if block_id not in self.reused])


class SelectsAnythingForZero(LeastRecentlyUsed):
    def select(self, num_blocks):
        return super().select(num_blocks) or [0]


@pytest.mark.parametrize("policy", [LeastRecentlyUsed, FirstInFirstOut])
def test_check_eviction_policy_passes_right_ones(policy):
    check_eviction_policy(policy)


@pytest.mark.parametrize(
    "policy",
    [
        KeepsWhatItSelects,
        IgnoresReuse,
        IgnoresForget,
        SelectsTooFew,
        ForgetsWhatWasReused,
        SelectsAnythingForZero,
    ],
)
def test_check_eviction_policy_catches_wrong_ones(policy):
    with pytest.raises((AssertionError, KeyError, EvictionPolicyError)):
        check_eviction_policy(policy)


def test_measure_bookkeeping_times_every_verb():
    times = measure_bookkeeping(prompt_blocks=8, num_prompts=5, num_rounds=2)
    assert times.num_blocks == 40
    parts = (times.match_s, times.reserve_s, times.seal_s, times.release_s)
    assert min(parts) > 0
    assert times.total_s == pytest.approx(sum(parts))  # sum() rounds otherwise since Python 3.12

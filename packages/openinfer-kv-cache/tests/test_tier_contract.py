"""The tiers' conformance kit: it takes a right tier, and no tier with any one of these defects."""

import threading
import zlib

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from openinfer_kv_cache import KvTierError, TierCounters, TierFailure, TransferState
from openinfer_kv_cache.testing.tier_contract import check_tier
from openinfer_kv_cache.testing.tier_machine import tier_machine

PLACE_BYTES = 4096


class Memory:
    def __init__(self):
        self._content = bytearray(64 * PLACE_BYTES)

    def write(self, offset_bytes, parts):
        for part in parts:
            self._content[offset_bytes : offset_bytes + len(part)] = part
            offset_bytes += len(part)

    def read(self, offset_bytes, into):
        into[:] = self._content[offset_bytes : offset_bytes + len(into)]


class ThreadTransfer:
    """One thread per transfer."""

    def __init__(self, tier, num_blocks, timeout_s, job):
        self.num_blocks, self.completed_blocks, self.failure = num_blocks, 0, None
        self._tier, self._has_time = tier, timeout_s is None or timeout_s > 0
        self._state, self._is_cancelled = TransferState.PENDING, False
        self.thread = threading.Thread(target=self._run, args=(job,), daemon=True)
        self.thread.start()

    def poll(self):
        return self._state

    def cancel(self):
        self._is_cancelled = True
        if self._tier.defect == "cancels at once":
            self._state = TransferState.CANCELLED

    def wait(self, timeout_s=None):
        if self._state is TransferState.PENDING:
            self.thread.join(timeout_s)
        return self._state

    def _run(self, job):
        state = TransferState.COMPLETED
        try:
            for index in range(self.num_blocks):
                if self._tier.is_closed:
                    raise_failure(TierFailure.CLOSED)
                if not self._has_time and self._tier.defect != "no deadline":
                    raise_failure(TierFailure.DEADLINE)
                job(index)
                self.completed_blocks += self._state is TransferState.PENDING
                if self._is_cancelled and self.completed_blocks < self.num_blocks:
                    state = TransferState.CANCELLED
                    break
        except Exception as error:  # noqa: BLE001 -- as a tier must
            state, self.failure = TransferState.PARTIAL, classify(error)
            if self._tier.defect != "counts no failures":
                self._tier.failures[self.failure] += 1
        if self._state is TransferState.PENDING:
            self._state = state


class Failed(Exception):
    pass


def raise_failure(failure):
    raise Failed(failure)


def classify(error):
    match error:
        case Failed(args=(failure,)):
            return failure
        case ConnectionError():
            return TierFailure.GONE
        case OSError(errno=28):
            return TierFailure.FULL
    return TierFailure.IO_ERROR


class DictHit:
    def __init__(self, digests):
        self.digests, self.is_open = digests, True

    def close(self):
        self.is_open = False


class DictTier:
    """A right tier of 64 places that gives nothing up, but for one defect."""

    name, accepts_saves = "dict", True

    def __init__(self, layout, faults, defect):
        self.layout, self.defect, self.is_closed = layout, defect, False
        self.failures = dict.fromkeys(TierFailure, 0)
        self._medium = faults.wrap(Memory())
        self._places, self._free, self._corrupt = {}, list(range(64)), 0
        self._lock, self._transfers = threading.Lock(), []

    def find(self, digests):
        found = []
        for digest in () if self.is_closed and self.defect != "finds after close" else digests:
            if digest in self._places:
                found.append(digest)
            elif self.defect != "skips gaps":
                break
        return DictHit(found)

    def load(self, hit, blocks, *, timeout_s=None):
        if not hit.is_open and self.defect != "takes spent hits":
            raise KvTierError("spent")
        self._check(blocks, len(hit.digests))
        hit.close()
        return self._begin(len(blocks), timeout_s, lambda i: self._load(hit.digests[i], blocks[i]))

    def save(self, digests, blocks, *, timeout_s=None):
        self._check(blocks, len(digests))
        return self._begin(len(blocks), timeout_s, lambda i: self._save(digests[i], blocks[i]))

    def counters(self):
        zeros = dict.fromkeys("num_finds hit_blocks missed_blocks loaded_blocks saved_blocks evicted_blocks".split(), 0)
        counts = {"corrupt_blocks": self._corrupt, "stored_blocks": len(self._places), "failures": self.failures}
        return (TierCounters(tier="dict", **zeros, **counts),)

    def close(self):
        self.is_closed = True
        for transfer in self._transfers:
            transfer.thread.join()

    def _begin(self, num_blocks, timeout_s, job):
        self._transfers.append(ThreadTransfer(self, num_blocks, timeout_s, job))
        return self._transfers[-1]

    def _check(self, blocks, num_blocks):
        if self.defect == "checks no memory":
            return
        if len(blocks) != num_blocks or any(len(b) != self.layout.block_bytes or b.readonly for b in blocks):
            raise KvTierError("not blocks")

    def _load(self, digest, block):
        place, check = self._places[digest]
        self._medium.read(place * PLACE_BYTES, block)
        if zlib.crc32(block) != check and self.defect != "no checksum":
            if self.defect != "keeps corrupt blocks":
                del self._places[digest]
            self._corrupt += self.defect != "counts no corruption"
            raise_failure(TierFailure.CORRUPT)

    def _save(self, digest, block):
        if digest in self._places:
            return
        place = self._free.pop()
        self._medium.write(place * PLACE_BYTES, [block])
        self._places[digest] = (place, zlib.crc32(block))


class DictCase:
    is_persistent, capacity_blocks = False, 8

    def __init__(self, defect=None):
        self._defect = defect

    def open(self, layout, faults):
        return DictTier(layout, faults, self._defect)


def test_a_right_tier_passes():
    check_tier(DictCase)


@pytest.mark.parametrize(
    ("defect", "message"),
    [
        ("no checksum", "WRONG KV"),
        ("skips gaps", r"something else than a beginning|must stop at the first"),
        ("takes spent hits", "loaded already"),
        ("checks no memory", "must raise KvTierError"),
        ("counts no failures", "not counted by reason"),
        ("counts no corruption", "dropped blocks were not counted"),
        ("keeps corrupt blocks", "can still be found"),
        ("no deadline", "without any time"),
        ("cancels at once", "after the transfer had ended"),
        ("finds after close", "a closed tier found something"),
    ],
)
def test_a_tier_with_one_defect_is_refused(defect, message):
    with pytest.raises(AssertionError, match=message):
        check_tier(lambda: DictCase(defect))


def test_the_machine_finds_a_tier_without_checksums():
    fixed = settings(max_examples=20, phases=[Phase.generate], deadline=None, derandomize=True, database=None)
    with pytest.raises((AssertionError, ExceptionGroup), match=r"WRONG KV|distinct failures"):
        run_state_machine_as_test(tier_machine(lambda: DictCase("no checksum"))[0], settings=fixed)

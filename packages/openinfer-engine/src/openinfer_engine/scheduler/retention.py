"""`Retention`: what ended requests leave in the cache is given up after what others left, for as long as they asked.

A request asks for all that it leaves (`retain_s`), or for beginnings of its prompt (`retained_prefixes`), up to the
block that holds the last token of one.

    a turn ends ── its blocks, and the states at its last boundary, have a deadline ──► the deadline, or
                   a newer turn of the same key ends: what that one does not share has a deadline no more, but
                   for what another key, or a request without one, asked to retain as well

A deadline is an order of eviction (`BlockPool.retain`) and nothing more: no request waits or fails for it. Of tenants,
the one with most gives up first, retained or not. With KV tiers, sealed blocks are saved as they are made, so one that
is given up is still in a tier, and is loaded when its conversation goes on.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListLike
from time import monotonic
from typing import NamedTuple

from openinfer_engine.scheduler.sequence import Sequence
from openinfer_engine.scheduler.states.snapshots import Snapshots
from openinfer_kv_cache import Digest, KvCache
from openinfer_kv_cache.digest import table_digest

MAX_KEYS = 4096
MAX_DIGESTS = 2**20
"""Of all keys' last turns; the turns that ended longest ago are forgotten, and then keep their deadlines. Of what was
retained without a key as many are known."""
Key = tuple[str | None, ...]


class _Claim(NamedTuple):
    """What one turn asked to retain."""

    digests: ListLike[Digest]
    until_s: float


class _Claims:
    """The last one of each key, bounded."""

    def __init__(self) -> None:
        self._claims: OrderedDict[Key | Digest, _Claim] = OrderedDict()
        self._num_digests = 0

    def __len__(self) -> int:
        return len(self._claims)

    def __iter__(self) -> Iterator[_Claim]:
        return iter(self._claims.values())

    def pop(self, key: Key | Digest) -> _Claim | None:
        claim = self._claims.pop(key, None)
        self._num_digests -= 0 if claim is None else len(claim.digests)
        return claim

    def put(self, key: Key | Digest, claim: _Claim) -> None:
        self.pop(key)
        self._claims[key] = claim
        self._num_digests += len(claim.digests)
        while self._claims and (len(self._claims) > MAX_KEYS or self._num_digests > MAX_DIGESTS):
            self.pop(next(iter(self._claims)))

    def clear(self) -> None:
        self._claims.clear()
        self._num_digests = 0


class Retention:
    """Of one cache.

    Args:
        kv: the cache.
        snapshots: of recurrent states, if the model has some.
        clock: monotonic seconds, as the cache's.
    """

    def __init__(self, kv: KvCache, snapshots: Snapshots | None, *, clock: Callable[[], float] = monotonic) -> None:
        self._kv = kv
        self._snapshots = snapshots
        self._clock = clock
        self._turns = _Claims()
        self._others = _Claims()  # without a key: by their last digest

    @property
    def num_keys(self) -> int:
        return len(self._turns)

    def ended(self, sequence: Sequence) -> None:
        """A sequence is about to give its blocks back."""
        request = sequence.request
        if request.retain_s is not None:
            self._retain(sequence, request.retain_s)
            self._note(sequence, request.retain_s)
        for prefix in request.retained_prefixes:
            self._retain(sequence, prefix.retain_s, num_tokens=prefix.num_tokens)
            num_blocks = self._kv.pool.blocks_for(prefix.num_tokens)
            self._claim(sequence.kv.prefix_digests()[: min(num_blocks, sequence.kv.num_sealed_blocks)], prefix.retain_s)

    def clear(self) -> None:
        self._turns.clear()
        self._others.clear()

    def _retain(self, sequence: Sequence, for_s: float, *, num_tokens: int | None = None) -> None:
        sequence.kv.retain(for_s, num_tokens=num_tokens)
        if self._snapshots is not None:
            self._snapshots.retain(sequence.kv, for_s=for_s, num_tokens=num_tokens)

    def _note(self, sequence: Sequence, for_s: float) -> None:
        request = sequence.request
        digests = sequence.kv.prefix_digests()[: sequence.kv.num_sealed_blocks]
        if request.cache_key is None:
            self._claim(digests, for_s)
            return
        key = (request.tenant, request.cache_salt, request.lora, request.cache_key)
        before = self._turns.pop(key)
        self._turns.put(key, _Claim(digests, self._clock() + for_s))
        if before is not None:
            self._supersede(before.digests, _num_common(before.digests, digests))

    def _claim(self, digests: ListLike[Digest], for_s: float) -> None:
        if not digests:
            return
        before, until_s = self._others.pop(digests[-1]), self._clock() + for_s
        self._others.put(digests[-1], _Claim(digests, until_s if before is None else max(until_s, before.until_s)))

    def _supersede(self, digests: ListLike[Digest], begin: int) -> None:
        """Takes the deadlines of a turn's blocks from `begin` on, but for those that others asked for."""
        if begin == len(digests):
            return
        # Head first: the last one to be changed is the first one to go, and a tail goes before its head.
        for digest in digests[begin:]:
            self._kv.pool.retain(self._blocks_of(digest), 0)
        now_s = self._clock()
        for claims in (self._turns, self._others):
            for claim in claims:
                # A digest binds those before it, so one look tells most of them apart.
                if claim.until_s > now_s and len(claim.digests) > begin and claim.digests[begin] == digests[begin]:
                    end = _num_common(claim.digests, digests)
                    for digest in reversed(digests[begin:end]):
                        self._kv.pool.retain(self._blocks_of(digest), claim.until_s - now_s)

    def _blocks_of(self, digest: Digest) -> list[int]:
        found = (self._kv.pool.find(table_digest(digest, table)) for table in range(len(self._kv.table_windows)))
        return [block_id for block_id in found if block_id is not None]


def _num_common(one: ListLike[Digest], other: ListLike[Digest]) -> int:
    """How many both begin with; a digest binds those before it."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            least = middle
        else:
            most = middle - 1
    return least

"""`Retention`: what ended requests leave in the cache is given up after what others left, for as long as they asked.

A request asks for all that it leaves (`retain_s`), or for beginnings of its prompt (`retained_prefixes`), up to the
block that holds the last token of one.

    a turn ends ── its blocks, and the states at its last boundary, have a deadline ──► the deadline, or
                   a newer turn of the same key ends: what that one does not share has a deadline no more

A deadline is an order of eviction (`BlockPool.retain`) and nothing more: no request waits or fails for it. Of tenants,
the one with most gives up first, retained or not. With KV tiers, sealed blocks are saved as they are made, so one that
is given up is still in a tier, and is loaded when its conversation goes on.
"""

from collections import OrderedDict
from collections.abc import Sequence as ListLike

from openinfer_engine.scheduler.sequence import Sequence
from openinfer_engine.scheduler.states.snapshots import Snapshots
from openinfer_kv_cache import Digest, KvCache
from openinfer_kv_cache.digest import table_digest

MAX_KEYS = 4096
MAX_DIGESTS = 2**20
"""Of all keys' last turns; the turns that ended longest ago are forgotten, and then keep their deadlines."""


class Retention:
    """Of one cache."""

    def __init__(self, kv: KvCache, snapshots: Snapshots | None) -> None:
        self._kv = kv
        self._snapshots = snapshots
        self._turns: OrderedDict[tuple[str | None, ...], ListLike[Digest]] = OrderedDict()  # by key, the last one's
        self._num_digests = 0

    @property
    def num_keys(self) -> int:
        return len(self._turns)

    def ended(self, sequence: Sequence) -> None:
        """A sequence is about to give its blocks back."""
        request = sequence.request
        if request.retain_s is not None:
            if request.cache_key is not None:
                key = (request.tenant, request.cache_salt, request.lora, request.cache_key)
                self._supersede(key, sequence.kv.prefix_digests()[: sequence.kv.num_sealed_blocks])
            self._retain(sequence, request.retain_s)
        for prefix in request.retained_prefixes:
            self._retain(sequence, prefix.retain_s, num_tokens=prefix.num_tokens)

    def clear(self) -> None:
        self._turns.clear()
        self._num_digests = 0

    def _retain(self, sequence: Sequence, for_s: float, *, num_tokens: int | None = None) -> None:
        sequence.kv.retain(for_s, num_tokens=num_tokens)
        if self._snapshots is not None:
            self._snapshots.retain(sequence.kv, for_s=for_s, num_tokens=num_tokens)

    def _supersede(self, key: tuple[str | None, ...], digests: ListLike[Digest]) -> None:
        before = self._turns.pop(key, ())
        pool, num_tables = self._kv.pool, len(self._kv.table_windows)
        for digest in before[_num_common(before, digests) :]:
            # Head first: the last one to be changed is the first one to go, and a tail goes before its head.
            found = (pool.find(table_digest(digest, table)) for table in range(num_tables))
            pool.retain([block_id for block_id in found if block_id is not None], 0)
        self._turns[key] = digests
        self._num_digests += len(digests) - len(before)
        while self._turns and (len(self._turns) > MAX_KEYS or self._num_digests > MAX_DIGESTS):
            _, forgotten = self._turns.popitem(last=False)
            self._num_digests -= len(forgotten)


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

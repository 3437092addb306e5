"""`LocalShare`: the share of a rank that is a thread of this process."""

from collections.abc import Sequence

from openinfer_core.engine import KvTierStats
from openinfer_engine.kv_tiers.port import PoolTierPort
from openinfer_engine.kv_tiers.transfer import ChunkedTransfer
from openinfer_kv_cache import Digest, TierTransfer


class LocalShare:
    """Of a rank in this process.

    Args:
        port: to the rank's tiers; closed by `close`.
    """

    def __init__(self, port: PoolTierPort) -> None:
        self._port = port

    def load(self, digests: Sequence[Digest], places: Sequence[int]) -> TierTransfer:
        self._port.settle()
        return self._port.load(self._port.find_looking_up(digests), places) or self._nothing()

    def save(self, digests: Sequence[Digest], places: Sequence[int]) -> TierTransfer:
        self._port.settle()
        return self._port.save(digests, places) or self._nothing()

    def prefetch(self, digests: Sequence[Digest]) -> None:
        self._port.settle()
        self._port.prefetch(digests)

    @property
    def faults(self) -> int:
        return self._port.faults

    def stats(self) -> tuple[KvTierStats, ...]:
        return self._port.stats()

    def close(self) -> None:
        self._port.close()

    def _nothing(self) -> TierTransfer:
        return ChunkedTransfer((), num_blocks=0, begin_s=self._port.clock())

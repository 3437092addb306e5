"""`TierContents`: what the tiers of one data-parallel rank hold, as they tell it themselves."""

import itertools
import threading
from collections.abc import Sequence

from openinfer_kv_cache import Digest, TierMedium


class TierContents:
    """Implements `TierListener`; heard by the threads of tiers, or the one that listens to a rank, asked by any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[Digest, int] = {}  # of the tiers of a stack that have a block

    def stored(self, digests: Sequence[Digest], medium: TierMedium | None = None) -> None:
        del medium
        with self._lock:
            for digest in digests:
                self._counts[digest] = self._counts.get(digest, 0) + 1

    def removed(self, digests: Sequence[Digest], medium: TierMedium | None = None) -> None:
        del medium
        with self._lock:
            for digest in digests:
                # None of one that was forgotten here since.
                if (left := self._counts.pop(digest, 0) - 1) > 0:
                    self._counts[digest] = left

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._counts

    def __len__(self) -> int:
        return len(self._counts)

    def count(self, digests: Sequence[Digest]) -> int:
        """Blocks from the beginning of a chain on that can be found."""
        return sum(1 for _ in itertools.takewhile(self._counts.__contains__, digests))

    def note(self, digests: Sequence[Digest]) -> None:
        """Does nothing: what has been saved or loaded, the tiers tell."""

    def forget(self, digests: Sequence[Digest]) -> None:
        """Blocks that could not be loaded: they are not found until a tier tells of them anew."""
        with self._lock:
            for digest in digests:
                self._counts.pop(digest, None)

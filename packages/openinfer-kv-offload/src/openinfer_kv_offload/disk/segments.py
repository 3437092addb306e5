"""`SegmentIndex`: which block is in which record of which segment, within a budget. Not thread-safe: the tier locks."""

import errno
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from openinfer_kv_cache import Digest, IntegrityError
from openinfer_kv_offload.disk.segment import Segment
from openinfer_kv_offload.disk.store import StoreFolder
from openinfer_kv_offload.format.manifest import StoreAccess
from openinfer_kv_offload.transfer.memory import WrapMedium
from openinfer_kv_offload.transfer.telling import IndexListener, NotTold


class Recorded(NamedTuple):
    """A block on the disk."""

    segment: Segment
    record_index: int
    digest: Digest

    @property
    def offset_bytes(self) -> int:
        return self.record_index * self.segment.record_bytes


class Discovery(NamedTuple):
    """What a look at the folder has found."""

    opened: list[Segment]
    vanished: list[Segment]
    recorded: list[Recorded]
    bad_records: int


class SegmentIndex:
    """The blocks of a store, found by their digest; a new file begins after `segment_bytes`."""

    def __init__(
        self,
        store: StoreFolder,
        access: StoreAccess,
        *,
        layout_digest: bytes,
        record_bytes: int,
        segment_bytes: int,
        budget_bytes: int,
        wrap_medium: WrapMedium,
    ) -> None:
        self._store = store
        self._is_writer = access is StoreAccess.WRITE
        self._layout_digest = layout_digest
        self._record_bytes = record_bytes
        self._segment_bytes = segment_bytes
        self._budget_bytes = budget_bytes
        self._wrap_medium = wrap_medium
        self._segments: list[Segment] = []
        self._by_digest: dict[Digest, Recorded] = {}
        self._uses = 0
        self.listener: IndexListener = NotTold()

    def digests(self) -> Collection[Digest]:
        return self._by_digest

    def __len__(self) -> int:
        return len(self._by_digest)

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._by_digest

    def discover(self) -> "Discovery":
        """Reads the headers of records not seen before: input and output only, nothing can be found yet."""
        paths = self._store.segment_paths()
        vanished = [segment for segment in self._segments if not segment.is_current()]
        known = {segment.path for segment in self._segments if segment not in vanished}
        opened = [segment for path in paths if path not in known and (segment := self._open(path)) is not None]
        recorded: list[Recorded] = []
        bad_records = 0
        for segment in [each for each in self._segments if each not in vanished] + opened:
            for record_index, header in segment.scan():
                if header is None or header.layout_digest != self._layout_digest:
                    bad_records += 1
                else:
                    recorded.append(Recorded(segment, record_index, header.digest))
            if self._is_writer:  # a reader may see half of a record that is being written
                segment.cut_torn_end()
        return Discovery(opened, vanished, recorded, bad_records)

    def adopt(self, discovery: "Discovery") -> int:
        """Makes it findable; returns how many blocks went with the segments that vanished."""
        gone = self._forget(discovery.vanished)
        self._segments += discovery.opened
        for recorded in discovery.recorded:
            self._register(recorded)
        return gone

    def is_in_place(self) -> bool:
        """Whether the segment that is appended to is still there; without one, whether the store is."""
        return self._segments[-1].is_current() if self._segments else self._store.is_current()

    def move_to(self, store: StoreFolder) -> None:
        """Goes on in another opening of the store, whose segments are not discovered yet."""
        self._store = store

    def forget_all(self) -> int:
        """Of a store that was removed from outside; returns how many blocks went with it."""
        return self._forget(self._segments)

    def make_room(self) -> int:
        """Gives up the least recently used segment, unless it is the only one; returns how many blocks went with it."""
        return self._evict() if len(self._segments) > 1 else 0

    def hold_prefix(self, digests: Sequence[Digest]) -> list[Recorded]:
        held: list[Recorded] = []
        by_digest = self._by_digest
        self._uses += 1
        for digest in digests:
            recorded = by_digest.get(digest)
            if recorded is None:
                break
            recorded.segment.users += 1
            recorded.segment.last_used = self._uses
            held.append(recorded)
        return held

    def release(self, held: Sequence[Recorded]) -> None:
        for recorded in held:
            recorded.segment.users -= 1
            recorded.segment.close_unused()

    def drop(self, recorded: Recorded) -> bool:
        if self._by_digest.get(recorded.digest) is not recorded:
            return False
        del self._by_digest[recorded.digest]
        self.listener.removed(recorded.digest)
        return True

    def segment_for_append(self) -> tuple[Segment, int]:
        """The segment to append to, and how many blocks were given up for it; `OSError` (ENOSPC) if none can be."""
        evicted = 0
        while sum(segment.size_bytes for segment in self._segments) + self._record_bytes > self._budget_bytes:
            if not self._segments:
                raise OSError(errno.ENOSPC, "the budget holds no record")
            evicted += self._evict()
        last = self._segments[-1] if self._segments else None
        if last is None or last.size_bytes + self._record_bytes > self._segment_bytes:
            last = self._create(self._store.path_after(last.path if last else None))
        return last, evicted

    def appended(self, segment: Segment, digest: Digest) -> None:
        self._uses += 1
        segment.last_used = self._uses
        self._register(Recorded(segment, segment.num_records, digest))
        segment.num_records += 1

    def close(self) -> None:
        for segment in self._segments:
            segment.close()

    def check_integrity(self) -> None:
        for digest, recorded in self._by_digest.items():
            segment = recorded.segment
            if recorded.digest != digest or segment not in self._segments:
                raise IntegrityError(f"{digest.hex()} leads to {recorded}")
            if not 0 <= recorded.record_index < segment.num_records:
                raise IntegrityError(f"{segment.path} has {segment.num_records} records, not {recorded.record_index}")

    def _open(self, path: Path) -> Segment | None:
        try:
            return Segment(
                path, writable=self._is_writer, record_bytes=self._record_bytes, wrap_medium=self._wrap_medium
            )
        except FileNotFoundError:  # its writer has deleted it since the folder was listed
            return None

    def _create(self, path: Path) -> Segment:
        segment = Segment(path, writable=True, record_bytes=self._record_bytes, wrap_medium=self._wrap_medium)
        segment.last_used = self._uses  # one that took no record yet is not the first to be given up
        self._segments.append(segment)
        return segment

    def _register(self, recorded: Recorded) -> None:
        if recorded.digest not in self._by_digest:
            self.listener.stored(recorded.digest)
        self._by_digest[recorded.digest] = recorded
        recorded.segment.digests.append(recorded.digest)

    def _evict(self) -> int:
        segment = min(self._segments, key=lambda segment: segment.last_used)
        # The file is deleted by name first: what holds a record of it reads on through the open descriptor.
        segment.delete()
        return self._retire(segment)

    def _forget(self, segments: Sequence[Segment]) -> int:
        return sum(self._retire(segment) for segment in list(segments))

    def _retire(self, segment: Segment) -> int:
        gone = 0
        for digest in segment.digests:
            recorded = self._by_digest.get(digest)
            if recorded is not None and recorded.segment is segment:
                del self._by_digest[digest]
                self.listener.removed(digest)
                gone += 1
        self._segments.remove(segment)
        segment.retire()
        return gone

"""`RankAdapters`: the adapters that one rank holds, in host memory and in its slots.

read(folder) ─► hold(adapter) ─► host memory ─► place(slot, digest) ─► the slot, in the order of the steps

Asleep, an engine gives the memory of the slots back. What was in them is placed again at the wake: from host memory,
or, if it is held there no more (an adapter that was unloaded, whose requests go on), from a copy that `save_slots`
makes.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from openinfer_core import InvalidCheckpoint
from openinfer_core.errors import ContractViolation
from openinfer_core.scheduling import AdapterLoad
from openinfer_engine.lora.adapter_folder import AdaptedModule, Adapter, read_adapter
from openinfer_engine.lora.adapter_tensors import ReadingThreads
from openinfer_engine.lora.arena import AdapterArena, AdapterShare
from openinfer_kernels import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAdapter(Adapter):
    """An adapter, and what the rank that read it needs of it."""

    share: AdapterShare


@dataclass(slots=True)
class _Held:
    share: AdapterShare
    count: int = 0


class RankAdapters:
    """Of one rank. `hold` and `drop` are called from any thread, `place` from the one that launches steps."""

    def __init__(self, arena: AdapterArena, *, modules: Mapping[str, AdaptedModule], max_rank: int) -> None:
        self.arena = arena
        self._modules = modules
        self._max_rank = max_rank
        self._threads = ReadingThreads()
        self._lock = threading.Lock()
        self._held: dict[bytes, _Held] = {}
        self._placed: dict[int, bytes] = {}  # what lies in each slot
        self._saved: dict[int, AdapterShare] | None = None  # asleep

    def read(self, folder: Path) -> ReadAdapter:
        """Raises as `read_adapter`."""
        writer = self.arena.begin_share()
        adapter = read_adapter(
            folder, modules=self._modules, max_rank=self._max_rank, target=writer, threads=self._threads
        )
        return ReadAdapter(digest=adapter.digest, rank=adapter.rank, share=writer.share())

    def hold(self, adapter: ReadAdapter) -> int:
        """Keeps what this rank has read in host memory, until `drop` was called as often; returns its bytes."""
        with self._lock:
            self._held.setdefault(adapter.digest, _Held(adapter.share)).count += 1
        return adapter.share.num_bytes

    def prepare(self) -> None:
        """Takes host memory for the next adapter, which takes as long as reading one; from any thread."""
        self.arena.prepare()

    def hold_again(self, folder: Path, digest: bytes) -> int:
        """Reads and keeps an adapter that must have this content.

        Raises:
            InvalidCheckpoint: its folder has another one by now, or cannot be read.
        """
        adapter = self.read(folder)
        if adapter.digest != digest:
            raise InvalidCheckpoint(f"{folder} has changed since this adapter was loaded; load it again")
        return self.hold(adapter)

    def drop(self, digest: bytes) -> None:
        """Takes one `hold` back; what is in a slot stays there."""
        with self._lock:
            held = self._held[digest]
            held.count -= 1
            if not held.count:
                del self._held[digest]

    def place(self, load: AdapterLoad) -> None:
        """Raises `ContractViolation`: the adapter is not held."""
        with self._lock:
            held = self._held.get(load.digest)
        if held is None:
            raise ContractViolation(f"adapter {load.digest.hex()} is to be placed in slot {load.slot} and is not held")
        self._placed[load.slot] = load.digest
        self.arena.place(load.slot, held.share)

    # --- sleep ------------------------------------------------------------------------------------------

    def save_slots(self) -> None:
        """Keeps what lies in the slots in host memory, until `restore_slots`. Nothing to do if it is kept."""
        if self._saved is None:
            with self._lock:
                held = dict(self._held)
            self._saved = {
                slot: held[digest].share if digest in held else self.arena.share_in(slot)
                for slot, digest in self._placed.items()
            }

    @property
    def slot_arrays(self) -> tuple[Array, ...]:
        """The memory of all slots; on a GPU some are views of one array."""
        return tuple(array for each in self.arena.products for array in (each.a, each.b))

    def restore_slots(self) -> Sequence[AdapterShare]:
        """Begins to copy into zeroed slots what was kept, and returns it: it stays until the copies have run."""
        saved, self._saved = self._saved or {}, None
        for slot, share in saved.items():
            self.arena.place(slot, share)
        return tuple(saved.values())

"""`AdapterStore`: the adapters of one engine: their names, and which of them all ranks hold in host memory.

    LoadAdapter ─► a thread reads, checks, hashes; every rank holds its share ─► settle(): the name, and the answer
                   (with `LoadStep.HOLD` kept without a name, until `NAME` or `DROP`)
    scheduler   ─► is_held(digest)? hold(digest): read again, if it was dropped for others ─► pin ─► in a slot
    UnloadAdapter ─► the name is gone; what waits is ended; the memory is free once no plan in flight needs it

Content is the identity: two names may stand for one content, and a name for another one later. Called from the loop's
thread, but for what the threads that read do.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from openinfer_core import Refused
from openinfer_core.control import LoadAdapter, LoadStep
from openinfer_core.engine import AdapterStats
from openinfer_core.process.wire import ENDED
from openinfer_core.request import LoadedAdapter
from openinfer_core.scheduling import StepPlan
from openinfer_engine.adapters import AdapterLoss
from openinfer_engine.lora.adapter_config import CONFIG_FILE
from openinfer_engine.lora.adapter_folder import WEIGHTS_FILE, Adapter
from openinfer_engine.lora.rank_adapters import RankAdapters
from openinfer_engine.lora.setting import is_adapter_name

logger = logging.getLogger("openinfer.engine")

MAX_NAMES = 4096
_READING_THREADS = 2


class OtherRank(Protocol):
    """A rank other than the first. `hold` is called from the threads that read, `drop` from any."""

    def hold(self, adapter: Adapter, folder: Path) -> int:
        """Returns once the rank holds its share; its bytes. Raises `Refused` if it cannot."""
        ...

    def drop(self, digest: bytes) -> None: ...


@dataclass(slots=True)
class _Content:
    """One content; `held` or not."""

    digest: bytes
    folder: Path
    rank: int
    num_bytes: int = 0
    is_held: bool = False
    reading: "Future[_Read] | None" = None
    num_pins: int = 0
    is_awaited: bool = False
    last_used: int = 0


@dataclass(frozen=True, slots=True)
class _Named:
    name: str
    digest: bytes
    folder: Path
    tenants: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Read:
    digest: bytes
    rank: int
    num_bytes: int


@dataclass(slots=True, eq=False)
class _Loading:
    command: LoadAdapter
    folder: Path
    answer: Callable[[str | None], None]
    reading: "Future[_Read | None]" = field(repr=False)
    """None where nothing was kept that could be dropped."""


class AdapterStore:
    """Implements `AdapterTable`, and `AdapterPort` for the scheduler.

    Args:
        first: rank 0's.
        others: the other ranks.
        max_bytes: of host memory, over all ranks, for adapters that no slot waits for.
        root: below which folders may be loaded while the engine runs; None: none may.
    """

    def __init__(
        self,
        first: RankAdapters,
        *,
        others: Sequence[OtherRank] = (),
        max_bytes: int,
        root: Path | None,
    ) -> None:
        self._first = first
        self._others = tuple(others)
        self._max_bytes = max_bytes
        self._root = root
        self._num_waiting: Callable[[bytes], int] = lambda digest: 0
        self._names: dict[str, _Named] = {}
        self._contents: dict[bytes, _Content] = {}
        self._loading: list[_Loading] = []
        self._kept: dict[str, _Loading] = {}  # by the names that they may get
        self._losses: list[AdapterLoss] = []
        self._uses = 0
        self._threads = ThreadPoolExecutor(_READING_THREADS, thread_name_prefix="openinfer-adapters")

    # --- names ------------------------------------------------------------------------------------------

    def find(self, name: str, *, tenant: str) -> LoadedAdapter | None:
        named = self._names.get(name)
        if named is None or (named.tenants and tenant not in named.tenants):
            return None
        return LoadedAdapter(digest=named.digest)

    def count_waiting_by(self, num_waiting: Callable[[bytes], int]) -> None:
        self._num_waiting = num_waiting

    def load_now(self, name: str, folder: Path) -> None:
        """At the start, before the first request. Raises `Refused`, also for a name that is there."""
        if name in self._names:
            raise Refused(f"--lora names {name!r} twice")
        self._name(LoadAdapter(name, str(folder)), folder, self._read(folder, None))

    def begin_load(self, command: LoadAdapter, answer: Callable[[str | None], None]) -> None:
        """`answer` is called in `settle`, or in `close`.

        Raises:
            Refused: the name is in use and not to be replaced, or the folder is none below the root.
        """
        match command.step:
            case LoadStep.NAME | LoadStep.DROP:
                self._loading.append(self._of_kept(command, answer))
            case _:
                self._check_name(command)
                folder = self._below_root(command.path)
                self._loading.append(_Loading(command, folder, answer, self._threads.submit(self._read, folder, None)))

    def unload(self, name: str) -> bytes | None:
        """Takes a name away; its content if no other name stands for it, for `PlacesAdapters.drop_adapter`.

        Raises:
            Refused: no such adapter.
        """
        named = self._names.pop(name, None)
        if named is None:
            raise Refused(f"no LoRA adapter is loaded under the name {name[:200]!r}")
        return None if self._is_named(named.digest) else named.digest

    def forget(self, digest: bytes) -> None:
        """No request that waits needs this content any more, and none can name it."""
        content = self._contents.get(digest)
        if content is None or self._is_named(digest) or self._num_waiting(digest):
            return
        # While it is read again, or a plan needs it, it stays: `settle` and `unpin` ask again.
        if not content.num_pins and content.reading is None:
            del self._contents[digest]
            if content.is_held:
                self._drop(content)

    def stats(self, users: dict[bytes, tuple[int, int]]) -> tuple[AdapterStats, ...]:
        """By name; from any thread."""
        told: list[AdapterStats] = []
        for name, named in sorted(self._names.copy().items()):
            content = self._contents.get(named.digest)
            running, waiting = users.get(named.digest, (0, 0))
            told.append(
                AdapterStats(
                    name=name,
                    digest=named.digest.hex(),
                    path=str(named.folder),
                    rank=0 if content is None else content.rank,
                    tenants=named.tenants,
                    running=running,
                    waiting=waiting,
                )
            )
        return tuple(told)

    # --- host memory: what a scheduler asks -------------------------------------------------------------

    def is_held(self, digest: bytes) -> bool:
        content = self._contents.get(digest)
        return content is not None and content.is_held

    def hold(self, digest: bytes) -> None:
        content = self._contents.get(digest)
        if content is None:
            self._losses.append(AdapterLoss(digest, "the adapter was unloaded"))
            return
        content.is_awaited = True
        self._use(content)
        if not content.is_held and content.reading is None:
            content.reading = self._threads.submit(self._read, content.folder, digest)

    def pin(self, digest: bytes) -> None:
        content = self._contents[digest]
        content.num_pins += 1
        content.is_awaited = False
        self._use(content)

    def unpin(self, digest: bytes) -> None:
        content = self._contents.get(digest)
        if content is not None:
            content.num_pins -= 1
            self.forget(digest)

    def release(self, digest: bytes) -> None:
        content = self._contents.get(digest)
        if content is not None:
            content.is_awaited = False
            self.forget(digest)

    # --- the loop ---------------------------------------------------------------------------------------

    @property
    def is_loading(self) -> bool:
        return bool(self._loading or self._losses) or any(each.reading for each in self._contents.values())

    def settle(self) -> list[AdapterLoss]:
        """Takes what was read since the last call; returns what could not be read again."""
        for loading in [each for each in self._loading if each.reading.done()]:
            self._loading.remove(loading)
            loading.answer(self._finish_load(loading))
        for content in [each for each in self._contents.values() if each.reading is not None and each.reading.done()]:
            self._finish_hold(content)
            self.forget(content.digest)
        losses, self._losses = self._losses, []
        self._make_room()
        return losses

    def wait(self, timeout_s: float) -> None:
        """Until something was read, or the time is over."""
        readings: list[Future[Any]] = [each.reading for each in self._loading]
        readings += [each.reading for each in self._contents.values() if each.reading is not None]
        if not self._losses:
            wait(readings, timeout_s, return_when="FIRST_COMPLETED")

    def applied(self, plan: StepPlan) -> None:
        """A step was applied: its adapters are in their slots."""
        for load in plan.adapter_loads:
            self.unpin(load.digest)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        loading, self._loading = self._loading, []
        for each in loading:
            each.answer(ENDED)

    # --- inside -----------------------------------------------------------------------------------------

    def _read(self, folder: Path, digest: bytes | None) -> _Read:
        """In a thread: all ranks hold the adapter when this returns, or none. With a digest it must be that one."""
        adapter = self._first.read(folder)
        if digest is not None and adapter.digest != digest:
            raise Refused(f"the folder of this adapter, {folder.name}, has changed since it was loaded; load it again")
        num_bytes = self._first.hold(adapter)
        holding: list[OtherRank] = []
        try:
            for other in self._others:
                num_bytes += other.hold(adapter, folder)
                holding.append(other)
        except BaseException:
            for each in (self._first, *holding):
                each.drop(adapter.digest)
            raise
        return _Read(adapter.digest, adapter.rank, num_bytes)

    def _finish_load(self, loading: _Loading) -> str | None:
        try:
            read = loading.reading.result()
        except Refused as refusal:
            return str(refusal)
        except Exception as error:  # noqa: BLE001 - of one adapter's files: the engine lives on
            return f"the adapter could not be read: {type(error).__name__}: {error}"
        return None if read is None else self._take_loaded(loading, read)

    def _take_loaded(self, loading: _Loading, read: _Read) -> str | None:
        match loading.command.step:
            case LoadStep.HOLD:
                self._drop_kept(loading.command.name)
                self._kept[loading.command.name] = loading
            case LoadStep.DROP:
                self._drop_everywhere(read.digest)
            case LoadStep.NAME:
                self._name(loading.command, loading.folder, read)
            case LoadStep.WHOLE:
                try:
                    self._check_name(loading.command)  # another one may have come first
                except Refused as refusal:
                    self._drop_everywhere(read.digest)
                    return str(refusal)
                self._name(loading.command, loading.folder, read)
        return None

    def _of_kept(self, command: LoadAdapter, answer: Callable[[str | None], None]) -> _Loading:
        """What is kept for a name, to be named or dropped; not what another load under it has put there since."""
        kept = self._kept.get(command.name)
        if kept is not None and kept.command != msgspec.structs.replace(command, step=LoadStep.HOLD):
            kept = None
        if kept is None and command.step is LoadStep.NAME:
            raise Refused(f"no adapter is held for the name {command.name[:200]!r}: another one was loaded meanwhile")
        if kept is not None:
            del self._kept[command.name]
            return _Loading(command, kept.folder, answer, kept.reading)
        nothing: Future[_Read | None] = Future()
        nothing.set_result(None)
        return _Loading(command, Path(), answer, nothing)

    def _drop_kept(self, name: str) -> None:
        kept = self._kept.pop(name, None)
        read = None if kept is None else kept.reading.result()
        if read is not None:
            self._drop_everywhere(read.digest)

    def _name(self, command: LoadAdapter, folder: Path, read: _Read) -> None:
        before = self._names.get(command.name)
        self._names[command.name] = _Named(command.name, read.digest, folder, command.tenants)
        content = self._contents.setdefault(read.digest, _Content(read.digest, folder, read.rank))
        content.folder = folder
        self._take(content, read)
        self._use(content)
        if before is not None:
            self.forget(before.digest)

    def _finish_hold(self, content: _Content) -> None:
        reading, content.reading = content.reading, None
        if reading is None:
            return
        try:
            read = reading.result()
        except Exception as error:  # noqa: BLE001 - of one adapter's files: the engine lives on
            names = ", ".join(sorted(each.name for each in self._names.values() if each.digest == content.digest))
            logger.warning("the adapter of %s could not be read again: %s", names, error)
            # For clients, who need not know where an operator keeps it.
            message = "the adapter could not be read again, and the log says why"
            self._losses.append(AdapterLoss(content.digest, message))
            return
        self._take(content, read)

    def _take(self, content: _Content, read: _Read) -> None:
        """All ranks hold what was read. They count how often; a content owns one `hold`."""
        if content.is_held:
            self._drop_everywhere(content.digest)
        content.num_bytes, content.is_held = read.num_bytes, True
        self._threads.submit(self._first.prepare)

    def _make_room(self) -> None:
        held = [each for each in self._contents.values() if each.is_held]
        kept = [each.reading.result() for each in self._kept.values()]
        total = sum(each.num_bytes for each in held) + sum(each.num_bytes for each in kept if each is not None)
        for content in sorted(held, key=lambda each: each.last_used):
            if total <= self._max_bytes:
                return
            if not content.num_pins and not content.is_awaited:
                total -= content.num_bytes
                self._drop(content)

    def _drop(self, content: _Content) -> None:
        content.is_held = False
        self._drop_everywhere(content.digest)

    def _drop_everywhere(self, digest: bytes) -> None:
        self._first.drop(digest)
        for other in self._others:
            other.drop(digest)

    def _use(self, content: _Content) -> None:
        self._uses += 1
        content.last_used = self._uses

    def _is_named(self, digest: bytes) -> bool:
        return any(named.digest == digest for named in self._names.values())

    def _check_name(self, command: LoadAdapter) -> None:
        if not is_adapter_name(command.name):
            raise Refused(f"the name {command.name[:200]!r} has characters that no name of an adapter may have")
        if command.name in self._names and not command.in_place:
            raise Refused(
                f"an adapter is loaded under the name {command.name[:200]!r}; unload it, or load with load_inplace"
            )
        if command.name not in self._names and len(self._names) + len(self._kept) >= MAX_NAMES:
            raise Refused(f"{MAX_NAMES} adapters are loaded; unload one")

    def _below_root(self, path: str) -> Path:
        if self._root is None:
            raise Refused("adapters are loaded while the engine runs below --lora-root alone, and it was not given")
        root = self._root.resolve()
        try:
            folder = (root / path).resolve()
            files = [(folder / name).resolve() for name in (CONFIG_FILE, WEIGHTS_FILE)]
        except (OSError, ValueError, RuntimeError) as error:
            raise Refused(f"the path {path[:200]!r} cannot be resolved") from error
        if not all(each.is_relative_to(root) for each in (folder, *files)):
            raise Refused(f"the path {path[:200]!r} does not lie below --lora-root, links resolved")
        if not folder.is_dir():
            raise Refused(f"there is no folder {path[:200]!r} below --lora-root")
        return folder

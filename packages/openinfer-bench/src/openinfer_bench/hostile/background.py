"""`BackgroundThread`: what goes on in a thread of its own while an arm runs."""

import threading
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class BackgroundThread(ABC):
    """A context manager; at its end the thread is told to leave, and waited for."""

    def __init__(self, name: str) -> None:
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        self._thread.join()

    @abstractmethod
    def _run(self) -> None:
        """Until `_left` is set."""

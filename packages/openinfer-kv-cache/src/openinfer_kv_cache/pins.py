"""`BlockPin`: a hold on blocks that is no sequence."""

from collections.abc import Callable
from types import TracebackType
from typing import Self


class BlockPin:
    """A user of sealed blocks that is no sequence: keeps their content while a copy reads it."""

    __slots__ = ("_unpin", "block_ids")

    def __init__(self, block_ids: tuple[int, ...], unpin: Callable[[tuple[int, ...]], None]) -> None:
        self.block_ids = block_ids
        self._unpin: Callable[[tuple[int, ...]], None] | None = unpin

    def close(self) -> None:
        """Gives the blocks back; those without another user become idle. Closing again does nothing."""
        unpin, self._unpin = self._unpin, None
        if unpin is not None:
            unpin(self.block_ids)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

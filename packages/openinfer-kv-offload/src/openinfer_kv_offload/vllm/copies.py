"""What the workers' side needs of the memory that vLLM's KV is in."""

from collections.abc import Sequence
from typing import Protocol


class StagedCopy(Protocol):
    """A copy between the KV pool and staging memory."""

    def is_done(self) -> bool:
        """Whether it has ended; does not wait. Asked until it has, as that may be what begins its next part."""
        ...


class PoolCopies(Protocol):
    """Blocks of a KV pool, and staging memory of this machine that a tier reads and writes.

    A block of one table holds that table's layers.
    """

    @property
    def block_bytes(self) -> int:
        """Bytes of the largest block, that of the table with most layers; others leave the end of it unused."""
        ...

    @property
    def identity(self) -> str:
        """Layers, shapes and dtypes: what the bytes of a block mean."""
        ...

    def allocate_staging(self, num_blocks: int) -> Sequence[memoryview]:
        """Makes the staging memory; called once.

        Returns:
            One writable view of `block_bytes` bytes for each block of it.
        """
        ...

    def to_staging(self, block_ids: Sequence[int], staging_ids: Sequence[int], *, table: int) -> StagedCopy:
        """Begins to copy a table's blocks into staging memory, after the work that the device has been given."""
        ...

    def to_pool(self, staging_ids: Sequence[int], block_ids: Sequence[int], *, table: int) -> StagedCopy:
        """Begins to copy staging memory into a table's blocks, before the work that the device will be given."""
        ...

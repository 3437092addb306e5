"""`PhysicalMemory`: what a driver does with addresses and with the memory that backs them."""

from typing import Protocol


class PhysicalMemory(Protocol):
    """The memory of one device. Sizes and addresses are multiples of `granularity_bytes`."""

    @property
    def granularity_bytes(self) -> int:
        """Of what can be backed at all."""
        ...

    def reserve(self, nbytes: int) -> int:
        """Takes addresses, which nothing backs; returns the first."""
        ...

    def release(self, address: int, nbytes: int) -> None:
        """Gives addresses of one `reserve` back; nothing backs any of them."""
        ...

    def map(self, address: int, nbytes: int) -> None:
        """Backs reserved addresses by memory, which may hold anything.

        Raises:
            OutOfDeviceMemoryError: there is not so much; nothing has changed.
        """
        ...

    def unmap(self, address: int, nbytes: int) -> None:
        """Gives the memory back that backs these addresses: whole pieces of `map`, without gaps; no kernel uses it."""
        ...

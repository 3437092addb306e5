"""Blocks of a device that is none: memory with a `BlockMover`, for tests of `DeviceTier`s."""

from collections.abc import Sequence

_STEP = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)
_WORD = 2**64


class FakeDeviceBlock:
    """One block of the given content."""

    def __init__(self, content: bytes) -> None:
        self.memory = bytearray(content)
        self.mover = FakeBlockMover()

    @property
    def nbytes(self) -> int:
        return len(self.memory)


class FakeBlockMover:
    """Copies at once, and sums up word by word."""

    def copy_out(self, blocks: Sequence[FakeDeviceBlock], into: Sequence[memoryview]) -> list[bytes]:
        for block, host in zip(blocks, into, strict=True):
            host[:] = block.memory
        return [reference_block_sum(block.memory) for block in blocks]

    def copy_in(self, blocks: Sequence[FakeDeviceBlock], content: Sequence[memoryview]) -> list[bytes]:
        for block, host in zip(blocks, content, strict=True):
            block.memory[:] = host
        return [reference_block_sum(block.memory) for block in blocks]


def reference_block_sum(content: bytes | bytearray) -> bytes:
    """The sum that `BlockMover` defines, 16 bytes, in the plainest way."""
    plain = weighted = 0
    for index in range(-(-len(content) // 8)):
        x = (int.from_bytes(content[8 * index : 8 * index + 8], "little") + (index + 1) * _STEP) % _WORD
        for multiplier in _MULTIPLIERS:
            x = (x ^ (x >> 33)) * multiplier % _WORD
        x ^= x >> 33
        plain, weighted = plain + x, weighted + x * (2 * index + 1)
    return (plain % _WORD).to_bytes(8, "little") + (weighted % _WORD).to_bytes(8, "little")

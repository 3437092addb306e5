"""`HeldHit`: blocks that a tier holds for one who found them, until they are given back."""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from openinfer_kv_cache import Digest


class Held(Protocol):
    """What a tier knows of a block that it holds."""

    @property
    def digest(self) -> Digest:
        """The block's."""
        ...


HeldBlock = TypeVar("HeldBlock", bound=Held)


class HeldHit(Generic[HeldBlock]):
    """Blocks held in a tier.

    Args:
        held: in the order of their prefix; None once somebody else gives them back, or they were.
        tier: that holds them.
        release: gives them back.
    """

    __slots__ = ("_release", "digests", "held", "tier")

    def __init__(self, held: list[HeldBlock], *, tier: object, release: Callable[[list[HeldBlock]], None]) -> None:
        self.tier = tier
        self.digests = tuple([each.digest for each in held])
        self.held: list[HeldBlock] | None = held
        self._release = release

    def close(self) -> None:
        """Gives the blocks back."""
        held, self.held = self.held, None
        if held:
            self._release(held)

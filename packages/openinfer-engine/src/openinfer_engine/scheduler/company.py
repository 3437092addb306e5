"""`Company`: whether a tenant that has the engine for itself is likely to get company soon.

A newcomer waits for the step in flight and the one that is planned while it runs. Where tenants come and go, these are
no longer than `ALONE_MS` makes them: prompts of the only one that has anything now have so much of each step.
"""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

ALONE_MS = 25.0
ALONE_TOKENS = 64
"""Prompt tokens that such a step computes at least: where each takes long, fewer would be slower by far."""
COMPANY_S = 60.0
"""For which a tenant that had something running is expected back."""


class Company:
    """Of one scheduler; seconds are its clock's."""

    __slots__ = ("_seen_s",)

    def __init__(self) -> None:
        self._seen_s: dict[str, float] = {}  # when each had something running; those that were seen last are last

    def note(self, tenants: Iterable[str], *, now_s: float) -> None:
        """These have something running."""
        for tenant in tenants:
            self._seen_s.pop(tenant, None)
            self._seen_s[tenant] = now_s
        while self._seen_s and now_s - self._seen_s[first := next(iter(self._seen_s))] > COMPANY_S:
            del self._seen_s[first]

    def is_expected_by(self, tenants: AbstractSet[str]) -> bool:
        """Whether another than these was seen lately."""
        return any(tenant not in tenants for tenant in self._seen_s)

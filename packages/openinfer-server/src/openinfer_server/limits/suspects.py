"""`Suspects`: whose request ended a process of the server, and is not to end the next ones.

Which request ended a process is not known where it had several. So those that were lost are repeated one after the
other, for a moment alone in the process that takes its place (`http/handover.py`); who owns one that is lost twice is
suspected for a while: large requests of that tenant, or address without keys, are refused, and others' go on.
"""

SUSPECTED_S = 60.0
_MOST_OWNERS = 1024


class Suspects:
    """Of one process; seconds are its event loop's."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}  # in order, since all are suspected for as long

    def add(self, owner: str, *, now_s: float) -> None:
        self._until_s.pop(owner, None)
        self._until_s[owner] = now_s + SUSPECTED_S
        while len(self._until_s) > _MOST_OWNERS:
            del self._until_s[next(iter(self._until_s))]

    def left_s(self, owner: str, *, now_s: float) -> float:
        """For how much longer an owner is suspected; 0 for others."""
        left_s = self._until_s.get(owner, now_s) - now_s
        if left_s <= 0:
            self._until_s.pop(owner, None)
        return max(0.0, left_s)

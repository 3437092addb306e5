"""Ends of tiers that nothing waits for longer than it has time, whatever a medium or a plug-in does."""

import threading
from collections.abc import Callable

from openinfer_kv_cache.tiers.contract import KvTier
from openinfer_kv_cache.tiers.traits import TimedTier


class BackgroundCall:
    """A call that goes on in a daemon thread of its own also when it is not waited for any more.

    Args:
        name: of the thread.
    """

    def __init__(self, call: Callable[[], object], *, name: str) -> None:
        self._call = call
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Whether it has returned, after at most so long; raises what it raised."""
        self._thread.join(max(0.0, timeout_s))
        if self._error is not None:
            raise self._error
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:  # noqa: BLE001 -- raised where it is waited for
            self._error = error


def close_tier(tier: KvTier, timeout_s: float) -> bool:
    """Closes a tier within a time.

    Returns:
        Whether all of it has ended. What has not is left behind in its threads, and ends there or with the process.

    Raises:
        Exception: what `close` of the tier raises.
    """
    if isinstance(tier, TimedTier):
        return tier.close_within(timeout_s)
    return BackgroundCall(tier.close, name=f"kv-tier-{tier.name}-close").wait(timeout_s)

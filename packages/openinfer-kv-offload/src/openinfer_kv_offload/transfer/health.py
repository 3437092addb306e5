"""`TierHealth`: what the ends of a tier's transfers say of its medium, told once in the log and in its counters.

ok ── 5 failures in a row ──► failing: left alone ── cooldown ── one trial ── it completes ──► ok
ok ── 3 saves without space ──► full: no saves, loads go on ── cooldown ── one trial ── it stores a block ──► ok
"""

import logging
import threading
from collections.abc import Callable

from openinfer_kv_cache import TierCondition, TierFailure
from openinfer_kv_offload.transfer.block_transfer import BlockTransfer
from openinfer_kv_offload.transfer.breaker import CircuitBreaker
from openinfer_kv_offload.transfer.failures import NOT_THE_MEDIUM

_log = logging.getLogger(__name__)
# More than once, since a tier may give something up for the next save.
_FULL_IN_A_ROW = 3


class TierHealth:
    """The circuit breakers of one tier; safe to use from several threads."""

    def __init__(self, name: str, *, num_failures: int, cooldown_s: float, clock: Callable[[], float]) -> None:
        self._name = name
        self._num_failures = num_failures
        self._cooldown_s = cooldown_s
        self._medium = CircuitBreaker(num_failures=num_failures, cooldown_s=cooldown_s, clock=clock)
        self._space = CircuitBreaker(num_failures=_FULL_IN_A_ROW, cooldown_s=cooldown_s, clock=clock)
        self._lock = threading.Lock()
        self._told = TierCondition.OK

    @property
    def is_refusing(self) -> bool:
        return self._medium.is_open

    @property
    def condition(self) -> TierCondition:
        if self._medium.is_tripped:
            return TierCondition.FAILING
        return TierCondition.FULL if self._space.is_tripped else TierCondition.OK

    def refusal(self, *, is_save: bool) -> TierFailure | None:
        """Why a transfer may not begin; of those that ask after a cooldown, one may."""
        if not self._medium.admit():
            return TierFailure.BREAKER_OPEN
        return TierFailure.FULL if is_save and not self._space.admit() else None

    def ended(self, transfer: BlockTransfer, *, is_save: bool) -> None:
        """Takes note of how a transfer ended that was not refused."""
        failure = transfer.failure
        if failure is None:
            self._succeeded(transfer, is_save=is_save)
        elif failure is TierFailure.FULL:
            self._space.failed()
        # A deadline that passed in the queue tells of load, not of the medium.
        elif failure not in NOT_THE_MEDIUM and (failure is not TierFailure.DEADLINE or transfer.has_begun):
            self._medium.failed()
        self._tell(failure)

    def _succeeded(self, transfer: BlockTransfer, *, is_save: bool) -> None:
        if transfer.completed_blocks == transfer.num_blocks > 0:
            self._medium.succeeded()
            if is_save and transfer.has_stored:  # one whose blocks were all there says nothing of space
                self._space.succeeded()

    def _tell(self, failure: TierFailure | None) -> None:
        with self._lock:
            before, self._told = self._told, self.condition
            now = self._told
        if now is before:
            return
        if now is TierCondition.FAILING:
            _log.warning(
                "tier %s: %d transfers in a row failed (%s): it is left alone, and one tries again every %g s",
                self._name,
                self._num_failures,
                failure,
                self._cooldown_s,
            )
        elif now is TierCondition.FULL:
            _log.warning(
                "tier %s: its medium has no space: saves are refused, and one tries again every %g s; loads go on",
                self._name,
                self._cooldown_s,
            )
        else:
            _log.warning("tier %s: it works again", self._name)

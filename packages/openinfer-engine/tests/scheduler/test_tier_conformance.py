"""The default scheduler passes kv-cache's kits of KV tiers and KV events, and they catch it when a part is broken."""

from collections.abc import Sequence
from operator import attrgetter

import msgspec
import pytest
from hasty_transfer import HastyTransfer

from openinfer_core.scheduling import QueuePolicy, SchedulerCapabilities, SchedulerConfig
from openinfer_core.testing import ConformanceError
from openinfer_core.testing.scheduler_driver import SchedulerFactory
from openinfer_engine.scheduler import TokenBudgetScheduler
from openinfer_kv_cache import BlockListener, Digest, PrefixHit, TierPort, TierTransfer
from openinfer_kv_cache.testing.kv_event_source import check_kv_event_source
from openinfer_kv_cache.testing.tiered_scheduler import (
    TIERED_SCHEDULER_CHECKS,
    TieredSchedulerCheck,
    check_random_tier_traffic,
    check_states,
    check_tiered_scheduler,
)


@pytest.mark.parametrize("check", TIERED_SCHEDULER_CHECKS, ids=attrgetter("__name__"))
def test_scheduler_uses_tiers(check: TieredSchedulerCheck, checked_scheduler: type[TokenBudgetScheduler]) -> None:
    check(checked_scheduler)


def test_scheduler_tells_of_its_blocks(checked_scheduler: type[TokenBudgetScheduler]) -> None:
    check_kv_event_source(checked_scheduler)


def test_kit_makes_the_scheduler_load_blocks_and_states_and_give_loads_up() -> None:
    made: list[TokenBudgetScheduler] = []

    def make(config: SchedulerConfig, policy: QueuePolicy) -> TokenBudgetScheduler:
        made.append(TokenBudgetScheduler(config, policy))
        return made[-1]

    check_random_tier_traffic(make)
    stats = [scheduler.stats() for scheduler in made]
    assert sum(each.tier_tokens for each in stats) > 500
    assert sum(each.preemptions for each in stats) > 10
    made.clear()
    check_states(make)
    assert sum(scheduler.stats().tier_tokens for scheduler in made) > 0


class Between:
    """Stands between a scheduler and its port; what a mutant forgets it leaves out."""

    def __init__(self, port: TierPort) -> None:
        self.port = port
        self.chunks_per_slot = port.chunks_per_slot

    def find(self, digests: Sequence[Digest]) -> PrefixHit:
        return self.port.find(digests)

    def load(self, found: PrefixHit, places: Sequence[int]) -> TierTransfer | None:
        return self.port.load(found, places)

    def save(self, digests: Sequence[Digest], places: Sequence[int]) -> TierTransfer | None:
        return self.port.save(digests, places)

    def state_places(self, slot: int) -> Sequence[int]:
        return self.port.state_places(slot)

    def clock(self) -> float:
        return self.port.clock()


class NeverSaves(Between):
    def save(self, digests: Sequence[Digest], places: Sequence[int]) -> None: ...


class NeverLoads(Between):
    def find(self, digests: Sequence[Digest]) -> PrefixHit:
        return PrefixHit([])


class GivesBackWhatIsSaved(Between):
    def save(self, digests: Sequence[Digest], places: Sequence[int]) -> TierTransfer | None:
        transfer = super().save(digests, places)
        return None if transfer is None else HastyTransfer(transfer)


class RunsWhatIsLoading(Between):
    def load(self, found: PrefixHit, places: Sequence[int]) -> TierTransfer | None:
        transfer = super().load(found, places)
        return None if transfer is None else HastyTransfer(transfer)


class LoadsOverWhatIsCached(Between):
    """Fills the blocks before those that it means."""

    def load(self, found: PrefixHit, places: Sequence[int]) -> TierTransfer | None:
        return super().load(found, list(reversed(places)))


def with_port(between: type[Between]) -> SchedulerFactory:
    class Mutant(TokenBudgetScheduler):
        def use_tiers(self, port: TierPort) -> None:
            super().use_tiers(between(port))

    return Mutant


class ForgetsTheKey(TokenBudgetScheduler):
    def __init__(self, config: SchedulerConfig, policy: QueuePolicy) -> None:
        super().__init__(msgspec.structs.replace(config, digest_key=None), policy)


class DeclaresNothing(TokenBudgetScheduler):
    capabilities = SchedulerCapabilities()


class TellsNothing(TokenBudgetScheduler):
    def listen(self, listener: BlockListener) -> None: ...


class TellsOfWhatIsStoredOnly(TokenBudgetScheduler):
    def listen(self, listener: BlockListener) -> None:
        listener.removed = lambda digests: None  # type: ignore[method-assign]
        super().listen(listener)


@pytest.mark.parametrize(
    ("mutant", "message"),
    [
        (with_port(NeverSaves), "0 were saved or counted as unsaved"),
        (with_port(NeverLoads), "the tiers held 12 tokens of a prompt; it was scheduled with 0 cached"),
        (with_port(GivesBackWhatIsSaved), "was overwritten while it was saved|while another transfer has them"),
        (with_port(RunsWhatIsLoading), "holds the KV of another prefix"),
        (with_port(LoadsOverWhatIsCached), "holds the KV of another prefix|while another transfer has them"),
        (ForgetsTheKey, "after a restart 0 of 12 tokens were found again"),
        (DeclaresNothing, "does not declare uses_kv_tiers"),
    ],
    ids="saves loads unpins runs misplaces key declares".split(),
)
def test_kit_refuses_a_scheduler_that_breaks_a_rule_of_tiers(mutant: SchedulerFactory, message: str) -> None:
    with pytest.raises(ConformanceError, match=message):
        check_tiered_scheduler(mutant)


@pytest.mark.parametrize(
    ("mutant", "message"),
    [
        (TellsNothing, "computed and never told of"),
        (TellsOfWhatIsStoredOnly, "told of twice|no event told of it"),
        (DeclaresNothing, "does not declare tells_kv_events"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_kit_refuses_a_scheduler_that_does_not_tell_all(mutant: type[TokenBudgetScheduler], message: str) -> None:
    with pytest.raises(ConformanceError, match=message):
        check_kv_event_source(mutant)

"""Conformance of a scheduler that tells of its blocks: `check_kv_event_source(factory)`, for `--kv-events`."""

from collections.abc import Sequence

import msgspec

from openinfer_core.request import GenerateRequest, RequestId
from openinfer_core.sampling import SamplingParams
from openinfer_core.scheduling import SchedulerConfig
from openinfer_core.testing.errors import require
from openinfer_core.testing.scheduler_driver import SchedulerDriver, SchedulerFactory
from openinfer_kv_cache.digest import Digest, PrefixHasher, table_digests
from openinfer_kv_cache.listener import StoredBlocks
from openinfer_kv_cache.tiers.port import KvEventSource
from openinfer_kv_cache.windows import first_visible_block

_KEY = b"the kit's digest key"
_LAYOUT = "the kit's layout"
_BLOCK_TOKENS = 4


class MirrorListener:
    """A `BlockListener` that keeps what a router would know, and checks that it can follow."""

    def __init__(self) -> None:
        self.known: set[Digest] = set()
        self.ever_known: set[Digest] = set()
        self.stored_blocks = self.removed_blocks = 0

    def stored(self, blocks: StoredBlocks) -> None:
        require(
            len(blocks.token_ids) == len(blocks.digests) * _BLOCK_TOKENS,
            f"{len(blocks.digests)} blocks were told of with {len(blocks.token_ids)} token ids",
        )
        twice = self.known.intersection(blocks.digests)
        require(not twice, f"{len(twice)} blocks were told of twice, without having been removed")
        self.known.update(blocks.digests)
        self.ever_known.update(blocks.digests)
        self.stored_blocks += len(blocks.digests)

    def removed(self, digests: Sequence[Digest]) -> None:
        unknown = set(digests) - self.known
        require(not unknown, f"{len(unknown)} blocks were removed that were not told of")
        self.known.difference_update(digests)
        self.removed_blocks += len(digests)

    def cleared(self) -> None:
        self.known.clear()


def check_kv_event_source(factory: SchedulerFactory) -> None:
    """What a listener hears is what requests find: no cached token without its event, none left after an eviction.

    Raises:
        ConformanceError: the scheduler has no `listen`, does not declare it, or does not tell all.
    """
    _check_source(factory, _config())
    if SchedulerDriver(factory, _config()).scheduler.capabilities.frees_windows:
        for windows in ((None, 6), (5,), (3, None)):
            _check_source(factory, _config(windows))


def _config(table_windows: tuple[int | None, ...] = (None,)) -> SchedulerConfig:
    config = SchedulerConfig(
        num_blocks=8,
        block_size_tokens=_BLOCK_TOKENS,
        max_num_seqs=4,
        max_step_tokens=12,
        max_model_tokens=32,
        table_windows=table_windows,
        layout_digest=_LAYOUT,
        digest_key=_KEY,
    )
    return msgspec.structs.replace(config, num_blocks=config.blocks_for_context(config.max_model_tokens))


def _check_source(factory: SchedulerFactory, config: SchedulerConfig) -> None:
    for max_in_flight in (1, 2):
        driver = SchedulerDriver(factory, config, max_in_flight=max_in_flight)
        scheduler: object = driver.scheduler
        require(isinstance(scheduler, KvEventSource), f"{type(scheduler).__name__} has no listen(listener)")
        require(driver.scheduler.capabilities.tells_kv_events, "it has listen and does not declare tells_kv_events")
        mirror = MirrorListener()
        if isinstance(scheduler, KvEventSource):
            scheduler.listen(mirror)
        _check_events(driver, mirror)


def _check_events(driver: SchedulerDriver, mirror: MirrorListener) -> None:
    hasher = PrefixHasher(_BLOCK_TOKENS, key=_KEY, layout_digest=_LAYOUT)
    prompts = [tuple(range(1, 14)), (20,) * 28, tuple(range(1, 14)), tuple(range(1, 10)), tuple(range(1, 14))]
    for index, prompt in enumerate(prompts):
        salt = "salt" if index == 3 else None
        digests = hasher.chain(hasher.root(cache_salt=salt), prompt)
        request = GenerateRequest(
            request_id=RequestId(index),
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=3),
            cache_salt=salt,
        )
        told = set(mirror.known)
        driver.submit(request)
        driver.run()
        scheduled = driver.accounts[request.request_id].scheduled
        cached_blocks = 0 if scheduled is None else scheduled.cached_tokens // _BLOCK_TOKENS
        for table, window in enumerate(driver.config.table_windows):
            stored = table_digests(digests, table)
            first = first_visible_block(cached_blocks * _BLOCK_TOKENS, window, _BLOCK_TOKENS)
            missing = set(stored[first:cached_blocks]) - told
            require(not missing, f"{len(missing)} cached blocks were found that no event had told of")
            lost = set(stored) - (mirror.known if window is None else mirror.ever_known)
            require(not lost, f"{len(lost)} of {len(stored)} blocks of a prompt were computed and never told of")
    require(bool(mirror.removed_blocks), "blocks were evicted and no event told of it")

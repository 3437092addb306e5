"""The page `docs/reference/write-a-scheduler.md` is true: its code runs, conforms, and is the example's."""

import re
import tomllib
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from openinfer_core import Refused, TokenEvent
from openinfer_core.scheduling import QueuePolicy, SchedulerConfig
from openinfer_core.testing import ConformanceError
from openinfer_core.testing.queue_policy import check_queue_policy
from openinfer_core.testing.scheduler import SCHEDULER_CHECKS, SchedulerCheck
from openinfer_core.testing.scheduler_driver import SchedulerDriver
from openinfer_core.testing.scheduler_traffic import make_config, make_request
from openinfer_kv_cache import TierPort
from openinfer_kv_cache.testing.kv_event_source import check_kv_event_source
from openinfer_kv_cache.testing.tiered_scheduler import TIERED_SCHEDULER_CHECKS, check_tiered_scheduler

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "openinfer-shortest-first"
CHECKS = (*SCHEDULER_CHECKS, *TIERED_SCHEDULER_CHECKS, check_kv_event_source)
PAGE = (ROOT / "docs" / "reference" / "write-a-scheduler.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """What the page's code defines, run from top to bottom."""
    names: dict[str, Any] = {"__name__": "page"}
    for code in blocks("python"):
        exec(compile(code, "write-a-scheduler.md", "exec"), names)
    return names


def test_page_has_a_policy_its_test_a_scheduler_and_its_test() -> None:
    assert len(blocks("python")) == 4
    assert len(blocks("toml")) == 2


def test_policy_of_the_page_conforms(page: dict[str, Any]) -> None:
    page["test_policy_conforms"]()
    check_queue_policy(page["ShortestFirst"])


@pytest.mark.parametrize("check", CHECKS, ids=attrgetter("__name__"))
def test_scheduler_of_the_page_conforms(check: SchedulerCheck, page: dict[str, Any]) -> None:
    assert check in page["CHECKS"]
    page["test_scheduler_conforms"](check)
    check(page["CachedFirstScheduler"])


@pytest.mark.parametrize(("patience", "place"), [(2, 2), (6, 6)])
def test_scheduler_of_the_page_runs_first_what_the_cache_has_and_overtakes_the_oldest_so_often(
    patience: int, place: int, page: dict[str, Any]
) -> None:
    config = msgspec.structs.replace(make_config(max_num_seqs=1), options={"patience": str(patience)})
    driver = SchedulerDriver(page["CachedFirstScheduler"], config)
    driver.submit(make_request(0, prompt=(*range(12), 63), max_tokens=2))
    driver.run()
    prompts = [(50,) * 13, *((*range(12), index) for index in range(6))]
    for request_id, prompt in enumerate(prompts, 1):
        driver.submit(make_request(request_id, prompt=prompt, max_tokens=2))
    started: list[int] = []
    while driver.scheduler.unfinished_ids:
        plan = driver.step()
        started += [start.request.request_id for start in plan.started] if plan else []
    assert started.index(1) == place
    assert [request_id for request_id in started if request_id != 1] == [2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("option", ["patience=0", "window=many", "order=none"])
def test_scheduler_of_the_page_refuses_options_that_mean_nothing(option: str, page: dict[str, Any]) -> None:
    name, _, value = option.partition("=")
    config = msgspec.structs.replace(make_config(), options={name: value})
    with pytest.raises(Refused, match=name):
        SchedulerDriver(page["CachedFirstScheduler"], config)


def runs_what_is_loading(base: Any) -> Any:
    class Mutant(base):
        def _admit(self, now_s: float) -> None:
            super()._admit(now_s)
            for job in self.jobs.values():
                if job.is_loading:
                    self._run(job, (job.kv.num_tokens - 1) // 4 * 4)

        def _run(self, job: Any, cached_tokens: int) -> None:
            if job not in self.running:
                super()._run(job, cached_tokens)

    return Mutant


def gives_back_what_is_loading(base: Any) -> Any:
    class Mutant(base):
        def _end(self, job: Any, event: TokenEvent) -> TokenEvent:
            event = super()._end(job, event)
            if job.is_loading:
                job.kv.release()
            return event

    return Mutant


def gives_back_what_is_saved(base: Any) -> Any:
    class Hasty:
        """Says of a save that it is over."""

        def __init__(self, port: TierPort) -> None:
            self.port = port

        def __getattr__(self, name: str) -> Any:
            return getattr(self.port, name)

        def save(self, *arguments: Any) -> Any:
            self.port.save(*arguments)

    class Mutant(base):
        def use_tiers(self, port: TierPort) -> None:
            super().use_tiers(Hasty(port))

    return Mutant


def never_saves(base: Any) -> Any:
    class Mutant(base):
        def use_tiers(self, port: TierPort) -> None:
            super().use_tiers(port)
            self.transfers.seal = lambda kv, num_tokens: kv.seal(num_tokens)

    return Mutant


def names_blocks_with_another_key(base: Any) -> Any:
    class Mutant(base):
        def __init__(self, config: SchedulerConfig, policy: QueuePolicy) -> None:
            super().__init__(msgspec.structs.replace(config, digest_key=None), policy)

    return Mutant


@pytest.mark.parametrize(
    ("mutate", "message"),
    [
        (runs_what_is_loading, "holds the KV of another prefix"),
        (gives_back_what_is_loading, "blocks were given back while a load writes to them"),
        (gives_back_what_is_saved, "was overwritten while it was saved|while another transfer has them"),
        (never_saves, "0 were saved or counted as unsaved"),
        (names_blocks_with_another_key, "make the cache with config.digest_key"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_kit_catches_the_scheduler_of_the_page_with_one_rule_of_tiers_broken(
    mutate: Any, message: str, page: dict[str, Any]
) -> None:
    with pytest.raises(ConformanceError, match=message):
        check_tiered_scheduler(mutate(page["CachedFirstScheduler"]))


def test_policy_of_the_page_is_the_examples() -> None:
    source = (EXAMPLE / "src" / "openinfer_shortest_first" / "policy.py").read_text(encoding="utf-8")
    assert blocks("python")[0] in source


def test_entry_point_of_the_page_is_the_examples() -> None:
    written = tomllib.loads(blocks("toml")[0])["project"]["entry-points"]
    installed = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    assert written == installed

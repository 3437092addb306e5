"""The page `docs/reference/write-a-scheduler.md` is true: its code runs, conforms, and is the example's."""

import re
import tomllib
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from openinfer_core.testing.queue_policy import check_queue_policy
from openinfer_core.testing.scheduler import SCHEDULER_CHECKS, SchedulerCheck

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "openinfer-shortest-first"
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


@pytest.mark.parametrize("check", SCHEDULER_CHECKS, ids=attrgetter("__name__"))
def test_scheduler_of_the_page_conforms(check: SchedulerCheck, page: dict[str, Any]) -> None:
    page["test_scheduler_conforms"](check)
    check(page["ReservingScheduler"])


def test_policy_of_the_page_is_the_examples() -> None:
    source = (EXAMPLE / "src" / "openinfer_shortest_first" / "policy.py").read_text(encoding="utf-8")
    assert blocks("python")[0] in source


def test_entry_point_of_the_page_is_the_examples() -> None:
    written = tomllib.loads(blocks("toml")[0])["project"]["entry-points"]
    installed = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    assert written == installed

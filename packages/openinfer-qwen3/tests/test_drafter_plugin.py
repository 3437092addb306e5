"""`--speculative`: the drafter of docs/reference/write-a-drafter.md as an installed package, and drafters that fail."""

import logging
import re
import sys
from pathlib import Path

import pytest

from openinfer_core import Refused
from openinfer_core.errors import BrokenPlugin, UnknownPlugin
from openinfer_engine import EngineOptions, StepLoop, build_loop, resolve
from openinfer_engine.testing import Answer, random_requests
from openinfer_engine.testing.answers import run_at_once
from openinfer_qwen3.family import Qwen3Definition

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "write-a-drafter.md"


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str, value: str) -> None:
    """Puts a module and its entry point where this process and its children find them."""
    name = value.partition(":")[0]
    (folder / f"{name}.py").write_text(source, encoding="utf-8")
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text(f"[openinfer.drafters]\nmine = {value}\n", encoding="utf-8")
    monkeypatch.delitem(sys.modules, name, raising=False)  # another test's of the same name
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.fixture
def model_dir(fixtures: Path) -> Path:
    return fixtures / "tied"


@pytest.fixture
def page_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not PAGE.exists():
        pytest.skip("the page is in the source tree")
    (source, *_) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    install(tmp_path, monkeypatch, source, "openinfer_lookup:LookupDrafter")


def make_loop(model_dir: Path, **options: object) -> StepLoop:
    fields = {"num_blocks": 64, "max_num_seqs": 4, "batch_invariant": True, **options}
    return build_loop(resolve(Qwen3Definition(), model_dir, EngineOptions(**fields)))


def answers(loop: StepLoop) -> dict[int, Answer]:
    requests = random_requests(5, vocab_size=loop.info.num_token_ids, max_prompt_tokens=40, logprobs=1)
    try:
        found = run_at_once(loop, requests)
        stats = loop.stats()
        assert stats.drafter_faults == 0
        assert (stats.spec_decode_num_draft_tokens > 0) == ("drafter" in loop.info.composition)
    finally:
        loop.close()
    return found


@pytest.mark.parametrize(
    "ranks", [{}, {"tensor_parallel_size": 2}, {"tensor_parallel_size": 2, "rank_host": "process"}]
)
@pytest.mark.usefixtures("page_drafter")
def test_answers_with_an_installed_drafter_are_those_without(model_dir: Path, ranks: dict[str, object]) -> None:
    loop = make_loop(model_dir, speculative="mine,adaptive=false", **ranks)
    assert loop.info.composition["drafter"] == "mine (openinfer_lookup 1.0), up to 4 drafts"

    assert answers(loop) == answers(make_loop(model_dir, **ranks))


@pytest.mark.usefixtures("page_drafter")
def test_plan_shows_the_drafter_and_its_bound(model_dir: Path) -> None:
    plan = resolve(Qwen3Definition(), model_dir, EngineOptions(speculative="mine,k=7", num_blocks=8)).plan()

    assert plan.parts["drafter"] == "mine (openinfer_lookup 1.0), up to 7 drafts, adaptive"
    assert plan.limits["max_drafts"] == 7
    without = resolve(Qwen3Definition(), model_dir, EngineOptions(num_blocks=8)).plan()
    assert "drafter" not in without.parts
    assert "max_drafts" not in without.limits


MADE = "import functools, types; return functools.partial(types.SimpleNamespace, start=print, draft=print)"
RAISING = """
OPENINFER_CONTRACT = 1

class Raising:
    def __init__(self, context):
        self.max_drafts = context.max_drafts
    def start(self, starts):
        raise RuntimeError("no start")
    def draft(self, slots, last_ids, hidden, lengths):
        raise AssertionError("not called after a fault")
"""


def test_drafter_that_raises_costs_its_drafts_and_no_request(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(tmp_path, monkeypatch, RAISING, "raising:Raising")
    loop = make_loop(model_dir, speculative="mine")
    requests = random_requests(3, vocab_size=loop.info.num_token_ids, max_prompt_tokens=40)

    with caplog.at_level(logging.ERROR, logger="openinfer.engine"):
        found = run_at_once(loop, requests)
    stats = loop.stats()
    loop.close()

    without = make_loop(model_dir)
    assert found == run_at_once(without, requests)
    without.close()
    assert stats.drafter_faults == 1
    assert "drafter mine (raising 1.0) failed: RuntimeError: no start" in caplog.text


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise KeyError('eh_proj')", r"'mine' of unmade 1.0 \(unmade:make\) cannot be made: KeyError: 'eh_proj'"),
        ("return None", r"'mine' of unmade 1.0 \(unmade:make\) makes nothing: it returned None"),
        ("return 4", r"'mine' of unmade 1.0 \(unmade:make\) is no Drafter: it lacks draft, max_drafts, start"),
        (f"{MADE}(max_drafts=5)", r"drafter mine \(unmade 1.0\) has max_drafts 5; possible are 1 .. 4"),
        (f"{MADE}(max_drafts='4')", r"drafter mine \(unmade 1.0\) has max_drafts '4'; possible are 1 .. 4"),
    ],
)
def test_drafter_that_cannot_be_made_is_refused_by_name(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str
) -> None:
    install(tmp_path, monkeypatch, f"OPENINFER_CONTRACT = 1\n\ndef make(context):\n    {body}\n", "unmade:make")

    with pytest.raises(BrokenPlugin, match=message):
        make_loop(model_dir, speculative="mine")


def test_unknown_drafter_is_refused(model_dir: Path) -> None:
    with pytest.raises(UnknownPlugin, match=r"no installed package offers 'other' in openinfer\.drafters"):
        make_loop(model_dir, speculative="other")


def test_an_option_that_a_drafter_does_not_name_is_refused(model_dir: Path, page_drafter: None) -> None:
    with pytest.raises(Refused, match=r"mine \(openinfer_lookup 1.0\) has no option 'n_max'; possible: k, adaptive"):
        make_loop(model_dir, speculative="mine,n_max=4")


SUITING = """
OPENINFER_CONTRACT = 1

class Suiting:
    options = ("depth",)
    @staticmethod
    def suits(config):
        return "made for qwen3" if config["model_type"] == "qwen3" else None
    def __init__(self, context):
        assert context.options == {"depth": "2"}
        self.max_drafts = context.max_drafts
    def start(self, starts): ...
    def draft(self, slots, last_ids, hidden, lengths): ...
"""


def test_auto_takes_a_drafter_that_suits_the_model_and_says_why(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, SUITING, "suiting:Suiting")
    loop = make_loop(model_dir, speculative="auto,depth=2")
    assert (
        loop.info.composition["drafter"]
        == "mine (suiting 1.0), up to 4 drafts, adaptive, depth=2 (auto: made for qwen3)"
    )
    loop.close()


def test_auto_looks_up_n_grams_where_no_drafter_suits_the_model(model_dir: Path) -> None:
    plan = resolve(Qwen3Definition(), model_dir, EngineOptions(speculative="auto", num_blocks=8)).plan()
    drafter = plan.parts["drafter"]
    assert drafter.startswith("ngram (openinfer-engine ")
    assert drafter.endswith("up to 4 drafts, adaptive (auto: no installed drafter is for this model's own layers)")


@pytest.mark.parametrize("ranks", [{}, {"tensor_parallel_size": 2}])
def test_answers_with_looked_up_drafts_are_those_without(model_dir: Path, ranks: dict[str, object]) -> None:
    assert answers(make_loop(model_dir, speculative="ngram,n_min=1,k=3,adaptive=false", **ranks)) == answers(
        make_loop(model_dir, **ranks)
    )

"""`openinfer plan` makes what it approves: a part that a start would fail on is refused by name, in one sentence."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from openinfer.commands.main import main

PLAN = ["plan", "--model", "tiny"]
GROUPS = {
    "schedulers": "scheduler",
    "queue_policies": "queue-policy",
    "tool_parsers": "tool-parser",
    "endpoints": "endpoints",
    "grammar_compilers": "grammar-compiler",
    "drafters": "speculative",
}

SCHEDULER = """
import msgspec

from openinfer_core.scheduler_options import refuse_unknown_options
from openinfer_core.scheduling import SchedulerCapabilities
from openinfer_engine.scheduler import TokenBudgetScheduler


class Plain:
    \"\"\"Hands all calls on; has neither KV tiers nor events.\"\"\"

    capabilities = SchedulerCapabilities()

    def __init__(self, config, policy):
        refuse_unknown_options(config.options, known=("chunk",))
        self.inner = TokenBudgetScheduler(msgspec.structs.replace(config, options={}), policy)

    def add(self, request, *, now_s):
        return self.inner.add(request, now_s=now_s)

    def abort(self, request_id):
        return self.inner.abort(request_id)

    def plan(self, *, now_s):
        return self.inner.plan(now_s=now_s)

    def apply(self, plan, result, *, now_s):
        return self.inner.apply(plan, result, now_s=now_s)

    @property
    def unfinished_ids(self):
        return self.inner.unfinished_ids

    def stats(self):
        return self.inner.stats()


class Parts(Plain):
    pass
"""
PARSER = """
class Parts:
    visible_tokens = ()

    def __init__(self, context):
        pass

    @classmethod
    def claims(cls, traits):
        return False

    def feed(self, text):
        return []

    def finish(self):
        return []
"""
POLICY = """
class Parts:
    def __init__(self, config):
        pass

    def key(self, request, arrival):
        return arrival

    def admitted(self, request):
        pass

    def withdrawn(self, request):
        pass
"""

PROVIDER = """
class Parts:
    operators = ("rms_norm",)
    architectures = ("cpu",)

    def bind(self, own):
        raise LookupError("no kernel")
"""

Install = Callable[..., list[str]]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Install:
    """Installs a package with one plug-in, `foreign`, whose object is `Parts`; returns the flags that choose it."""
    module = f"foreign_parts_{abs(hash(request.node.name))}"  # a module is imported once in a process

    def install(group: str, source: str, *, contract: str = "OPENINFER_CONTRACT = 1\n") -> list[str]:
        (tmp_path / f"{module}.py").write_text(contract + source)
        info = tmp_path / "foreign_parts-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign-parts\nVersion: 1.5\n")
        (info / "entry_points.txt").write_text(f"[openinfer.{group}]\nforeign = {module}:Parts\n")
        (info / "RECORD").write_text(f"{module}.py,,\n{info.name}/METADATA,,\n")
        monkeypatch.syspath_prepend(tmp_path)
        return [f"--{GROUPS[group]}", "foreign"] if group in GROUPS else []

    return install


def refusal(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main([*PLAN, *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


CASES = {
    "import": ("schedulers", "raise OSError('no such card')\n", "failed to load: OSError: no such card"),
    "arity": ("schedulers", "def Parts(config): return object()\n", "cannot be made: TypeError: Parts() takes 1"),
    "none": ("schedulers", "def Parts(config, policy): return None\n", "makes nothing: it returned None"),
    "member": ("schedulers", f"{SCHEDULER}    stats = None\n    del stats\ndel Plain.stats\n", "lacks stats"),
    "raises": (
        "schedulers",
        f"{SCHEDULER}    def plan(self, *, now_s): raise KeyError('row')\n",
        "failed in a dry run on a fake device: KeyError: 'row'",
    ),
    "wedge": (
        "schedulers",
        f"{SCHEDULER}    def plan(self, *, now_s): return None\n",
        "failed in a dry run on a fake device: ConformanceError: wedged",
    ),
    "swallows": (
        "schedulers",
        f"{SCHEDULER}    def add(self, request, *, now_s): return []\n",
        "failed in a dry run on a fake device: ConformanceError",
    ),
    "exits": (
        "schedulers",
        f"{SCHEDULER}    def plan(self, *, now_s): raise SystemExit(3)\n",
        "failed in a dry run on a fake device: SystemExit: 3",
    ),
    "contract 0": ("schedulers", "", "is written for contract 0 of openinfer.schedulers"),
    "contract 2": ("schedulers", "", "is written for contract 2 of openinfer.schedulers"),
    "policy arity": ("queue_policies", "class Parts: pass\n", "cannot be made: TypeError: Parts() takes no arguments"),
    "policy member": (
        "queue_policies",
        f"{POLICY}\ndel Parts.withdrawn\n",
        "is no QueuePolicy: it lacks withdrawn",
    ),
    "policy raises": (
        "queue_policies",
        f"{POLICY}\n    def key(self, request, arrival): return request.absent\n",
        "failed in a dry run on a fake device: ",
    ),
    "parser": (
        "tool_parsers",
        f"{PARSER}\n    def finish(self): raise IndexError('empty')\n",
        "fails on a text: IndexError: empty",
    ),
    "parser member": ("tool_parsers", "class Parts: pass\n", "is no parser: it lacks visible_tokens"),
    "endpoint": (
        "endpoints",
        "def Parts(): return []\n",
        "cannot be called with 1 argument(s): too many positional arguments",
    ),
    "grammars": ("grammar_compilers", "def Parts(vocabulary): return None\n", "makes nothing: it returned None"),
    "drafter": (
        "drafters",
        "def Parts(): return None\n",
        "cannot be called with 1 argument(s): too many positional arguments",
    ),
    "drafter member": (
        "drafters",
        "class Parts:\n    def __init__(self, context): pass\n    def start(self, starts): pass\n",
        "is no Drafter: it lacks draft",
    ),
    "exit": ("schedulers", "raise SystemExit(0)\n", "failed to load: SystemExit: 0"),
}


@pytest.mark.parametrize("case", CASES)
def test_plan_refuses_a_part_that_a_start_would_fail_on(
    case: str, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    group, source, says = CASES[case]
    contract = {"contract 0": "", "contract 2": "OPENINFER_CONTRACT = 2\n"}.get(case, "OPENINFER_CONTRACT = 1\n")
    flags = install(group, source, contract=contract)
    said = refusal(capsys, *flags)
    assert says in said
    assert "foreign" in said
    assert "foreign-parts 1.5" in said


def test_plan_approves_a_scheduler_that_keeps_the_contract_and_shows_its_options(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = install("schedulers", SCHEDULER)
    lock = tmp_path / "lock.json"
    assert main([*PLAN, *flags, "--scheduler-option", "chunk=64", "--lock", str(lock)]) == 0
    assert "scheduler option chunk" in capsys.readouterr().out
    assert json.loads(lock.read_text())["parts"]["scheduler option chunk"] == "64"
    assert main(["serve", "--model", "tiny", *flags, "--scheduler-option", "chunk=65", "--locked", str(lock)]) == 2
    assert "parts.scheduler option chunk is '65', locked '64'" in capsys.readouterr().err


@pytest.mark.parametrize("scheduler", ["token-budget", "foreign"])
def test_plan_refuses_an_option_that_the_scheduler_does_not_know(
    scheduler: str, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("schedulers", SCHEDULER)
    said = refusal(capsys, "--scheduler", scheduler, "--scheduler-option", "chnk=64")
    package, known = ("foreign-parts 1.5", "chunk") if scheduler == "foreign" else ("openinfer-engine", "early-loads")
    assert f"plug-in '{scheduler}' of {package}" in said
    assert f"the scheduler knows no option chnk; it has {known}" in said


def test_plan_refuses_a_scheduler_without_kv_tiers_or_events(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = install("schedulers", SCHEDULER)
    said = refusal(capsys, *flags, "--kv-tier", "host=64MiB")
    assert "foreign-parts 1.5" in said
    assert "tiers" in said
    said = refusal(capsys, *flags, "--kv-events", "5557")
    assert "foreign-parts 1.5" in said
    assert "kv_events needs a scheduler that tells of its blocks" in said


@pytest.mark.parametrize("declares", [False, True])
def test_plan_refuses_a_drafter_with_a_scheduler_that_plans_no_drafts(
    declares: bool, install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = SCHEDULER.replace("SchedulerCapabilities()", "SchedulerCapabilities(plans_drafts=True)")
    flags = install("schedulers", f"{source if declares else SCHEDULER}\n\ndef draft(context): return None\n")
    entry_points = tmp_path / "foreign_parts-1.5.dist-info" / "entry_points.txt"
    text = entry_points.read_text()
    entry_points.write_text(text + text.replace("schedulers", "drafters").replace(":Parts", ":draft"))
    if declares:
        assert main([*PLAN, *flags, "--speculative", "foreign"]) == 0
    else:
        said = refusal(capsys, *flags, "--speculative", "foreign")
        assert "foreign-parts 1.5) plans no drafts (it does not declare plans_drafts)" in said


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("host=64Gb", "'64Gb' is not a size"),
        ("host=1GiB,policy=none", "policy"),
        ("disk=/var/cache/kv", "write FOLDER,SIZE"),
        ("s3=http://bucket,1TiB", "is no bucket"),
        ("valkey=http://server,1GiB", "is no address of a Valkey server"),
        ("stack=host=1GiB;disk=/x", "write FOLDER,SIZE"),
        ("stack=host=1GiB;write=sideways", "sideways"),
        ("stack=write=back", "no tier was named"),
    ],
)
def test_plan_refuses_a_malformed_tier_setting(setting: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, "--kv-tier", setting)
    assert says in said
    assert "openinfer-kv-offload" in said


def test_plan_opens_nothing_of_a_tier_whose_setting_can_be_checked(tmp_path: Path) -> None:
    assert main([*PLAN, "--kv-tier", f"disk={tmp_path / 'cache'},1GiB"]) == 0
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def Parts(layout): return None\n", "cannot be called with 2 argument(s)"),
        ("def Parts(layout, setting): return None\n", "makes nothing: it returned None"),
        ("def Parts(layout, setting): raise ValueError('write SIZE')\n", "write SIZE"),
        ("def Parts(layout, setting): return layout.nothing\n", "cannot be made: AttributeError"),
        ("def Parts(layout, setting): return object()\n", "is no KvTier: it lacks"),
    ],
)
def test_plan_opens_and_closes_a_tier_that_cannot_check_its_setting(
    source: str, says: str, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("kv_tiers", source)
    said = refusal(capsys, "--kv-tier", "foreign=1GiB")
    assert says in said
    assert "foreign-parts 1.5" in said


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def Parts(): pass\n", "is no KernelProvider: it lacks architectures, bind, operators"),
        (
            PROVIDER,
            "cannot be bound: LookupError: no kernel",
        ),
    ],
)
def test_plan_refuses_a_kernel_provider_that_cannot_be_bound(
    source: str, says: str, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("kernel_providers", source)
    said = refusal(capsys, "--kernel-providers", "rms_norm=foreign")
    assert says in said
    assert "foreign-parts 1.5" in said

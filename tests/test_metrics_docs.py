"""docs/reference/metrics.md and the Grafana dashboard against what `/metrics` answers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from openinfer_core.engine import AdapterStats, EngineInfo, EngineStats, KvTierStats, PluginFaults, SlowCall
from openinfer_core.events import FailureKind, FinishReason
from openinfer_engine.guard import FaultKind
from openinfer_server.observability.metric_names import VLLM_FAMILIES, MetricsNames
from openinfer_server.observability.metrics import ServerMetrics
from openinfer_server.observability.metrics_page import metrics_page
from openinfer_server.observability.metrics_snapshot import BudgetUse

ROOT = Path(__file__).parents[1]
DASHBOARD = json.loads((ROOT / "deploy/grafana/openinfer.json").read_text(encoding="utf-8"))
INFO = EngineInfo(
    model="m",
    family="f",
    max_model_tokens=4096,
    num_token_ids=10,
    eos_token_ids=(),
    block_size_tokens=16,
    num_blocks=4,
    max_num_seqs=1,
    max_adapters=2,
    max_waiting=1,
    memory_bytes={"kv_cache": 1},
)


BUDGET = BudgetUse(budget="requests", used=1, limit=2, refused=0)


def page(names: MetricsNames = MetricsNames.OPENINFER) -> str:
    metrics = ServerMetrics(max_model_tokens=INFO.max_model_tokens)
    metrics.responses["/v1/completions", 200] += 1
    stats = EngineStats(
        kv_tiers=(KvTierStats(tier="host", failures={"full": 0}),),
        plugin_faults=(PluginFaults(group="g", plugin="p", counts=dict.fromkeys(FaultKind, 0)),),
        slow_call=SlowCall(plugin="p", call="plan", age_s=2.0),
        spec_decode_num_accepted_tokens_per_pos=(0,),
        adapters=tuple(
            AdapterStats(name=name, digest="", path="", rank=8, running=1, waiting=waiting)
            for name, waiting in (("sql", 0), ("pirate", 2))
        ),
    )
    given = {"model_name": "m", "open_requests": 0, "budgets": [BUDGET], "names": names, "clock": lambda: 7.0}
    return metrics_page(metrics, INFO, stats, **given).decode()


def exposed() -> dict[str, tuple[str, frozenset[str]]]:
    """Families: name to type and labels."""
    text = page()
    kinds = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.M))
    labels: dict[str, set[str]] = {name: set() for name in kinds}
    for series, rendered in re.findall(r"^(\w+)(?:\{(.*)\})? \S+$", text, re.M):
        family = series if series in kinds else re.sub(r"_(bucket|sum|count)$", "", series)
        labels[family] |= set(re.findall(r'(\w+)="', rendered))
    return {name: (kind, frozenset(labels[name] - {"le"})) for name, kind in kinds.items()}


def promised() -> dict[str, tuple[str, frozenset[str]]]:
    text = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \|", text, re.M)
    assert len({name for name, _, _ in rows}) == len(rows)
    return {name: (kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


def test_what_is_promised_is_there_and_what_is_there_is_promised() -> None:
    assert promised() == exposed()


def test_values_of_labels_are_the_ones_that_are_named() -> None:
    text = page()
    assert set(re.findall(r'finished_reason="(\w+)"', text)) == set(FinishReason)
    named = set(re.findall(r'request_failures_total\{model_name="m",kind="(\w+)"', text))
    assert named == set(FailureKind)
    docs = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
    assert all(f"`{each}`" in docs for each in (*FinishReason, *FailureKind, *FaultKind))


VLLM_DASHBOARD = """
e2e_request_latency_seconds_bucket generation_tokens_total inter_token_latency_seconds_bucket kv_cache_usage_perc
num_requests_running num_requests_waiting prompt_tokens_total request_decode_time_seconds_sum
request_generation_tokens_bucket request_prefill_time_seconds_sum request_prompt_tokens_bucket
request_queue_time_seconds_sum request_success_total time_to_first_token_seconds_bucket
""".split()
"""What the dashboards in vLLM's examples ask for, without its prefix; docs/reference/metrics.md names the rest."""


@pytest.mark.parametrize("name", VLLM_DASHBOARD)
def test_series_of_vllms_dashboards_are_there(name: str) -> None:
    assert re.search(rf'^openinfer_{name}\{{model_name="m"', page(), re.M)


def test_rows_that_are_marked_are_those_that_are_renamed() -> None:
    text = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `openinfer_(\w+)` .*\*\*v\*\*", text, re.M)) == VLLM_FAMILIES


def test_vllms_names_change_nothing_but_prefixes_of_its_families() -> None:
    ours, vllms = page().splitlines(), page(MetricsNames.VLLM).splitlines()
    changed = [(before, after) for before, after in zip(ours, vllms, strict=True) if before != after]
    assert all(before.replace("openinfer_", "vllm:", 1) == after for before, after in changed)
    kinds = {after.split()[2] for _, after in changed if after.startswith("# TYPE")}
    assert kinds == {f"vllm:{name}" for name in VLLM_FAMILIES}
    ours_still = rf"^(?:# \w+ )?openinfer_({'|'.join(VLLM_FAMILIES)})\b"
    assert not [line for line in vllms if re.search(ours_still, line)]


@pytest.mark.parametrize("name", VLLM_DASHBOARD)
def test_vllms_dashboards_find_their_series_under_vllms_names(name: str) -> None:
    assert re.search(rf'^vllm:{name}\{{model_name="m"', page(MetricsNames.VLLM), re.M)


LLM_D = (
    "num_requests_waiting",
    "num_requests_running",
    "kv_cache_usage_perc",
    "cache_config_info",
    "lora_requests_info",
)
"""What llm-d's endpoint picker reads of an engine of type vllm."""


@pytest.mark.parametrize("name", LLM_D)
def test_series_of_llm_ds_endpoint_picker_are_there_once(name: str) -> None:
    assert len(re.findall(rf"^vllm:{name}[{{ ]", page(MetricsNames.VLLM), re.M)) == 1


def test_cache_config_has_the_labels_that_llm_d_reads() -> None:
    assert 'vllm:cache_config_info{block_size="16",num_gpu_blocks="4"} 1' in page(MetricsNames.VLLM)


def test_adapters_have_the_labels_that_llm_d_reads_and_the_time_for_a_value() -> None:
    labels = 'max_lora="(\\d+)",running_lora_adapters="([^"]*)",waiting_lora_adapters="([^"]*)"'
    (found,) = re.findall(rf"^vllm:lora_requests_info\{{{labels}\}} (\S+)$", page(MetricsNames.VLLM), re.M)
    assert found == (str(INFO.max_adapters), "sql,pirate", "pirate", "7.0")


def queries() -> list[Any]:
    targets = [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel["targets"]]
    variables = [(each["name"], each["query"]) for each in DASHBOARD["templating"]["list"] if each["type"] == "query"]
    return [pytest.param(query, id=f"{title}-{place}") for place, (title, query) in enumerate(targets + variables)]


@pytest.mark.parametrize("query", queries())
def test_query_of_the_dashboard_asks_for_what_there_is(query: str) -> None:
    families, text = exposed(), page()
    asked = re.findall(r"(openinfer_\w+)(?:\{([^}]*)\})?", query)
    assert asked
    for name, selector in asked:
        family = name if name in families else re.sub(r"_(bucket|sum|count)$", "", name)
        kind, labels = families[family]
        assert re.search(rf"^{name}[{{ ]", text, re.M), name
        assert set(re.findall(r"(\w+)=", selector)) <= labels
        assert (f"rate({name}" in query) == (kind != "gauge"), "counters and histograms are rates, gauges are not"
    grouped = {label for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(", ")}
    assert grouped <= {"le"} | set.union(*(set(labels) for name, (_, labels) in families.items() if name in query))


def test_panels_do_not_cover_each_other() -> None:
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for grid in (panel["gridPos"],)
        for x in range(grid["x"], grid["x"] + grid["w"])
        for y in range(grid["y"], grid["y"] + grid["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24

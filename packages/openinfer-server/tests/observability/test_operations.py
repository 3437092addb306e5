"""Health, readiness, metrics, models."""

import contextlib
import http.client
import json
import re
import threading

import anthropic
import msgspec
import pytest

from openinfer_core.engine import (
    MASK_OUTCOMES,
    AdapterStats,
    EngineCapability,
    EngineState,
    EngineStats,
    GrammarStats,
    KvTierStats,
    KvTransferStats,
    PluginFaults,
    SlowCall,
)
from openinfer_core.errors import Refused
from openinfer_server import ServerOptions
from openinfer_server.observability.metric_names import MetricsNames
from openinfer_server.observability.metrics import ServerMetrics
from openinfer_server.observability.metrics_page import metrics_page
from openinfer_server.testing import ParrotLoop, wait_until

KEY = "operator-0123456789"


def test_health_is_ok_while_idle(shared, call):
    status, _, body = call(shared, "GET", "/health")
    assert (status, json.loads(body)) == (200, {"status": "ok", "step_age_s": 0.0})


class Stuck(ParrotLoop):
    """Its loop does not come back from a step."""

    def step(self):
        self._going.wait()
        return super().step()


def test_health_is_503_when_a_step_takes_too_long(start, info, call):
    loop = Stuck(info)
    server = start(loop, ServerOptions(port=0, health_max_step_age_s=0.2))
    loop.hold()
    asking = threading.Thread(target=call, args=(server, "POST", "/v1/completions", {"prompt": "a"}), daemon=True)
    asking.start()
    wait_until(lambda: call(server, "GET", "/health")[0] == 503, "bad health")
    status, _, body = call(server, "GET", "/health")
    assert (status, json.loads(body)["status"]) == (503, "the engine's loop hangs")
    assert json.loads(body)["step_age_s"] > 0.2
    status, _, body = call(server, "GET", "/ready")
    assert (status, json.loads(body)) == (503, {"status": "the engine's loop hangs"})
    loop.go()
    asking.join()
    assert call(server, "GET", "/health")[0] == 200
    assert call(server, "GET", "/ready")[::2] == (200, b'{"status":"ready"}')


@pytest.mark.parametrize(
    ("group", "part"),
    [
        ("openinfer.schedulers", "scheduler"),
        ("openinfer.queue_policies", "queue policy"),
        ("openinfer.grammar_compilers", "grammar compiler"),
        ("openinfer.something_newer", "plug-in"),
    ],
)
def test_health_says_which_part_has_the_loop(start, info, call, group, part):
    class Slow(ParrotLoop):
        def stats(self):
            slow = SlowCall(plugin="birds:Sitting", call="key", age_s=2.5, group=group)
            return msgspec.structs.replace(super().stats(), slow_call=slow)

    _, _, body = call(start(Slow(info)), "GET", "/health")
    assert json.loads(body)["status"] == f"the {part} birds:Sitting has been in key for 2.5 s"


def test_models_are_listed_and_retrieved(start, info, connect, call):
    server = start(ParrotLoop(info), ServerOptions(port=0, model_name=["birds/parrot", "bird"]))
    client = connect(server)
    assert [model.id for model in client.models.list()] == ["birds/parrot", "bird"]
    assert client.models.retrieve("birds/parrot").owned_by == "openinfer"
    assert call(server, "GET", "/v1/models/eagle")[0] == 404
    assert call(server, "GET", "/v1/models/")[0] == 404
    assert client.completions.create(model="bird", prompt="a", max_tokens=1).model == "bird"


def test_model_cards_say_what_the_engine_runs(start, info, call):
    server = start(ParrotLoop(info), ServerOptions(port=0, model_name=["bird"]))
    (card,) = json.loads(call(server, "GET", "/v1/models")[2])["data"]
    assert (card["id"], card["root"], card["parent"]) == ("bird", "parrot", None)


@pytest.mark.parametrize(
    ("names", "prefix", "other"), [("openinfer", "openinfer_", "vllm:"), ("vllm", "vllm:", "openinfer_")]
)
def test_metrics_have_the_names_that_are_asked_for(start, info, call, names, prefix, other):
    server = start(ParrotLoop(info), ServerOptions(port=0, metrics_names=MetricsNames(names)))
    page = call(server, "GET", "/metrics")[2].decode()
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "cache_config_info"):
        assert f"\n{prefix}{name}{{" in page
        assert f"{other}{name}" not in page


def test_load_is_the_number_of_answers_in_the_making(start, info, call):
    loop = ParrotLoop(info)
    server = start(loop)
    loop.hold()
    body = {"prompt": "a", "n": 3, "max_tokens": 2}
    asking = threading.Thread(target=call, args=(server, "POST", "/v1/completions", body), daemon=True)
    asking.start()
    wait_until(lambda: call(server, "GET", "/load")[2] == b'{"server_load":3}', "three answers in the making")
    loop.go()
    asking.join()
    assert call(server, "GET", "/load")[2] == b'{"server_load":0}'


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_ping_says_what_health_says(shared, call, method):
    assert call(shared, method, "/ping")[::2] == call(shared, "GET", "/health")[::2]


def operated(start, loop, tmp_path):
    (tmp_path / "keys.toml").write_text(f'[[keys]]\ntenant = "operators"\nlevel = "admin"\nkey = "{KEY}"')
    return start(loop, ServerOptions(port=0, api_keys_file=str(tmp_path / "keys.toml")))


def reset(server, query=""):
    with contextlib.closing(http.client.HTTPConnection(*server.address, timeout=20)) as connection:
        connection.request("POST", f"/reset_prefix_cache{query}", headers={"x-api-key": KEY})
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def test_prefix_cache_is_reset_by_operators(start, info, tmp_path, call):
    loop = ParrotLoop(msgspec.structs.replace(info, capabilities=(EngineCapability.FLUSH_CACHE,)))
    server = operated(start, loop, tmp_path)
    assert call(server, "POST", "/reset_prefix_cache")[0] == 401
    assert loop.num_flushes == 0
    assert reset(server) == (200, {"status": "reset"})
    assert loop.num_flushes == 1
    status, answer = reset(server, "?reset_external=true")
    assert (status, answer["error"]["param"]) == (400, "reset_external")


def test_prefix_cache_of_an_engine_that_cannot_forget_is_not_reset(start, info, tmp_path):
    status, answer = reset(operated(start, ParrotLoop(info), tmp_path))
    assert (status, answer["error"]["code"]) == (400, "not_supported")
    assert "flush_cache" in answer["error"]["message"]


class Copying(ParrotLoop):
    """It could forget, but not now."""

    def control(self, command):
        raise Refused("copies are under way; try again")


def test_prefix_cache_that_cannot_be_reset_now_is_503(start, info, tmp_path):
    info = msgspec.structs.replace(info, capabilities=(EngineCapability.FLUSH_CACHE,))
    status, answer = reset(operated(start, Copying(info), tmp_path))
    assert (status, answer["error"]["message"]) == (503, "copies are under way; try again")


def test_openais_clients_get_every_name_and_anthropics_get_pages(start, info, connect):
    names = [f"bird-{number}" for number in range(25)]
    server = start(ParrotLoop(info), ServerOptions(port=0, model_name=names))
    assert [model.id for model in connect(server).models.list()] == names
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=20) as client:
        page = client.models.list()
        assert (len(page.data), page.has_more, page.last_id) == (20, True, "bird-19")
        assert [model.id for model in page] == names
        assert [model.id for model in client.models.list(before_id="bird-9", limit=3).data] == names[6:9]


def value(metrics: bytes, name: str) -> float:
    return float(re.search(rf"^{re.escape(name)} (\S+)$", metrics.decode(), re.M).group(1))


def test_metrics_count_what_happened(start, info, call):
    server = start(ParrotLoop(info))
    ids = [1, 2, 3, 4]
    for body in (
        {"prompt": ids, "max_tokens": 5, "stream": True},
        {"prompt": ids, "max_tokens": 6},
        {"prompt": ids, "n": 0},
    ):
        call(server, "POST", "/v1/completions", body)
    call(server, "GET", "/nowhere")
    status, headers, metrics = call(server, "GET", "/metrics")
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert value(metrics, 'openinfer_http_responses_total{route="/v1/completions",status="200"}') == 2
    assert value(metrics, 'openinfer_http_responses_total{route="/v1/completions",status="400"}') == 1
    assert value(metrics, 'openinfer_http_responses_total{route="(none)",status="404"}') == 1
    assert value(metrics, 'openinfer_request_success_total{model_name="parrot",finished_reason="length"}') == 2
    assert value(metrics, 'openinfer_request_success_total{model_name="parrot",finished_reason="stop"}') == 0
    assert value(metrics, 'openinfer_request_failures_total{model_name="parrot",kind="internal"}') == 0
    for name, expected in (
        ("openinfer_generation_tokens_total", 11),
        ("openinfer_prompt_tokens_total", 8),
        ("openinfer_prefix_cache_queries_total", 8),
        ("openinfer_prefix_cache_hits_total", 4),
        ("openinfer_time_to_first_token_seconds_count", 2),
        ("openinfer_inter_token_latency_seconds_count", 9),
        ("openinfer_e2e_request_latency_seconds_count", 2),
        ("openinfer_request_queue_time_seconds_count", 2),
        ("openinfer_request_prefill_time_seconds_count", 2),
        ("openinfer_request_decode_time_seconds_count", 2),
        ("openinfer_request_generation_tokens_sum", 11.0),
        ("openinfer_request_params_max_tokens_sum", 11.0),
    ):
        assert value(metrics, f'{name}{{model_name="parrot"}}') == expected, name
    assert value(metrics, "openinfer_requests_open") == 0
    assert value(metrics, "openinfer_engine_up") == 1
    assert value(metrics, "openinfer_kv_blocks") == info.num_blocks
    assert value(metrics, 'openinfer_info{model="parrot",family="birds"}') == 1
    assert value(metrics, 'openinfer_engine_memory_bytes{purpose="kv_cache"}') == 4096


def test_metrics_show_every_number_of_the_engine(info):
    """A number the engine offers is on the page under some name."""
    per_pos = "spec_decode_num_accepted_tokens_per_pos"
    structures = ("kv_tiers", "kv_transfer", "grammars", "adapters", "plugin_faults", "slow_call", "state")
    others = (*structures, per_pos, "weights_version")
    names = [name for name in EngineStats.__struct_fields__ if name not in others]
    of_tier = [name for name in KvTierStats.__struct_fields__ if name not in ("tier", "failures", "condition")]
    numbers = {name: 1000 + i for i, name in enumerate(names)}
    tier_numbers = {name: 2000 + i for i, name in enumerate(of_tier)}
    of_grammars = [name for name in GrammarStats.__struct_fields__ if name != "mask_s"]
    grammar_numbers = {name: 7000 + i for i, name in enumerate(of_grammars)}
    transfer_numbers = {name: 9100 + i for i, name in enumerate(KvTransferStats.__struct_fields__)}
    mask_s = {outcome: 8000 + i for i, outcome in enumerate(MASK_OUTCOMES)}
    tier = msgspec.convert(tier_numbers | {"tier": "host", "failures": {"timeout": 3000}}, KvTierStats)
    faults = PluginFaults(group="openinfer.schedulers", plugin="mine (my-package 1.0)", counts={"lost_request": 4000})
    stats = msgspec.structs.replace(
        msgspec.convert(numbers, EngineStats),
        kv_tiers=(tier,),
        kv_transfer=KvTransferStats(**transfer_numbers),
        grammars=msgspec.convert(grammar_numbers | {"mask_s": mask_s}, GrammarStats, strict=False),
        adapters=tuple(AdapterStats(name=name, digest="00", path="/", rank=8) for name in ("a", "b", "c")),
        plugin_faults=(faults,),
        slow_call=SlowCall(plugin="mine (my-package 1.0)", call="plan", age_s=5000.0),
        state=EngineState.PAUSED,
        weights_version="drawn 9000",
        **{per_pos: (6000, 6001)},
    )
    metrics = ServerMetrics(max_model_tokens=info.max_model_tokens)
    info = msgspec.structs.replace(info, max_adapters=2)
    page = metrics_page(metrics, info, stats, model_name="parrot", open_requests=0).decode()
    each = (
        *numbers.values(),
        *tier_numbers.values(),
        *grammar_numbers.values(),
        *mask_s.values(),
        *transfer_numbers.values(),
    )
    assert re.search(r"^openinfer_lora_adapters 3$", page, re.M)
    for number in (*each, 3000, 4000, 5000):
        assert re.search(rf" {number}(\.0)?$", page, re.M), number
    for position in (0, 1):
        labels = f'{{model_name="parrot",position="{position}"}}'
        assert f"openinfer_{per_pos}_total{labels} {6000 + position}" in page
    for state in EngineState:
        assert f'openinfer_engine_state{{state="{state}"}} {int(state is EngineState.PAUSED)}' in page
    assert 'openinfer_weights_info{version="drawn 9000"} 1' in page


def test_metrics_are_in_prometheus_format(shared, call):
    metrics = call(shared, "GET", "/metrics")[2].decode()
    pattern = re.compile(r'(# (HELP|TYPE) \w+ .+|\w+(\{\w+="[^"]*"(,\w+="[^"]*")*\})? -?[\d.e+-]+|)')
    assert all(pattern.fullmatch(text) for text in metrics.split("\n"))
    names = re.findall(r"^# TYPE (\w+) ", metrics, re.M)
    assert len(names) == len(set(names))
    assert all(name.startswith("openinfer_") for name in names)


def test_tokens_beyond_a_stop_string_are_not_counted(start, info, call, tokenizer):
    server = start(ParrotLoop(info, tokens_per_event=3))
    body = {"prompt": "The capital of France is Paris.", "max_tokens": 90, "stop": "France"}
    usage = json.loads(call(server, "POST", "/v1/completions", body)[2])["usage"]
    assert usage["completion_tokens"] % 3 != 0  # so that some of the event are beyond
    _, _, metrics = call(server, "GET", "/metrics")
    assert value(metrics, 'openinfer_generation_tokens_total{model_name="parrot"}') == usage["completion_tokens"]


def test_generation_tokens_are_those_that_usage_counts(start, info, call):
    server = start(ParrotLoop(info))
    (stop,) = info.eos_token_ids
    _, _, answer = call(server, "POST", "/v1/completions", {"prompt": [1, 2, stop, 3], "max_tokens": 9})
    usage = json.loads(answer)["usage"]
    assert usage["completion_tokens"] == 3
    _, _, metrics = call(server, "GET", "/metrics")
    assert value(metrics, 'openinfer_generation_tokens_total{model_name="parrot"}') == 3

"""`kv_transfer_params`, as proxies of prefill and decode engines send them: recorded requests, and what is asked."""

import json

import msgspec
import pytest

from openinfer_core.engine import EngineCapability
from openinfer_core.events import Finished
from openinfer_server import ServerOptions
from openinfer_server.testing import ParrotLoop

STORED = {"layout": "abc", "tier": "valkey", "tokens": 32, "digest": "0f" * 16}
ANSWER = {"do_remote_decode": False, "do_remote_prefill": True, "openinfer": STORED}

# What llm-d's sidecar and vLLM's proxies put into a prefill request, and what a vLLM of the releases 0.25 to 0.33
# answers, which they hand to the decode engine unread.
TO_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
OF_VLLM = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "f0c5a7e2",
    "remote_request_id": "cmpl-1",
    "remote_host": "10.0.0.9",
    "remote_port": 5600,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 48,
    "remote_blocks_expiry_time": 1700000000.5,
    "remote_registration_generation": 0,
    "transfer_mode": "read",
}
OF_MOONCAKE = {
    "do_remote_prefill": True,
    "transfer_id": "x",
    "remote_engine_id": "e",
    "remote_bootstrap_addr": "http://10.0.0.9:8998",
}
CHAT = {"messages": [{"role": "user", "content": "stone"}]}
ROUTES = {
    "/v1/completions": {"prompt": "stone", "max_tokens": 1, "max_completion_tokens": 1},
    "/v1/chat/completions": {**CHAT, "max_tokens": 1, "max_completion_tokens": 1},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 1}},
}


class HandsOver(ParrotLoop):
    """Says of each request that asks for it where its KV was left."""

    def __init__(self, info):
        super().__init__(msgspec.structs.replace(info, capabilities=(EngineCapability.KV_TRANSFER,)))
        self._asked = set()

    def submit(self, request):
        if (request.transfer or {}).get("do_remote_decode"):
            self._asked.add(request.request_id)
        return super().submit(request)

    def step(self):
        return [
            msgspec.structs.replace(event, transfer=ANSWER)
            if isinstance(event, Finished) and event.request_id in self._asked
            else event
            for event in super().step()
        ]


@pytest.fixture
def server(start, info):
    return start(HandsOver(info), ServerOptions(port=0))


@pytest.fixture
def post(server, call):
    def ask(path, body):
        status, _, answer = call(server, "POST", path, body)
        return status, json.loads(answer)

    return ask


@pytest.mark.parametrize("path", ROUTES)
def test_a_prefill_leaves_kv_and_its_answer_says_where(server, post, path):
    status, answer = post(path, {**ROUTES[path], "stream": False, "kv_transfer_params": TO_PREFILL})
    assert status == 200, answer
    assert answer["kv_transfer_params"] == ANSWER
    asked = server.engine.submitted[-1]
    assert asked.transfer == {"do_remote_decode": True}
    assert asked.sampling.max_tokens == 1


@pytest.mark.parametrize("path", ROUTES)
def test_a_decode_gets_what_the_prefill_answered_and_answers_as_ever(server, post, path):
    status, answer = post(path, {**ROUTES[path], "kv_transfer_params": ANSWER})
    assert status == 200, answer
    assert server.engine.submitted[-1].transfer == {"do_remote_prefill": True, "openinfer": STORED}
    assert "kv_transfer_params" not in answer


@pytest.mark.parametrize("params", [OF_VLLM, OF_MOONCAKE], ids=["vllm", "mooncake"])
def test_addresses_of_other_engines_reach_no_engine(server, post, params):
    assert post("/v1/chat/completions", {**CHAT, "max_tokens": 1, "kv_transfer_params": params})[0] == 200
    assert server.engine.submitted[-1].transfer == {"do_remote_prefill": True}


def test_a_decode_may_be_streamed(server, call):
    body = {**CHAT, "max_tokens": 2, "stream": True, "kv_transfer_params": ANSWER}
    status, _, answer = call(server, "POST", "/v1/chat/completions", body)
    assert (status, b"kv_transfer_params" in answer) == (200, False)
    assert server.engine.submitted[-1].transfer is not None


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": False, "do_remote_prefill": False}])
def test_parameters_that_ask_for_nothing_change_nothing(server, post, params):
    status, answer = post("/v1/completions", {"prompt": "stone", "max_tokens": 1, "kv_transfer_params": params})
    assert status == 200
    assert server.engine.submitted[-1].transfer is None
    assert "kv_transfer_params" not in answer


def test_a_stop_string_does_not_end_a_prefill_before_its_kv_is_left(server, post):
    body = {"prompt": "stone", "max_tokens": 1, "stop": ["s", "t", "o", "n", "e"], "kv_transfer_params": TO_PREFILL}
    assert post("/v1/completions", body)[1]["kv_transfer_params"] == ANSWER


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"do_remote_decode": True, "do_remote_prefill": True}, "kv_transfer_params"),
        ({"do_remote_decode": 1}, "kv_transfer_params.do_remote_decode"),
        ({"do_remote_prefill": True, "remote_hosts": []}, "kv_transfer_params"),
        ({"do_remote_prefill": True, "openinfer": {**STORED, "tokens": -1}}, "kv_transfer_params.openinfer.tokens"),
        ({"do_remote_prefill": True, "openinfer": {**STORED, "tokens": 2**60}}, "kv_transfer_params.openinfer.tokens"),
        (
            {"do_remote_prefill": True, "openinfer": {**STORED, "layout": "x" * 129}},
            "kv_transfer_params.openinfer.layout",
        ),
        ({"do_remote_prefill": True, "openinfer": {**STORED, "digest": "/etc"}}, "kv_transfer_params.openinfer.digest"),
        ({"do_remote_prefill": True, "openinfer": {"tokens": 1}}, "kv_transfer_params.openinfer"),
        ([], "kv_transfer_params"),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(post, params, param):
    status, answer = post("/v1/completions", {"prompt": "a", "kv_transfer_params": params})
    assert status == 400
    assert answer["error"]["param"].startswith(param), answer


def test_a_prefill_is_not_streamed(post):
    status, answer = post("/v1/completions", {"prompt": "a", "stream": True, "kv_transfer_params": TO_PREFILL})
    assert (status, answer["error"]["param"]) == (400, "stream")


def test_an_engine_without_a_shared_tier_says_what_to_do(start, info, call):
    server = start(ParrotLoop(info), ServerOptions(port=0))
    for params in (TO_PREFILL, ANSWER):
        status, _, answer = call(server, "POST", "/v1/completions", {"prompt": "a", "kv_transfer_params": params})
        assert status == 400
        assert "--kv-transfer" in json.loads(answer)["error"]["message"]

"""Prefill and decode apart: two engines and a tier that both read, and a proxy of sixty lines between them.

The tier is a server (Valkey), which both engines write to, or a folder that one writes and the other reads.
"""

import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from openinfer_bench.served import served
from openinfer_core import (
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    GenerateRequest,
    InvalidRequest,
    Refused,
    RequestId,
    SamplingParams,
    find_plugin,
)
from openinfer_engine import EngineOptions, LoadFormat, StepLoop, build_loop, resolve
from openinfer_kv_offload.testing.servers import ValkeyServer
from openinfer_server import ServerOptions
from openinfer_server.testing import ThreadedServer

BLOCK = 8
SHAPE: dict[str, Any] = {
    "block_size_tokens": BLOCK,
    "num_blocks": 160,
    "max_num_seqs": 4,
    "max_model_tokens": 1024,
    "batch_invariant": True,
    # A busy machine may take seconds for what takes milliseconds: no time decides a test here.
    "kv_load_timeout_ms": 300_000,
    "kv_handover_timeout_ms": 300_000,
}


def loop_of(**options: Any) -> StepLoop:
    definition = find_plugin("openinfer.models", "qwen3").load().definition
    model_dir = find_plugin("openinfer.checkpoints", "tiny").load()()
    return build_loop(resolve(definition, model_dir, EngineOptions(**{**SHAPE, **options})))


class Served(ThreadedServer):
    """A server with the loop of its engine."""

    def __init__(self, loop: StepLoop, model_dir: Path, options: ServerOptions) -> None:
        super().__init__(loop, model_dir, options)
        self.loop = loop


@contextmanager
def serving(**options: Any) -> Generator[Served]:
    model_dir = find_plugin("openinfer.checkpoints", "tiny").load()()
    with Served(loop_of(**options), model_dir, ServerOptions(port=0)) as server:
        yield server


def post(server: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    connection = http.client.HTTPConnection(*server.address, timeout=120)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
        assert response.status == 200, answer
        return answer
    finally:
        connection.close()


class Proxy:
    """What llm-d's sidecar and vLLM's proxies do with a request: prefill first, then decode with what that answered."""

    ASKED = {  # noqa: RUF012 -- as it is sent
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }

    def __init__(self, prefill: Served, decode: Served) -> None:
        self.prefill, self.decode = prefill, decode
        self.left: dict[str, Any] = {}

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.left = self.ask_prefill(path, body)
        return post(self.decode, path, {**body, "kv_transfer_params": self.left})

    def ask_prefill(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        one = {"stream": False, "max_tokens": 1, "max_completion_tokens": 1, "kv_transfer_params": self.ASKED}
        if path == "/inference/v1/generate":
            one = {"stream": False, "kv_transfer_params": self.ASKED}
            body = {**body, "sampling_params": {**body["sampling_params"], "max_tokens": 1}}
        return post(self.prefill, path, {**body, **one})["kv_transfer_params"]


@contextmanager
def valkey_pair(tmp_path: Path) -> Generator[Sequence[dict[str, Any]]]:
    folder = tmp_path / "valkey"
    folder.mkdir()
    with ValkeyServer(folder) as valkey:
        yield [{"kv_tier": [f"valkey={valkey.url},64MiB,timeout_s=300"], "kv_transfer": "valkey"}] * 2


@contextmanager
def stacked_pair(tmp_path: Path) -> Generator[Sequence[dict[str, Any]]]:
    """Each with a host tier of its own above the server, which is no place to land."""
    with valkey_pair(tmp_path) as pair:
        yield [{**each, "kv_tier": ["host=8MiB", *each["kv_tier"]]} for each in pair]


@contextmanager
def disk_pair(tmp_path: Path) -> Generator[Sequence[dict[str, Any]]]:
    setting = f"disk={tmp_path / 'blocks'},64MiB"
    yield [
        {"kv_tier": [setting], "kv_transfer": "disk"},
        {"kv_tier": [f"{setting},access=read,refresh_s=60"], "kv_transfer": "disk"},
    ]


PAIRS = {"valkey": valkey_pair, "host and valkey": stacked_pair, "disk": disk_pair}


@pytest.fixture
def key(tmp_path: Path) -> str:
    path = tmp_path / "key"
    path.write_bytes(b"k" * 32)
    return str(path)


@pytest.fixture(params=PAIRS)
def proxy(request: pytest.FixtureRequest, tmp_path: Path, key: str) -> Iterator[Proxy]:
    with ExitStack() as stack:
        engines = stack.enter_context(PAIRS[request.param](tmp_path))
        servers = [stack.enter_context(serving(**each, kv_key_file=key)) for each in engines]
        yield Proxy(*servers)


@pytest.fixture(scope="module")
def alone() -> Iterator[Served]:
    with serving() as server:
        yield server


def sealed(num_tokens: int) -> int:
    """Tokens of the blocks that a prompt can begin on: its last token is computed in any case."""
    return (num_tokens - 1) // BLOCK * BLOCK


def test_chats_of_five_turns_say_the_same_and_decode_computes_no_sealed_block(proxy: Proxy, alone: Served) -> None:
    found = wanted = 0
    for topic in ("stones",):
        messages = [{"role": "system", "content": f"You know all about {topic}. " * 4}]
        for turn in range(5):
            messages.append({"role": "user", "content": f"Question {turn}: what of {topic}, and why? " * 3})
            body = {"messages": messages, "max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
            answer = proxy.ask("/v1/chat/completions", body)
            expected = post(alone, "/v1/chat/completions", body)
            assert answer["choices"] == expected["choices"]
            usage = answer["usage"]
            assert usage["prompt_tokens"] == expected["usage"]["prompt_tokens"]
            found += usage["prompt_tokens_details"]["cached_tokens"]
            wanted += sealed(usage["prompt_tokens"])
            stored = proxy.left["openinfer"]["tokens"]
            assert stored == usage["prompt_tokens"] // BLOCK * BLOCK
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    assert found >= 0.99 * wanted
    stats = proxy.prefill.loop.stats().kv_transfer
    assert (stats.prompts, stats.partial_prompts, stats.mismatches) == (5, 0, 0)
    assert proxy.decode.loop.stats().kv_transfer.late_look_ups == 0
    assert proxy.decode.loop.stats().tier_tokens > 0


ROUTES = {
    "/v1/completions": {"prompt": list(range(20, 75)), "max_tokens": 6, "temperature": 0.0, "ignore_eos": True},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "What is a stone, and what is it not? " * 3}],
        "max_completion_tokens": 6,
        "temperature": 0.0,
        "ignore_eos": True,
    },
    "/inference/v1/generate": {
        "token_ids": list(range(90, 140)),
        "sampling_params": {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True},
    },
}


@pytest.mark.parametrize("path", ROUTES)
def test_each_route_hands_its_prompt_on(path: str, proxy: Proxy, alone: Served) -> None:
    answer, expected = proxy.ask(path, ROUTES[path]), post(alone, path, ROUTES[path])
    assert answer["choices"] == expected["choices"]
    details = answer["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == sealed(answer["usage"]["prompt_tokens"])
    assert "kv_transfer_params" not in answer


BODY = ROUTES["/inference/v1/generate"]
PATH = "/inference/v1/generate"


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[ValkeyServer]:
    folder = tmp_path / "server"
    folder.mkdir()
    with ValkeyServer(folder) as server:
        yield server


def tier(valkey: ValkeyServer, *, prefix: str = "kv") -> dict[str, Any]:
    setting = f"valkey={valkey.url},64MiB,timeout_s=300,prefix={prefix}"
    return {"kv_tier": [setting], "kv_transfer": "valkey"}


def ask_decode(decode: Served, left: dict[str, Any], alone: Served) -> int:
    """Checks that the tokens are those of one engine; how many of the prompt's were not computed."""
    answer = post(decode, PATH, {**BODY, "kv_transfer_params": left})
    assert answer["choices"] == post(alone, PATH, BODY)["choices"]
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_the_next_prefill_begins_on_what_decode_has_generated(valkey: ValkeyServer, key: str) -> None:
    with serving(**tier(valkey), kv_key_file=key) as prefill, serving(**tier(valkey), kv_key_file=key) as decode:
        long = {"sampling_params": {**BODY["sampling_params"], "max_tokens": 31}}
        said = Proxy(prefill, decode).ask(PATH, {**BODY, **long})["choices"][0]["token_ids"]
        assert len(said) == 31
        give_up_s = time.monotonic() + 120
        while decode.loop.stats().kv_tiers[0].saved_blocks < 4:  # 50 + 30 tokens are computed, 48 of them elsewhere
            assert time.monotonic() < give_up_s, "what was generated is not saved"
        turn = {**BODY, "token_ids": [*BODY["token_ids"], *said, 7, 8], "kv_transfer_params": Proxy.ASKED}
        assert post(prefill, PATH, turn)["usage"]["prompt_tokens_details"]["cached_tokens"] == 80


def test_a_store_that_dies_costs_a_computation(valkey: ValkeyServer, key: str, alone: Served) -> None:
    with serving(**tier(valkey), kv_key_file=key) as prefill, serving(**tier(valkey), kv_key_file=key) as decode:
        left = Proxy(prefill, decode).ask_prefill(PATH, BODY)
        assert left["openinfer"]["tokens"] == 48
        valkey.kill()
        assert ask_decode(decode, left, alone) == 0
        other = {**BODY, "token_ids": list(range(140, 190))}
        nothing = Proxy(prefill, decode).ask_prefill(PATH, other)
        assert (nothing["openinfer"]["tokens"], nothing["openinfer"]["digest"]) == (0, None)
        assert prefill.loop.stats().kv_transfer.partial_prompts == 1


def test_a_prompt_that_does_not_land_in_time_is_answered_all_the_same(
    valkey: ValkeyServer, key: str, alone: Served
) -> None:
    hasty = {**tier(valkey), "kv_handover_timeout_ms": 1, "kv_load_timeout_ms": 1}
    with serving(**hasty, kv_key_file=key) as prefill, serving(**tier(valkey), kv_key_file=key) as decode:
        os.kill(valkey.pid, signal.SIGSTOP)  # it accepts everything and answers nothing
        try:
            left = Proxy(prefill, decode).ask_prefill(PATH, BODY)
        finally:
            os.kill(valkey.pid, signal.SIGCONT)
        assert left["openinfer"]["tokens"] == 0
        ask_decode(decode, left, alone)


def test_requests_that_wait_for_a_store_are_bounded_and_can_be_aborted(valkey: ValkeyServer, key: str) -> None:
    loop = loop_of(**tier(valkey), kv_key_file=key, max_waiting=1)
    requests = [
        GenerateRequest(
            request_id=RequestId(number),
            prompt_token_ids=tuple(range(20, 60)),
            sampling=SamplingParams(max_tokens=1),
            transfer={"do_remote_prefill": True},
        )
        for number in (1, 2)
    ]
    os.kill(valkey.pid, signal.SIGSTOP)
    try:
        assert loop.submit(requests[0]) == []
        assert (loop.busy, loop.stats().waiting) == (True, 1)
        (refused,) = loop.submit(requests[1])
        assert isinstance(refused, Failed)
        assert refused.kind is FailureKind.OVERLOADED
        assert loop.reconcile({RequestId(1)}) == []  # it is not lost
        (ended,) = loop.abort(RequestId(1))
        assert isinstance(ended, Finished)
        assert ended.reason is FinishReason.ABORT
        assert not loop.busy
    finally:
        os.kill(valkey.pid, signal.SIGCONT)
        loop.close()


def test_blocks_of_another_layout_are_computed(valkey: ValkeyServer, key: str, alone: Served) -> None:
    one = {**tier(valkey, prefix="one"), "kv_key_file": key}
    two = {**tier(valkey, prefix="two"), "kv_key_file": key, "tensor_parallel_size": 2}
    two["kv_tier"] = [f"{two['kv_tier'][0]}-{{rank}}"]
    with serving(**one) as prefill, serving(**two) as decode:
        left = Proxy(prefill, decode).ask_prefill(PATH, BODY)
        assert left["openinfer"]["tokens"] == 48
        answer = post(decode, PATH, {**BODY, "kv_transfer_params": left})
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert decode.loop.stats().kv_transfer.mismatches == 1
        with serving(tensor_parallel_size=2) as one_engine:
            assert answer["choices"] == post(one_engine, PATH, BODY)["choices"]


def test_engines_of_unequal_layouts_cannot_open_one_place(valkey: ValkeyServer, key: str) -> None:
    with serving(**tier(valkey), kv_key_file=key), pytest.raises(Refused, match="layout"):
        loop_of(**tier(valkey), kv_key_file=key, tensor_parallel_size=2)


@pytest.mark.parametrize("host", ["thread", "process"])
def test_blocks_are_stored_when_all_ranks_have_theirs(valkey: ValkeyServer, key: str, host: str) -> None:
    two = {**tier(valkey), "kv_key_file": key, "tensor_parallel_size": 2, "rank_host": host}
    two["kv_tier"] = [f"{two['kv_tier'][0]}-{{rank}}"]
    with serving(**two) as prefill, serving(**two) as decode:
        proxy = Proxy(prefill, decode)
        answer = proxy.ask(PATH, BODY)
        assert proxy.left["openinfer"]["tokens"] == 48
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
        assert decode.loop.stats().tier_tokens == 48
    with serving(tensor_parallel_size=2) as one_engine:
        assert answer["choices"] == post(one_engine, PATH, BODY)["choices"]


def test_a_prefill_engine_that_is_killed_costs_a_computation(valkey: ValkeyServer, key: str, alone: Served) -> None:
    options = {**SHAPE, **tier(valkey), "kv_key_file": key}
    flags = ["--model", "tiny", *(word for name, value in options.items() for word in _flag(name, value))]
    with serving(**tier(valkey), kv_key_file=key) as decode, served(flags) as prefill:
        address = (prefill.host, prefill.port)
        os.kill(valkey.pid, signal.SIGSTOP)  # so that the request is open: nothing lands, and nothing is answered
        try:
            failures: list[Exception] = []
            asking = threading.Thread(target=ask_until_killed, args=(address, failures))
            asking.start()
            give_up_s = time.monotonic() + 120
            while "openinfer_requests_open 1" not in metrics_of(address):
                assert time.monotonic() < give_up_s, "the request does not begin"
            os.kill(prefill.pid, signal.SIGKILL)
            asking.join(60)
        finally:
            os.kill(valkey.pid, signal.SIGCONT)
        assert failures  # what a proxy sees; it asks the decode engine for all
        for left in ({}, {"do_remote_prefill": True}):
            ask_decode(decode, left, alone)


def _flag(name: str, value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [word for each in values for word in (f"--{name.replace('_', '-')}", str(each).replace("True", "true"))]


def ask_until_killed(address: tuple[str, int], failures: list[Exception]) -> None:
    body = {**BODY, "kv_transfer_params": Proxy.ASKED}
    connection = http.client.HTTPConnection(*address, timeout=120)
    try:
        connection.request("POST", PATH, json.dumps(body), {"content-type": "application/json"})
        connection.getresponse()
    except (OSError, http.client.HTTPException) as error:
        failures.append(error)
    finally:
        connection.close()


def metrics_of(address: tuple[str, int]) -> str:
    connection = http.client.HTTPConnection(*address, timeout=120)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_transfer": "valkey"}, "must name a tier of kv_tier, and these are: none"),
        ({"kv_transfer": "disk", "kv_tier": ["host=8MiB"]}, "must name a tier of kv_tier, and these are: host"),
        ({"kv_transfer": "host", "kv_tier": ["host=8MiB"]}, "the tier host is this process's alone"),
        ({"kv_transfer": "host", "kv_tier": ["host=8MiB", "disk={folder},8MiB"]}, "no other process can read"),
    ],
)
def test_tiers_that_others_cannot_read_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    tiers = [each.replace("{folder}", str(tmp_path)) for each in options.get("kv_tier", [])]
    with pytest.raises((InvalidRequest, Refused), match=message):
        loop_of(**{**options, "kv_tier": tiers})


@pytest.mark.parametrize(("model", "message"), [("qwen35", "recurrent states"), ("deepseek_v4", "recurrent states")])
def test_models_whose_prefix_is_more_than_blocks_are_refused(model: str, message: str, tmp_path: Path) -> None:
    definition = find_plugin("openinfer.models", model).load().definition
    options = EngineOptions(
        load_format=LoadFormat.DUMMY, kv_tier=[f"disk={tmp_path},8MiB"], kv_transfer="disk", max_model_tokens=128
    )
    with pytest.raises(Refused, match=message):
        resolve(definition, Path(__file__).parent / "fixtures" / model, options)

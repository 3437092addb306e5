"""Models whose layers see windows, in a whole engine: several block tables with KV tiers, restarts and KV events.

Gemma's tiny recorded models: their answers are those of a run without tiers, bit for bit.
"""

import json
import random
import socket
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from openinfer_core import GenerateRequest, Refused, RequestId, SamplingParams, find_plugin
from openinfer_engine import EngineOptions, EnginePlan, LoadFormat, StepLoop, build_loop, resolve
from openinfer_engine.options import DeviceKind
from openinfer_engine.scheduler import TokenBudgetScheduler
from openinfer_engine.testing.answers import Answer, run_alone, run_at_once

DEFINITION: Any = find_plugin("openinfer.models", "gemma").load().definition
FIXTURES = Path(__file__).parents[1] / "examples/openinfer-gemma/tests/fixtures"
BLOCK = 8
SIZES: dict[str, Any] = {
    "block_size_tokens": BLOCK,
    "max_num_seqs": 4,
    "max_step_tokens": 64,
    "max_model_tokens": 320,
    "batch_invariant": True,
}


@pytest.fixture(scope="module", params=["gemma2", "gemma3"])
def model_dir(request: pytest.FixtureRequest) -> Path:
    """Two tables, and seven."""
    return FIXTURES / request.param


def composed(model_dir: Path, *, contexts: int = 2, **options: Any) -> EnginePlan:
    """An engine, not loaded, whose pool holds so many contexts of full length."""
    fields: dict[str, Any] = {**SIZES, **options}
    layout = resolve(DEFINITION, model_dir, EngineOptions(**fields)).layouts[0]
    assert layout.num_tables > 1
    num_blocks = contexts * layout.blocks_for_context(fields["max_model_tokens"])
    return resolve(DEFINITION, model_dir, EngineOptions(num_blocks=num_blocks, **fields))


@contextmanager
def running(model_dir: Path, **options: Any) -> Generator[StepLoop]:
    loop = build_loop(composed(model_dir, **options))
    try:
        yield loop
    finally:
        loop.close()


def requests(seed: int, count: int = 24) -> list[GenerateRequest]:
    """Conversations that go on: prompts begin with what earlier ones had, and are much longer than the windows."""
    draw = random.Random(seed)
    threads = [[draw.randrange(100) for _ in range(draw.randint(30, 90))] for _ in range(5)]
    made: list[GenerateRequest] = []
    for request_id in range(count):
        thread = draw.choice(threads)
        thread += [draw.randrange(100) for _ in range(draw.randint(1, 20))]
        sampling = SamplingParams(max_tokens=draw.randint(1, 12), temperature=draw.choice((0.0, 1.0)), seed=request_id)
        made.append(
            GenerateRequest(request_id=RequestId(request_id), prompt_token_ids=tuple(thread[:260]), sampling=sampling)
        )
    return made


def serve(loop: StepLoop, asked: Sequence[GenerateRequest]) -> dict[int, list[int]]:
    """Tokens of each request; a few at a time."""
    said: dict[int, Answer] = {}
    for begin in range(0, len(asked), 6):
        said |= run_at_once(loop, asked[begin : begin + 6])
    return {request_id: answer.token_ids for request_id, answer in said.items()}


@pytest.fixture(scope="module")
def without_tiers(model_dir: Path) -> dict[int, list[int]]:
    with running(model_dir) as loop:
        return serve(loop, requests(0))


def test_a_scheduler_that_frees_no_windows_keeps_one_table_and_gives_the_same_tokens(
    model_dir: Path,
    without_tiers: dict[int, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    declared = msgspec.structs.replace(TokenBudgetScheduler.capabilities, frees_windows=False)
    monkeypatch.setattr(TokenBudgetScheduler, "capabilities", declared)
    planned = resolve(DEFINITION, model_dir, EngineOptions(num_blocks=200, **SIZES))
    assert planned.scheduler_config.table_windows == (None,)
    with caplog.at_level("INFO", logger="openinfer.engine"):
        loop = build_loop(planned)
    assert serve(loop, requests(0)) == without_tiers
    loop.close()
    assert "KV: 1 block table, which keeps the KV of all tokens" in caplog.text


def test_tokens_are_the_same_with_a_host_tier_above_a_disk(
    model_dir: Path, without_tiers: dict[int, list[int]], tmp_path: Path
) -> None:
    small = f"host={64 * composed(model_dir).layouts[0].block_bytes >> 10}KiB"
    with running(model_dir, kv_tier=[small, f"disk={tmp_path / 'kv'},64MiB"]) as loop:
        assert serve(loop, requests(0)) == without_tiers
        stats = loop.stats()
    # Which tier a block comes from is a matter of threads here; the next test counts them.
    assert (stats.blocks_used, stats.kv_tier_faults) == (0, 0)


def test_each_tier_gives_back_what_the_pool_no_longer_has(model_dir: Path, tmp_path: Path) -> None:
    """Each request is alone and over when its transfers are, saves into both tiers too: no thread races another."""
    draw = random.Random(0)
    prompts = [tuple(draw.randrange(100) for _ in range(120)) for _ in range(12)]
    # Back from the last one: the pool has what is newest, the host tier what is a little older, the disk all.
    asked = [
        GenerateRequest(
            request_id=RequestId(request_id),
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=4, temperature=0.0),
        )
        for request_id, prompt in enumerate([*prompts, *reversed(prompts)])
    ]
    with running(model_dir, contexts=4) as loop:
        said = run_alone(loop, asked)
    plan = composed(model_dir, contexts=4)
    host = f"host={3 * plan.scheduler_config.num_blocks // 2 * plan.layouts[0].block_bytes >> 10}KiB"
    setting = f"stack={host};disk={tmp_path / 'kv'},64MiB;write=through"
    with running(model_dir, contexts=4, kv_tier=[setting], kv_load_timeout_ms=60_000) as loop:
        loaded: list[tuple[int, ...]] = []
        for request in asked:
            (answer,) = run_at_once(loop, [request]).values()
            assert answer.token_ids == said[request.request_id].token_ids
            loaded.append(tuple(tier.loaded_blocks for tier in loop.stats().kv_tiers))
        stats = loop.stats()
    assert loaded[len(prompts)] == (0, 0)
    assert any(from_host > from_disk == 0 for from_host, from_disk in loaded)
    assert loaded[-1][1] > 0
    assert stats.tier_tokens > 0
    assert (stats.blocks_used, stats.kv_tier_faults) == (0, 0)


@pytest.fixture(scope="module")
def of_two_ranks(model_dir: Path) -> dict[int, list[int]]:
    with running(model_dir, tensor_parallel_size=2) as loop:
        return serve(loop, requests(0, 12))


@pytest.mark.parametrize(
    ("model_dir", "rank_host"),
    [("gemma2", "thread"), ("gemma3", "thread"), ("gemma3", "process")],
    indirect=["model_dir"],
)
def test_tokens_of_ranks_are_the_same_with_tiers(
    model_dir: Path, of_two_ranks: dict[int, list[int]], rank_host: str, tmp_path: Path
) -> None:
    """Also those behind what the last engine left."""
    setting = f"disk={tmp_path / 'kv'}-{{rank}},64MiB"
    for tiers in (["host=4MiB", setting], [setting]):
        ranks: dict[str, Any] = {"tensor_parallel_size": 2, "rank_host": rank_host}
        with running(model_dir, **ranks, kv_tier=tiers, kv_load_timeout_ms=5000) as loop:
            assert serve(loop, requests(0, 12)) == of_two_ranks
            stats = loop.stats()
        assert stats.blocks_used == 0
    assert stats.tier_tokens > 0


@pytest.mark.gpu
def test_tokens_on_a_gpu_are_the_same_with_tiers(model_dir: Path, tmp_path: Path) -> None:
    """Also those that the next engine says behind prefixes from the disk."""
    gpu: dict[str, Any] = {"device": DeviceKind.CUDA, "block_size_tokens": 16}
    setting = f"disk={tmp_path / 'kv'},256MiB"
    try:
        with running(model_dir, **gpu) as loop:
            said = serve(loop, requests(0))
    except Refused as reason:
        pytest.skip(str(reason))
    for tiers in (["host=64MiB"], ["host=4MiB", setting], [setting]):
        with running(model_dir, **gpu, kv_tier=tiers) as loop:
            assert serve(loop, requests(0)) == said, tiers
            stats = loop.stats()
        assert stats.tier_tokens > 0
        assert (stats.blocks_used, stats.kv_tier_faults) == (0, 0)


def test_the_second_turn_after_a_restart_has_cached_tokens_and_the_same_answer(model_dir: Path, tmp_path: Path) -> None:
    setting = f"disk={tmp_path / 'kv'},64MiB"
    first = GenerateRequest(
        request_id=RequestId(1),
        prompt_token_ids=tuple(range(3, 93)),
        sampling=SamplingParams(max_tokens=30, temperature=0.0),
    )
    with running(model_dir, contexts=4, kv_tier=[setting]) as loop:  # half of the pool may be on its way to the disk
        said = run_at_once(loop, [first])[1]
    history = (*first.prompt_token_ids, *said.token_ids)
    second = msgspec.structs.replace(first, request_id=RequestId(2), prompt_token_ids=(*history, 7, 8, 9))
    with running(model_dir, kv_tier=[setting]) as loop:
        found = run_at_once(loop, [second])[2]
        assert loop.stats().tier_tokens == found.cached_tokens
    assert found.cached_tokens == (len(history) - 1) // BLOCK * BLOCK  # the last sampled token has no KV
    with running(model_dir) as loop:
        right = run_at_once(loop, [second])[2]
    assert right.cached_tokens == 0
    assert (found.token_ids, found.logprobs) == (right.token_ids, right.logprobs)


MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "sliding_window": 20,
    "tie_word_embeddings": False,
}


def test_a_model_whose_layers_all_have_one_window_has_one_table_that_gives_blocks_back(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MISTRAL))
    definition: Any = find_plugin("openinfer.models", "llama").load().definition

    def served(**options: Any) -> tuple[dict[int, list[int]], int]:
        fields: dict[str, Any] = {**SIZES, "load_format": LoadFormat.DUMMY, "num_blocks": 60, **options}
        loop = build_loop(resolve(definition, tmp_path, EngineOptions(**fields)))
        try:
            assert loop.info.composition["kv_tables"] == "1 block table: 1 of layers that see the last 20 tokens"
            return serve(loop, requests(0)), loop.stats().tier_tokens
        finally:
            loop.close()

    said, _ = served()
    disk = f"disk={tmp_path / 'kv'},64MiB"
    assert served(kv_tier=["host=64KiB", disk])[0] == said
    again, tier_tokens = served(kv_tier=[disk])
    assert again == said
    assert tier_tokens > 0


# --- KV events ---------------------------------------------------------------------------------------------------


@pytest.fixture
def ask() -> Generator[Callable[[int], list[Any]]]:
    """Makes a function that asks a port for all events so far."""
    with zmq.Context() as context:

        def replayed(port: int) -> list[Any]:
            with context.socket(zmq.DEALER) as dealer:
                dealer.setsockopt(zmq.RCVTIMEO, 30_000)
                dealer.connect(f"tcp://127.0.0.1:{port}")
                dealer.send_multipart((b"", bytes(8)))
                events: list[Any] = []
                while (frames := dealer.recv_multipart())[2] != b"\xff" * 8:
                    events += msgspec.msgpack.decode(frames[3])[1]
                return events

        yield replayed


class Router:
    """What a router that only listens knows: the blocks of each table, and how far each table looks back."""

    def __init__(self, events: Sequence[Any]) -> None:
        self.known: dict[int, dict[tuple[int | None, tuple[int, ...]], int]] = {}
        self.windows: dict[int, int | None] = {}
        for name, *fields in events:
            match name:
                case "BlockStored":
                    self._store(*fields)
                case "BlockRemoved":
                    table = self.known[fields[2]]
                    gone = {*fields[0]}
                    self.known[fields[2]] = {key: each for key, each in table.items() if each not in gone}
                case _:
                    self.known.clear()

    def _store(self, hashes: list[int], parent: int | None, tokens: list[int], size: int, *rest: Any) -> None:
        _, _, _, _, table, kind, window = rest
        assert (kind, window is None) in (("full_attention", True), ("sliding_window", False))
        self.windows[table] = window
        for place, each in enumerate(hashes):
            self.known.setdefault(table, {})[parent, tuple(tokens[place * size : (place + 1) * size])] = each
            parent = each

    def cached_tokens(self, token_ids: Sequence[int]) -> int:
        """How much of a prompt can be used: whole in tables without a window, in others what the next token sees."""
        blocks = [tuple(token_ids[at : at + BLOCK]) for at in range(0, len(token_ids) - BLOCK + 1, BLOCK)]
        parents = self._hashes(blocks)
        for num_blocks in range(len(parents) - 1, 0, -1):
            if all(self._has(table, parents, blocks, num_blocks) for table in self.windows):
                return num_blocks * BLOCK
        return 0

    def _hashes(self, blocks: Sequence[tuple[int, ...]]) -> list[int | None]:
        """Of the blocks before each, and of all: as far as a table without a window has them."""
        found: list[int | None] = [None]
        for block in blocks:
            each = self.known[0].get((found[-1], block))
            if each is None:
                break
            found.append(each)
        return found

    def _has(
        self, table: int, parents: Sequence[int | None], blocks: Sequence[tuple[int, ...]], num_blocks: int
    ) -> bool:
        window = self.windows[table]
        first = 0 if window is None else max(0, num_blocks * BLOCK - window + 1) // BLOCK
        return all((parents[index], blocks[index]) in self.known[table] for index in range(first, num_blocks))


def test_a_router_that_only_listens_knows_what_is_cached_in_each_table(
    model_dir: Path, ask: Callable[[int], list[Any]]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [each.getsockname()[1] for each in (one, other)]
    with running(model_dir, contexts=1, kv_events=f"{ports[0]},replay={ports[1]}") as loop:
        asked = requests(3, 10)
        serve(loop, asked)
        seen = 0
        for number, request in enumerate(asked, 100):
            router = Router(settled(ask, ports[1], loop))
            again = msgspec.structs.replace(request, request_id=RequestId(number))
            expected = router.cached_tokens(request.prompt_token_ids[:-1])
            assert run_at_once(loop, [again])[number].cached_tokens == expected
            seen += expected
        events = ask(ports[1])
    assert seen > 0
    assert {event[3] for event in events if event[0] == "BlockRemoved"} == set(router.windows)


def settled(ask: Callable[[int], list[Any]], port: int, loop: StepLoop) -> list[Any]:
    """All events, once those of the last step are there: the publisher's thread is not waited for by a step."""
    assert not loop.busy
    give_up_s = time.monotonic() + 30
    before = ask(port)
    while (events := ask(port)) != before or not events:
        assert time.monotonic() < give_up_s
        before = events
    return events

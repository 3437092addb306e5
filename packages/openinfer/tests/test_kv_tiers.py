"""KV tiers in a whole engine: the same tokens with them and without, whatever goes wrong in them; restarts; metrics.

For a model with a trained toy checkpoint, and for two with recurrent states and random weights.
"""

import random
import time
from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import httpx
import pytest

from openinfer_bench.served import served
from openinfer_core import GenerateRequest, InvalidRequest, Plugin, Refused, RequestId, SamplingParams, find_plugin
from openinfer_core.control import FlushCache
from openinfer_core.events import Finished, Tokens
from openinfer_engine import EngineOptions, EnginePlan, LoadFormat, StepLoop, build_loop, resolve
from openinfer_engine.data_parallel.loop import DataParallelLoop
from openinfer_engine.kv_tiers import ChosenTiers
from openinfer_engine.launch import build_engine_loop
from openinfer_engine.options import DeviceKind
from openinfer_engine.testing.answers import run_alone, run_at_once
from openinfer_kv_cache import KvLayout, KvTier
from openinfer_kv_cache.testing.tier_faults import FaultInjector, InjectedFault
from openinfer_kv_cache.tiers import KV_TIERS
from openinfer_kv_offload import HostTier, HostTierOptions, QueueOptions, open_tiers

FAULTS = FaultInjector()
POOL: dict[str, Any] = {
    "num_blocks": 24,
    "max_num_seqs": 4,
    "max_step_tokens": 64,
    "max_model_tokens": 320,
    "batch_invariant": True,
}
NUM_REQUESTS = 40
FIXTURES = Path(__file__).parent / "fixtures"
WITH_STATES = ("qwen35", "deepseek_v4")
"""Models with recurrent states; the second has blocks of several kinds of rows, too."""


def open_faulty(layout: KvLayout, setting: str) -> KvTier:
    """A host tier whose medium has the faults of `FAULTS`."""
    options = HostTierOptions(capacity_bytes=int(setting), queue=QueueOptions(breaker_cooldown_s=0.05))
    return HostTier(layout, options, wrap_medium=FAULTS.wrap)


def composed(model: str = "qwen3", **options: Any) -> EnginePlan:
    """A model's engine, not loaded; of one with states, room for three copies of them."""
    definition = find_plugin("openinfer.models", model).load().definition
    if model not in WITH_STATES:
        model_dir = find_plugin("openinfer.checkpoints", "tiny").load()()
        return resolve(definition, model_dir, EngineOptions(**{**POOL, **options}))
    given: dict[str, Any] = {**POOL, "load_format": LoadFormat.DUMMY, **options}
    slot_bytes = resolve(definition, FIXTURES / model, EngineOptions(**given)).worker_limits.slot_bytes
    return resolve(definition, FIXTURES / model, EngineOptions(state_snapshot_bytes=3 * slot_bytes, **given))


@contextmanager
def running(*, model: str = "qwen3", plugin: ChosenTiers | None = None, **options: Any) -> Generator[StepLoop]:
    """`plugin` stands in for the tiers that `kv_tier` names."""
    composition = composed(model, **options)
    loop = build_loop(composition if plugin is None else replace(composition, tiers=plugin))
    try:
        yield loop
    finally:
        loop.close()


def faulty_tier(capacity_bytes: int) -> ChosenTiers:
    plugin = Plugin(KV_TIERS, "faulty", _Ours("faulty", "openinfer_kv_offload.settings:open_faulty", KV_TIERS))
    return ChosenTiers(
        settings=("faulty",), plugins=(plugin,), opener=plugin, opener_setting=str(capacity_bytes), key_file=None
    )


class _Ours(EntryPoint):
    """An entry point of this file, which no distribution names."""

    def load(self) -> Any:
        return open_faulty


def traffic(seed: int) -> list[GenerateRequest]:
    """Conversations that go on: prompts begin with what earlier ones had."""
    draw = random.Random(seed)
    threads = [[draw.randrange(256) for _ in range(draw.randint(30, 90))] for _ in range(6)]
    requests: list[GenerateRequest] = []
    for request_id in range(NUM_REQUESTS):
        thread = draw.choice(threads)
        thread += [draw.randrange(256) for _ in range(draw.randint(1, 20))]
        del thread[220:]
        sampling = SamplingParams(max_tokens=draw.randint(1, 12), temperature=draw.choice((0.0, 1.0)), seed=request_id)
        requests.append(
            GenerateRequest(request_id=RequestId(request_id), prompt_token_ids=tuple(thread), sampling=sampling)
        )
    return requests


def requests_to(model: str) -> list[GenerateRequest]:
    """Fewer where a step takes longer."""
    return traffic(0)[: 24 if model in WITH_STATES else NUM_REQUESTS]


def serve(
    loop: StepLoop,
    requests: Sequence[GenerateRequest],
    *,
    faults: Sequence[InjectedFault] = (),
    fault_rate: float = 0.3,
) -> dict[int, Any]:
    """Tokens of each request; a few are submitted in every step, and something goes wrong in some."""
    draw = random.Random(1)
    left = list(requests)
    said: dict[int, list[int]] = defaultdict(list)
    while left or loop.busy:
        for _ in range(draw.randint(0, 2)):
            if left:
                loop.submit(left.pop(0))
        if faults and draw.random() < fault_rate:
            FAULTS.on_next_reads(draw.choice(faults))
            FAULTS.on_next_writes(draw.choice(faults))
        for event in loop.step() if loop.busy else ():
            if isinstance(event, Tokens):
                said[int(event.request_id)] += event.token_ids
            elif isinstance(event, Finished):
                said[int(event.request_id)].append(-1)
    return said


@pytest.fixture(scope="module", params=["qwen3", *WITH_STATES])
def model(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def without_tiers(model: str) -> dict[int, Any]:
    with running(model=model) as loop:
        said = serve(loop, requests_to(model))
    assert all(tokens[-1] == -1 for tokens in said.values())
    return said


def test_tokens_are_the_same_with_a_host_tier_above_a_disk(
    model: str, without_tiers: dict[int, Any], tmp_path: Path
) -> None:
    layout = composed(model).layouts[0]
    small = f"host={32 * layout.block_bytes + 6 * layout.slot_bytes >> 10}KiB"
    with running(model=model, kv_tier=[small, f"disk={tmp_path / 'kv'},64MiB"]) as loop:
        assert serve(loop, requests_to(model)) == without_tiers
        stats = loop.stats()
    # Which tier a block comes from is a matter of threads here; the next test counts them.
    assert stats.blocks_used == 0
    assert [tier.tier for tier in stats.kv_tiers] == ["host", "disk"]
    assert stats.kv_tier_faults == 0


def test_each_tier_gives_back_what_the_pool_no_longer_has(model: str, tmp_path: Path) -> None:
    """Each request is alone and over when its transfers are, saves into both tiers too: no thread races another."""
    draw = random.Random(0)
    prompts = [tuple(draw.randrange(256) for _ in range(160)) for _ in range(5)]
    asked = [
        GenerateRequest(
            request_id=RequestId(request_id),
            prompt_token_ids=prompts[place],
            sampling=SamplingParams(max_tokens=4, temperature=0.0),
        )
        # The pool has room for two of them and the host tier for three: the third comes back from there, the first
        # from the disk.
        for request_id, place in enumerate((0, 1, 2, 3, 4, 2, 0))
    ]
    with running(model=model) as loop:
        said = run_alone(loop, asked)
    layout = composed(model).layouts[0]
    host = f"host={32 * layout.block_bytes + 3 * layout.slot_bytes >> 10}KiB"
    setting = f"stack={host};disk={tmp_path / 'kv'},64MiB;write=through"
    with running(model=model, kv_tier=[setting], kv_load_timeout_ms=60_000) as loop:
        loaded: list[tuple[int, ...]] = []
        for request in asked:
            (answer,) = run_at_once(loop, [request]).values()
            assert answer.token_ids == said[int(request.request_id)].token_ids
            loaded.append(tuple(tier.loaded_blocks for tier in loop.stats().kv_tiers))
        stats = loop.stats()
    *cold, third, first = loaded
    assert cold == [(0, 0)] * 5
    assert third[0] > third[1] == 0
    assert first[1] > 0
    assert stats.tier_tokens > 0
    assert (stats.blocks_used, stats.kv_tier_faults) == (0, 0)


@pytest.mark.parametrize("rank_host", ["thread", "process"])
def test_each_data_parallel_rank_has_tiers_of_its_own(rank_host: str) -> None:
    """Six prompts over two ranks, whose pools hold two each: the first of each rank comes back from its own tier."""
    draw = random.Random(0)
    prompts = [tuple(draw.randrange(100) for _ in range(160)) for _ in range(6)]
    asked = [
        GenerateRequest(
            request_id=RequestId(request_id),
            prompt_token_ids=prompts[place],
            sampling=SamplingParams(max_tokens=4, temperature=0.0),
        )
        for request_id, place in enumerate((0, 1, 2, 3, 4, 5, 0, 1))
    ]
    definition = find_plugin("openinfer.models", "deepseek_v2").load().definition
    options: dict[str, Any] = {**POOL, "load_format": LoadFormat.DUMMY, "data_parallel_size": 2}
    options["rank_host"] = rank_host

    def ask(**tiers: Any) -> tuple[list[list[int]], list[tuple[int, ...]]]:
        loop = build_engine_loop(resolve(definition, FIXTURES / "deepseek_v2", EngineOptions(**options, **tiers)))
        assert isinstance(loop, DataParallelLoop)
        try:
            answers = [run_at_once(loop, [request])[request.request_id].token_ids for request in asked]
            loaded = [tuple(tier.loaded_blocks for tier in each.stats().kv_tiers) for each in loop.loops]
            assert (loop.stats().blocks_used, loop.stats().kv_tier_faults) == (0, 0)
            assert len(loop.stats().kv_tiers) == len(tiers.get("kv_tier", ()))
            return answers, loaded
        finally:
            loop.close()

    without, _ = ask()
    said, loaded = ask(kv_tier=["host=4MiB"], kv_load_timeout_ms=60_000)
    assert said == without
    assert all(blocks > 0 for rank in loaded for blocks in rank), loaded


@pytest.mark.parametrize("rank_host", ["thread", "process"])
@pytest.mark.parametrize("tiers", [["disk"], ["host", "disk"]])
def test_each_data_parallel_rank_finds_what_an_earlier_engine_left_on_its_disk(
    rank_host: str, tiers: Sequence[str], tmp_path: Path
) -> None:
    """A request goes to the rank whose disk has its prefix, with that of the other one's the first to come."""
    draw = random.Random(1)
    prompts = [tuple(draw.randrange(100) for _ in range(160)) for _ in range(4)]
    settings = {"disk": f"disk={tmp_path / 'kv'}-{{rank}},64MiB", "host": "host=4MiB"}
    options: dict[str, Any] = {**POOL, "load_format": LoadFormat.DUMMY, "data_parallel_size": 2}
    options |= {"kv_tier": [settings[each] for each in tiers], "kv_load_timeout_ms": 60_000, "rank_host": rank_host}
    definition = find_plugin("openinfer.models", "deepseek_v2").load().definition

    def ask(order: Sequence[int]) -> tuple[dict[int, list[int]], list[int], list[int]]:
        """Tokens by prompt, the rank that said them, and how many tokens each rank had from its tiers."""
        loop = build_engine_loop(resolve(definition, FIXTURES / "deepseek_v2", EngineOptions(**options)))
        assert isinstance(loop, DataParallelLoop)
        said, ranks = dict[int, list[int]](), [0] * len(prompts)
        try:
            for place in order:
                asked = GenerateRequest(
                    request_id=RequestId(place),
                    prompt_token_ids=prompts[place],
                    sampling=SamplingParams(max_tokens=4, temperature=0.0),
                )
                before = loop.loops[1].stats().steps
                said[place] = run_at_once(loop, [asked])[asked.request_id].token_ids
                ranks[place] = int(loop.loops[1].stats().steps > before)
            return said, ranks, [each.stats().tier_tokens for each in loop.loops]
        finally:
            loop.close()

    said, ranks, loaded = ask(range(4))
    assert (sorted(ranks), loaded) == ([0, 0, 1, 1], [0, 0])
    again, ranks_again, loaded = ask([3, 2, 1, 0])
    assert (again, ranks_again) == (said, ranks)
    assert loaded == [2 * 144, 2 * 144]  # a prompt's last block is computed


@pytest.mark.parametrize("rank_host", ["thread", "process"])
def test_each_data_parallel_rank_finds_what_another_engine_stores_meanwhile(rank_host: str, tmp_path: Path) -> None:
    """The ranks read the folder that the other engine writes to."""
    draw = random.Random(2)
    asked = [
        GenerateRequest(
            request_id=RequestId(number),
            prompt_token_ids=tuple(draw.randrange(100) for _ in range(160)),
            sampling=SamplingParams(max_tokens=4, temperature=0.0),
        )
        for number in range(2)
    ]
    definition = find_plugin("openinfer.models", "deepseek_v2").load().definition
    given: dict[str, Any] = {**POOL, "load_format": LoadFormat.DUMMY, "kv_load_timeout_ms": 60_000}
    disk = f"disk={tmp_path / 'kv'},64MiB"

    def start(**options: Any) -> Any:
        return build_engine_loop(resolve(definition, FIXTURES / "deepseek_v2", EngineOptions(**given, **options)))

    with (
        closing(start(kv_tier=[disk])) as writer,
        closing(
            start(kv_tier=[f"{disk},access=read,refresh_s=0.05"], data_parallel_size=2, rank_host=rank_host)
        ) as ranks,
    ):
        said = run_at_once(writer, asked)
        deadline_s, again = time.monotonic() + 60, dict[int, Any]()
        # What is missed lets the tiers look for news, which the next request may find.
        while not all(each.stats().tier_tokens for each in ranks.loops):
            assert time.monotonic() < deadline_s
            ranks.control(FlushCache())
            again = run_at_once(ranks, asked)
    assert {number: answer.token_ids for number, answer in again.items()} == {
        number: answer.token_ids for number, answer in said.items()
    }


def test_tokens_are_the_same_while_everything_goes_wrong(model: str, without_tiers: dict[int, Any]) -> None:
    with running(model=model, kv_tier=["host=1MiB"], plugin=faulty_tier(16 << 20), kv_load_timeout_ms=50) as loop:
        said = serve(loop, requests_to(model), faults=tuple(InjectedFault))
        stats = loop.stats()
    FAULTS.clear()
    assert said == without_tiers
    (tier,) = stats.kv_tiers
    assert sum(tier.failures.values()) > 0
    assert stats.blocks_used == 0


@pytest.mark.parametrize("model", ["qwen3", "qwen35"])
@pytest.mark.parametrize("rank_host", ["thread", "process"])
def test_tokens_of_ranks_are_the_same_with_tiers(model: str, rank_host: str, tmp_path: Path) -> None:
    """Each rank has a share of every block and state, in tiers of its own; also behind what the last engine left."""
    ranks: dict[str, Any] = {"model": model, "tensor_parallel_size": 2, "rank_host": rank_host}
    with running(**ranks) as loop:
        said = serve(loop, traffic(0)[:20])
    setting = f"disk={tmp_path / 'kv'}-{{rank}},64MiB"
    for tiers in (["host=4MiB", setting], [setting]):
        with running(**ranks, kv_tier=tiers, kv_load_timeout_ms=5000) as loop:
            assert serve(loop, traffic(0)[:20]) == said, tiers
            stats = loop.stats()
        assert stats.blocks_used == 0
    assert stats.tier_tokens > 0  # of what was there before the first step; what came meanwhile is a matter of threads
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kv-0", "kv-1"]


@pytest.mark.parametrize("model", ["qwen3", "qwen35"])
def test_tokens_of_ranks_are_the_same_while_everything_goes_wrong(model: str) -> None:
    ranks: dict[str, Any] = {"model": model, "tensor_parallel_size": 2}
    with running(**ranks) as loop:
        said = serve(loop, traffic(0)[:20])
    with running(**ranks, plugin=faulty_tier(16 << 20), kv_tier=["host=1MiB"], kv_load_timeout_ms=200) as loop:
        assert serve(loop, traffic(0)[:20], faults=tuple(InjectedFault), fault_rate=0.03) == said
        stats = loop.stats()
    FAULTS.clear()
    (tier,) = stats.kv_tiers
    assert sum(tier.failures.values()) > 0
    assert stats.blocks_used == 0


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_on_gpus_are_the_same_with_tiers(model: str, ranks: int, tmp_path: Path) -> None:
    """Also those that the next engine says behind prefixes from the disk."""
    options: dict[str, Any] = {"model": model, "device": DeviceKind.CUDA, "tensor_parallel_size": ranks}
    setting = f"disk={tmp_path / 'kv'}-{{rank}},256MiB"
    try:
        with running(**options) as loop:
            said = serve(loop, traffic(0))
    except Refused as reason:
        pytest.skip(str(reason))
    for tiers in (["host=64MiB"], ["host=4MiB", setting], [setting]):
        with running(**options, kv_tier=tiers) as loop:
            assert serve(loop, traffic(0)) == said, tiers
            stats = loop.stats()
        assert stats.tier_tokens > 0
        assert stats.blocks_used == 0
        assert stats.kv_tier_faults == 0
        assert sum(tier.corrupt_blocks for tier in stats.kv_tiers) == 0


def test_disk_tier_is_found_again_by_the_next_engine_and_not_with_another_salt(model: str, tmp_path: Path) -> None:
    setting = f"disk={tmp_path / 'kv'},64MiB"
    request = traffic(0)[-1]
    salted = GenerateRequest(
        request_id=RequestId(1000),
        prompt_token_ids=request.prompt_token_ids,
        sampling=request.sampling,
        cache_salt="another tenant",
    )
    with running(model=model, kv_tier=[setting]) as loop:
        first = serve(loop, [request])
        assert loop.stats().tier_tokens == 0
    with running(model=model, kv_tier=[setting]) as loop:
        assert serve(loop, [salted])[1000] == first[int(request.request_id)]
        assert loop.stats().tier_tokens == 0
        assert serve(loop, [request]) == first
        assert loop.stats().tier_tokens == loop.stats().cached_tokens > 0
    key = tmp_path / "other.key"
    key.write_bytes(bytes(32))
    with running(model=model, kv_tier=[setting], kv_key_file=str(key)) as loop:
        assert serve(loop, [request]) == first
        assert loop.stats().tier_tokens == 0


def test_what_waits_is_brought_from_disk_into_memory_before_its_turn(model: str, tmp_path: Path) -> None:
    tiers = ["host=64MiB", f"disk={tmp_path / 'kv'},64MiB"]
    request = GenerateRequest(
        request_id=RequestId(0),
        prompt_token_ids=tuple(range(200)),
        sampling=SamplingParams(max_tokens=4, temperature=0.0),
    )
    longest = GenerateRequest(
        request_id=RequestId(1), prompt_token_ids=tuple(range(50, 220)), sampling=SamplingParams(max_tokens=140)
    )
    with running(model=model, kv_tier=tiers[1:]) as loop:
        first = serve(loop, [request])
    with running(model=model, kv_tier=tiers) as loop:
        loop.submit(longest)  # holds most of the pool
        loop.step()
        loop.submit(request)
        for _ in range(100):
            loop.step()
            if loop.stats().prefetched_blocks:
                break
            time.sleep(0.3)  # the tiers' threads are busy: nothing goes on meanwhile
        stats = loop.stats()
        assert (stats.waiting, stats.tier_tokens) == (1, 0)
        assert 0 < stats.prefetched_blocks <= 200 // 16
        assert serve(loop, [])[0] == first[0]
        host, disk = loop.stats().kv_tiers
        assert host.loaded_blocks >= stats.prefetched_blocks
        assert loop.stats().tier_tokens > 0
        assert disk.loaded_blocks > 0


def conversations_in_turn(loop: StepLoop) -> tuple[list[list[int]], list[int]]:
    """Answers to four conversations of five turns each, one after the other, and cached tokens of the turns."""
    draw = random.Random(0)
    ids = [[draw.randrange(256) for _ in range(100)] for _ in range(4)]
    said: list[list[int]] = []
    cached: list[int] = []
    for turn in range(20):
        mine = ids[turn % 4]
        before = loop.stats().tier_tokens
        request = GenerateRequest(
            request_id=RequestId(turn),
            prompt_token_ids=tuple(mine),
            sampling=SamplingParams(max_tokens=6, temperature=0.0),
        )
        *answer, _ = serve(loop, [request])[turn]  # all transfers have ended, too
        said.append(answer)
        cached.append(loop.stats().tier_tokens - before)
        mine += [*answer, *(draw.randrange(256) for _ in range(10))]
    return said, cached


@pytest.mark.parametrize("model", ["qwen3", "qwen35"])
def test_conversations_that_take_turns_are_loaded_before_their_turns(model: str) -> None:
    """A pool for two of four: without, each turn loads what it needs; with, it is there. Tokens are the same."""
    with running(model=model, num_blocks=28, kv_tier=["host=16MiB"], kv_load_timeout_ms=60_000) as loop:
        said, loaded = conversations_in_turn(loop)
    early = ["early-loads=true"]
    with running(
        model=model, num_blocks=28, kv_tier=["host=16MiB"], kv_load_timeout_ms=60_000, scheduler_option=early
    ) as loop:
        assert conversations_in_turn(loop)[0] == said
        stats = loop.stats()
    assert stats.early_blocks > 30
    assert stats.early_unused_blocks < stats.early_blocks / 2
    if model not in WITH_STATES:  # the states of which come on demand, and what is before them counts with them
        assert stats.tier_tokens < sum(loaded) / 2


def test_folder_of_other_weights_is_refused(tmp_path: Path) -> None:
    setting = f"disk={tmp_path / 'kv'},64MiB"
    with running(kv_tier=[setting]):
        pass
    with pytest.raises(Refused, match="model_tag"), running(kv_tier=[setting], load_format=LoadFormat.DUMMY):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_tier": ["host"]}, "NAME=SETTING"),
        ({"kv_tier": ["host=1MiB"], "prefix_cache": False}, "prefix_cache is false"),
        (
            {"kv_tier": ["disk={folder},1MiB"], "tensor_parallel_size": 2},
            r"write \{rank\} where its number is to stand",
        ),
        ({"kv_key_file": "x"}, "no use without kv_tier or kv_events"),
        ({"kv_tier": ["host=1MiB"], "kv_key_file": "/none"}, "No such file"),
        ({"kv_tier": ["host=1KiB"]}, "one block needs"),
    ],
)
def test_settings_that_cannot_be_served_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    tiers = [setting.replace("{folder}", str(tmp_path)) for setting in options.get("kv_tier", ())]
    with pytest.raises((InvalidRequest, Refused), match=message), running(**{**options, "kv_tier": tiers}):
        pass


def test_port_and_package_open_the_same_stack(tmp_path: Path) -> None:
    with running(kv_tier=["host=1MiB", f"disk={tmp_path},8MiB"]) as loop:
        names = [tier.tier for tier in loop.stats().kv_tiers]
    family = find_plugin("openinfer.models", "qwen3").load()
    layout = resolve(
        family.definition, find_plugin("openinfer.checkpoints", "tiny").load()(), EngineOptions(**POOL)
    ).layouts[0]
    tiers = open_tiers(["host=1MiB", f"disk={tmp_path},8MiB"], layout)
    assert [each.tier for each in tiers.counters()] == names
    tiers.close()


def test_served_over_http_a_second_server_finds_what_the_first_has_saved(tmp_path: Path) -> None:
    text = "In the beginning there was a prompt that all send before a question of their own, and it is long. " * 3
    asked = {"model": "tiny", "prompt": text, "max_tokens": 8, "temperature": 0}
    setting = f"disk={tmp_path / 'kv'},64MiB"
    answers: list[dict[str, Any]] = []
    pages: list[str] = []
    for _ in range(2):
        flags = [
            "--model",
            "tiny",
            "--family",
            "qwen3",
            "--kv-tier",
            "host=8MiB",
            "--kv-tier",
            setting,
            "--block-size-tokens",
            "8",
        ]
        with served(flags) as server:
            url = f"http://{server.host}:{server.port}"
            answers.append(httpx.post(f"{url}/v1/completions", json=asked, timeout=60).json())
            pages.append(httpx.get(f"{url}/metrics", timeout=60).text)
    assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached[0] == 0
    assert cached[1] > 8
    assert f"openinfer_kv_tier_tokens_total {cached[1]}" in pages[1]
    assert f'openinfer_kv_tier_loaded_blocks_total{{tier="disk"}} {cached[1] // 8}' in pages[1]

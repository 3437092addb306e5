"""Models of several KV cache groups, some with sliding windows, whose blocks leave a request as it goes on."""

import random

import pytest

BLOCK = 4
PROMPT = list(range(100, 142))  # ten full blocks and a half
FULL, WINDOW = "FullAttentionSpec", "SlidingWindowSpec"

pytestmark = pytest.mark.parametrize("vllm", ["0.33.0"], indirect=True)
each_model = pytest.mark.parametrize(
    "specs",
    [(FULL, f"{WINDOW}:9"), (f"{WINDOW}:6", f"{WINDOW}:6", FULL), (FULL, FULL, f"{WINDOW}:17"), (FULL, f"{WINDOW}:1")],
    ids=["two", "full-last", "two-full", "own-token-only"],
)


def window_of(spec):
    return int(spec.partition(":")[2])


@each_model
def test_a_prefix_is_loaded_with_the_last_window_of_each_windowed_group(engines, specs):
    engine = engines(specs=specs)
    assert engine.run(engine.request("a", PROMPT), chunk_tokens=7) == 0
    engine.settle()
    before = engine.computed_tokens
    assert engine.run(engine.request("b", PROMPT)) == 40
    assert engine.computed_tokens - before == 2
    num_full = specs.count(FULL)
    windows = [window_of(spec) for spec in specs if spec != FULL]
    expected = [10] * num_full + [-(-(window - 1) // BLOCK) for window in windows]
    assert [engine.pools[0].loaded[table] for table in range(len(specs))] == expected


@each_model
def test_what_vllm_has_itself_is_not_loaded(engines, specs):
    engine = engines(specs=specs)
    engine.run(engine.request("a", PROMPT))
    engine.settle()
    assert engine.run(engine.request("b", PROMPT), local_tokens=36) == 4
    assert engine.pools[0].loaded[0] == 1
    assert engine.run(engine.request("c", PROMPT), local_tokens_at_first=0, local_tokens=32) == 8


@each_model
def test_the_next_turn_finds_what_left_the_windows_and_what_did_not(engines, specs):
    engine = engines(specs=specs)
    engine.run(engine.request("a", PROMPT), new_token_ids=range(200, 221), chunk_tokens=8)
    engine.settle()
    turn = [*PROMPT, *range(200, 221), 300, 301]
    assert engine.run(engine.request("b", turn)) == 60
    engine.settle()
    assert engine.run(engine.request("c", turn[:30])) == 28  # a prefix inside it, whose window had gone


@pytest.fixture
def disk(tmp_path):
    """Settings of a disk tier, and a function that spoils a block there by its first bytes."""
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)

    def spoil(first_bytes):
        segments = {path: path.read_bytes() for path in (tmp_path / "store").glob("segment-*.kv")}
        (segment,) = (path for path, content in segments.items() if first_bytes in content)
        segment.write_bytes(segments[segment].replace(first_bytes, bytes(len(first_bytes))))

    return {"tiers": [f"disk={tmp_path}/store,1MiB"], "digest_key_file": str(key)}, spoil


@each_model
def test_a_block_that_a_tier_has_spoilt_makes_the_request_be_asked_for_anew(engines, specs, disk):
    settings, spoil = disk
    engine = engines(specs=specs, **settings)
    engine.run(engine.request("a", PROMPT))
    engine.settle()
    spoil(engine.block_bytes_of(engine.request("a", PROMPT), 2, group=specs.index(FULL)))
    assert engine.run(engine.request("b", PROMPT)) == 8  # the blocks before it
    engine.settle()
    assert engine.run(engine.request("c", PROMPT)) == 40  # it was computed again, and saved


def test_a_prefix_ends_where_its_window_lacks_a_block(engines, disk):
    settings, spoil = disk
    engine = engines(specs=(FULL, f"{WINDOW}:9"), **settings)
    engine.run(engine.request("a", PROMPT))
    engine.settle()
    spoil(engine.block_bytes_of(engine.request("a", PROMPT), 8, group=1))  # needed with ten blocks and with nine
    assert engine.run(engine.request("b", PROMPT)) == 32


def test_ranks_that_have_found_less_decide_and_a_window_is_looked_for_anew(engines, tmp_path):
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    settings = {
        "specs": (FULL, f"{WINDOW}:6"),
        "ranks": 2,
        "tiers": [f"disk={tmp_path}/rank{{rank}},1MiB"],
        "digest_key_file": str(key),
    }
    engine = engines(**settings)
    engine.run(engine.request("a", PROMPT), chunk_tokens=5)
    engine.settle()
    engine.close()
    for segment in (tmp_path / "rank1").glob("segment-*.kv"):
        segment.unlink()
    again = engines(**settings)
    assert again.run(again.request("c", PROMPT[:22])) == 0
    again.settle()
    assert again.run(again.request("d", PROMPT)) == 20  # rank 0 has ten blocks of it, and held the window at their end


@each_model
def test_a_restart_finds_what_was_on_disk(engines, specs, tmp_path):
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    settings = {"tiers": ["host=1MiB", f"disk={tmp_path}/store,1MiB"], "digest_key_file": str(key)}
    engine = engines(specs=specs, **settings)
    engine.run(engine.request("a", PROMPT), new_token_ids=range(200, 207))
    engine.close()
    again = engines(specs=specs, **settings)
    assert again.run(again.request("b", [*PROMPT, *range(200, 207), 1])) == 48


@each_model
def test_random_traffic_is_never_served_wrong_bytes(engines, damage, specs, tmp_path):
    """Prompts that share beginnings, in a small pool, over a host tier of few blocks and a disk that is damaged."""
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    tiers = ["host=2KiB", f"disk={tmp_path}/store,512KiB"]
    engine = engines(specs=specs, num_blocks=80, tiers=tiers, digest_key_file=str(key), staging_bytes=64 * 30)
    rng = random.Random(8)
    loaded = 0
    for number in range(40):
        length = rng.randrange(1, 50)
        variants = [rng.randrange(2) * 100 for _ in range(7)]
        prompt = [variants[position // 8] + position for position in range(length)]
        local_tokens = rng.choice([0, 0, (length - 1) // BLOCK * BLOCK // 2 // BLOCK * BLOCK])
        loaded += engine.run(
            engine.request(str(number), prompt, salt=rng.choice([None, "salt"])),
            new_token_ids=range(500, 500 + rng.randrange(9)),
            local_tokens=local_tokens,
            chunk_tokens=rng.choice([3, 9, 50]),
        )
        if rng.random() < 0.3:
            engine.settle()
        if rng.random() < 0.1:
            damage(rng, tmp_path / "store")
    assert loaded > 60


def test_blocks_whose_ids_come_a_step_late_are_saved_where_a_window_still_holds_them(vllm):
    connector = vllm.connector("SCHEDULER", tiers=["host=1MiB"], specs=[FULL, f"{WINDOW}:3"])
    request = vllm.given(
        "Request",
        request_id="a",
        all_token_ids=list(range(10)),
        cache_salt=None,
        lora_request=None,
        mm_features=[],
        prompt_embeds=None,
    )
    connector.get_num_new_matched_tokens(request, 0)
    new = vllm.given("NewRequestData", req_id="a", block_ids=([1, 2, 3, 4], [5, 6, 7, 8]), num_computed_tokens=0)
    nothing = {"req_ids": [], "resumed_req_ids": set(), "new_block_ids": [], "num_computed_tokens": []}
    assert saves_of(vllm, connector, new=[new], cached=nothing, scheduled=16) == [(0, [1, 2]), (1, [5, 6])]
    request.all_token_ids.extend(range(10, 17))
    running = {"req_ids": ["a"], "resumed_req_ids": set(), "new_block_ids": [None], "num_computed_tokens": [16]}
    assert saves_of(vllm, connector, new=[], cached=running, scheduled=1) == [(0, [3, 4]), (1, [8])]


def saves_of(vllm, connector, *, new, cached, scheduled):
    output = vllm.given(
        "SchedulerOutput",
        scheduled_new_reqs=new,
        scheduled_cached_reqs=vllm.given("CachedRequestData", **cached),
        num_scheduled_tokens={"a": scheduled},
    )
    return [(save.table, list(save.block_ids)) for save in connector.build_connector_meta(output).saves]

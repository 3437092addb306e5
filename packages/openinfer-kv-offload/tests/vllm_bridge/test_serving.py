"""Requests through both sides of the connector, on tiers of ours; every byte of their KV is compared."""

import random

import pytest

from openinfer_kv_cache import LayoutMismatchError

BLOCK = 4
PROMPT = list(range(100, 118))  # four full blocks and a half


def test_a_prompt_that_comes_again_is_loaded_and_not_computed(engines):
    engine = engines()
    assert engine.run(engine.request("a", PROMPT)) == 0
    engine.settle()
    before = engine.computed_tokens
    assert engine.run(engine.request("b", PROMPT)) == 16
    assert engine.computed_tokens - before == 2


def test_at_least_one_token_is_left_to_compute(engines):
    engine = engines()
    engine.run(engine.request("a", PROMPT[:16]))
    engine.settle()
    assert engine.run(engine.request("b", PROMPT[:16])) == 12


def test_what_was_generated_is_saved_and_found_by_the_next_turn(engines):
    engine = engines()
    engine.run(engine.request("a", PROMPT), new_token_ids=range(200, 207))
    engine.settle()
    turn = [*PROMPT, *range(200, 207), 300, 301]
    assert engine.run(engine.request("b", turn)) == 24


def test_only_what_vllm_has_not_itself_is_loaded(engines):
    engine = engines()
    engine.run(engine.request("a", PROMPT))
    engine.settle()
    assert engine.run(engine.request("b", PROMPT), local_tokens=8) == 8
    assert engine.run(engine.request("c", PROMPT), local_tokens=16) == 0


def test_what_vllm_has_got_since_it_was_asked_is_not_loaded_again(engines):
    engine = engines()
    engine.run(engine.request("a", PROMPT))
    engine.settle()
    assert engine.run(engine.request("b", PROMPT), local_tokens_at_first=0, local_tokens=8) == 8
    assert engine.run(engine.request("c", PROMPT), local_tokens_at_first=8, local_tokens=0) == 0  # it was evicted since


@pytest.mark.parametrize("other", [{"salt": "tenant"}, {"lora": "adapter"}])
def test_salts_and_adapters_never_meet(engines, other):
    engine = engines()
    engine.run(engine.request("a", PROMPT))
    engine.settle()
    assert engine.run(engine.request("b", PROMPT, **other)) == 0
    engine.settle()
    assert engine.run(engine.request("c", PROMPT, **other)) == 16


def test_requests_with_images_are_left_alone(engines):
    engine = engines()
    engine.run(engine.request("a", PROMPT, images=("cat",)))
    engine.settle()
    assert engine.run(engine.request("b", PROMPT, images=("dog",))) == 0
    assert engine.run(engine.request("c", PROMPT)) == 0


def test_each_rank_has_its_part_and_a_block_counts_when_all_have_it(engines, tmp_path):
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    settings = {"ranks": 2, "tiers": [f"disk={tmp_path}/rank{{rank}},1MiB"], "digest_key_file": str(key)}
    engine = engines(**settings)
    engine.run(engine.request("a", PROMPT))
    engine.settle()
    assert engine.run(engine.request("b", PROMPT)) == 16
    engine.close()
    (tmp_path / "rank1" / "segment-00000001.kv").unlink()
    again = engines(**settings)
    assert again.run(again.request("c", PROMPT[:10])) == 0
    again.settle()
    assert again.run(again.request("d", PROMPT)) == 8  # one rank has four blocks of it, the other two


def test_a_restart_finds_what_was_on_disk(engines, tmp_path):
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    settings = {"tiers": ["host=1MiB", f"disk={tmp_path}/store,1MiB"], "digest_key_file": str(key)}
    engine = engines(**settings)
    engine.run(engine.request("a", PROMPT))
    engine.close()  # what was on its way is still saved
    again = engines(num_blocks=16, **settings)  # another number of blocks is no other layout
    assert again.run(again.request("b", PROMPT)) == 16
    again.close()
    with pytest.raises(LayoutMismatchError):
        engines(model_tag="retrained", **settings)


def test_blocks_that_a_tier_has_spoilt_are_computed(engines, tmp_path):
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    settings = {"tiers": [f"disk={tmp_path}/store,1MiB"], "digest_key_file": str(key)}
    engine = engines(**settings)
    engine.run(engine.request("a", PROMPT))
    engine.settle()
    (segment,) = (tmp_path / "store").glob("segment-*.kv")
    content = bytearray(segment.read_bytes())
    content[2 * 4096 + 130] ^= 1  # a byte of the third block
    segment.write_bytes(content)
    assert engine.run(engine.request("b", PROMPT)) == 8
    engine.settle()
    assert engine.run(engine.request("c", PROMPT)) == 16  # it was computed again, and saved


def test_an_aborted_request_gives_its_hit_back(engines):
    engine = engines(tiers=["host=1KiB"])  # of 64 bytes a block: 16 of them
    engine.run(engine.request("a", PROMPT))
    engine.settle()
    gone = engine.request("b", PROMPT)
    assert engine.scheduler.get_num_new_matched_tokens(gone, 0) == (None, False)
    engine.step()
    assert engine.scheduler.get_num_new_matched_tokens(gone, 0) == (16, True)
    engine.scheduler.request_finished(gone, [])
    engine.step()
    for number in range(8):  # would not find room if the four blocks were still held
        engine.run(engine.request(f"n{number}", range(number * 50 + 400, number * 50 + 450)))
        engine.settle()
    assert engine.run(engine.request("c", PROMPT)) == 0


def test_what_finds_no_staging_memory_is_left_out_and_served_all_the_same(engines):
    engine = engines(staging_bytes=2 * 64)
    engine.run(engine.request("a", PROMPT))
    engine.settle()
    assert engine.workers[0].unsaved_blocks == 2
    assert engine.run(engine.request("b", PROMPT)) == 8  # two of the four were saved


def test_random_traffic_is_never_served_wrong_bytes(engines, damage, tmp_path):
    """Prompts that share beginnings, in a small pool, over a host tier of few blocks and a disk that is damaged."""
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    tiers = ["host=1KiB", f"disk={tmp_path}/store,256KiB"]
    engine = engines(tiers=tiers, digest_key_file=str(key), staging_bytes=64 * 12)
    rng = random.Random(8)
    loaded = 0
    for number in range(40):
        length = rng.randrange(1, 40)
        variants = [rng.randrange(2) * 100 for _ in range(5)]
        prompt = [variants[position // 8] + position for position in range(length)]
        local_tokens = rng.choice([0, 0, (length - 1) // BLOCK * BLOCK // 2 // BLOCK * BLOCK])
        loaded += engine.run(
            engine.request(str(number), prompt, salt=rng.choice([None, "salt"])),
            new_token_ids=range(500, 500 + rng.randrange(6)),
            local_tokens=local_tokens,
        )
        if rng.random() < 0.3:
            engine.settle()
        if rng.random() < 0.1:
            damage(rng, tmp_path / "store")
    assert loaded > 60

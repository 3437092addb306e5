"""KV events against the fields recorded from vLLM, and in the bytes that routers read."""

import json
from array import array
from pathlib import Path

import msgspec
import pytest

from openinfer_engine.kv_events.recorder import TierChange
from openinfer_engine.kv_events.schema import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEventBatch,
    TableBlockRemoved,
    TableBlockStored,
    block_hash,
    removed_event,
    stored_event,
    tier_event,
)
from openinfer_kv_cache import Digest, StoredBlocks, TierMedium

RECORD = json.loads((Path(__file__).parents[1] / "fixtures" / "vllm_kv_events.json").read_text())["versions"]
A, B, C = (Digest(bytes(15) + bytes([each])) for each in (1, 2, 3))


@pytest.mark.parametrize("version", RECORD)
@pytest.mark.parametrize("event", [BlockStored, BlockRemoved, AllBlocksCleared, TableBlockStored, TableBlockRemoved])
def test_events_have_the_recorded_fields_in_their_order(version, event):
    name = event.__name__.removeprefix("Table")
    recorded = RECORD[version][name]
    ours = list(event.__struct_fields__)
    assert ours == recorded["fields"][: len(ours)]
    assert set(recorded["required"]) <= set(ours)
    assert event.__struct_config__.tag == name


@pytest.mark.parametrize("version", RECORD)
def test_a_batch_has_the_recorded_fields(version):
    assert list(KvEventBatch.__struct_fields__) == RECORD[version]["EventBatch"]["fields"]
    assert RECORD[version]["EventBatch"]["options"]["array_like"] is True


def test_messages_are_the_positional_arrays_that_routers_decode():
    blocks = StoredBlocks(A, [B, C], array("I", [7, 8, 9, 10]), "adapter", "salt")
    batch = KvEventBatch(1.5, [AllBlocksCleared(), stored_event(blocks, block_size_tokens=2), removed_event([A, B])])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch)) == [
        1.5,
        [
            ["AllBlocksCleared"],
            ["BlockStored", [2, 3], 1, [7, 8, 9, 10], 2, None, "GPU", "adapter", [["adapter"], ["adapter"]]],
            ["BlockRemoved", [1, 2], "GPU"],
        ],
        0,
    ]


@pytest.mark.parametrize("version", RECORD)
@pytest.mark.parametrize("medium", TierMedium)
def test_blocks_in_tiers_read_as_the_recorded_fields_say(version, medium):
    """By position, and so under the names of the maps that later releases write."""
    for is_stored, name in ((True, "BlockStored"), (False, "BlockRemoved")):
        event = tier_event(TierChange([B, C], medium, is_stored=is_stored), block_size_tokens=2)
        tag, *values = msgspec.msgpack.decode(msgspec.msgpack.encode(event))
        read = dict(zip(RECORD[version][name]["fields"], values, strict=False))
        assert tag == name
        assert (read["block_hashes"], read["medium"]) == ([2, 3], str(medium))
        if is_stored:  # without what the pool's event had, as vLLM tells of offloaded blocks
            assert (read["parent_block_hash"], read["token_ids"], read["block_size"]) == (None, [], 2)


def test_media_are_those_that_routers_know():
    assert {str(each) for each in TierMedium} == {"CPU", "STORAGE"}


def test_the_salt_stands_in_the_first_block_of_a_prefix_and_nothing_where_there_is_none():
    first = StoredBlocks(None, [A, B], array("I", [1, 2]), None, "salt")
    assert stored_event(first, block_size_tokens=1).extra_keys == [("salt",), None]
    plain = StoredBlocks(None, [A], array("I", [1]), None, None)
    event = stored_event(plain, block_size_tokens=1)
    assert (event.parent_block_hash, event.extra_keys) == (None, None)


def test_a_hash_is_the_low_64_bits_of_a_digest():
    assert block_hash(Digest(b"\xff" * 8 + b"\x80" + bytes(7))) == 1 << 63

import struct
import sys
from array import array
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openinfer_kv_cache import KvConfigError, PrefixHasher
from openinfer_kv_cache.digest import encode_token_ids

KEY = bytes(range(32))


@pytest.fixture
def hasher():
    return PrefixHasher(4, key=KEY)


def test_chain_two_blocks_golden_value(hasher):
    """Digests are stored on disks: they must not drift between releases."""
    root = hasher.root(lora_name="adapter", cache_salt="tenant")
    assert root.hex() == ROOT_GOLDEN
    assert [digest.hex() for digest in hasher.chain(root, range(8))] == CHAIN_GOLDEN


def test_extend_is_keyed_blake2b_of_parent_and_little_endian_ids(hasher):
    root = hasher.root()
    expected = blake2b(
        root + struct.pack("<4I", 1, 2, 3, 2**32 - 1), digest_size=16, key=KEY, person=b"openinfer-block"
    )
    assert hasher.chain(root, [1, 2, 3, 2**32 - 1]) == [expected.digest()]


def test_encode_token_ids_is_little_endian_on_every_machine():
    """What a big-endian machine has in memory is what byteswap makes of ours, or the other way round."""
    foreign = "big" if sys.byteorder == "little" else "little"
    ids = array("I", [1, 0x01020304])
    swapped = ids[:]
    swapped.byteswap()
    expected = struct.pack("<2I", 1, 0x01020304)
    assert encode_token_ids(ids) == encode_token_ids(swapped, byteorder=foreign) == expected
    assert list(ids) == [1, 0x01020304]


def test_extend_chain_in_pieces_is_the_whole_chain(hasher):
    root, ids = hasher.root(), array("I", range(23))
    digests = []
    for num_blocks in (0, 1, 1, 4, 2, 5):
        hasher.extend_chain(digests, root, ids, num_blocks=num_blocks)
    assert digests == hasher.chain(root, ids)


def test_state_digests_are_keyed_and_of_their_own_kind(hasher):
    (block,) = hasher.chain(hasher.root(), range(4))
    states = hasher.state_digests(block, 3)
    expected = blake2b(block + struct.pack("<I", 2), digest_size=16, key=KEY, person=b"openinfer-state")
    assert states[2] == expected.digest()
    assert len({block, *states}) == 4
    assert hasher.state_digests(block, 1) == states[:1]
    assert PrefixHasher(4, key=bytes(32)).state_digests(block, 1) != states[:1]


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_chain_token_id_out_of_range_raises(hasher, token_id):
    with pytest.raises(OverflowError):
        hasher.chain(hasher.root(), [0, 1, 2, token_id])


def test_chain_partial_block_is_left_out(hasher):
    root = hasher.root()
    assert len(hasher.chain(root, range(3))) == 0
    assert len(hasher.chain(root, range(7))) == 1
    assert hasher.chain(root, range(8))[:1] == hasher.chain(root, range(7))


def test_chain_block_order_matters(hasher):
    root = hasher.root()
    first, second = [1, 2, 3, 4], [5, 6, 7, 8]
    assert hasher.chain(root, first + second)[1] != hasher.chain(root, second + first)[1]
    assert hasher.chain(root, second)[0] != hasher.chain(root, first + second)[1]


@pytest.mark.parametrize(
    "names",
    [
        {"cache_salt": "a"},
        {"cache_salt": ""},
        {"lora_name": "a"},
        {"lora_name": ""},
        {"lora_name": "a", "cache_salt": "b"},
        {"lora_name": "ab"},
        {"cache_salt": "ab"},
        {"lora_name": "b", "cache_salt": "a"},
        {"cache_salt": "\ud800"},
    ],
)
def test_root_every_combination_of_names_is_a_world_of_its_own(hasher, names):
    everything = [
        {},
        {"cache_salt": "a"},
        {"cache_salt": ""},
        {"lora_name": "a"},
        {"lora_name": ""},
        {"lora_name": "a", "cache_salt": "b"},
        {"lora_name": "ab"},
        {"cache_salt": "ab"},
        {"lora_name": "b", "cache_salt": "a"},
        {"cache_salt": "\ud800"},
    ]
    same = [other for other in everything if hasher.root(**other) == hasher.root(**names)]
    assert same == [names]


def test_root_layout_and_block_size_are_bound():
    roots = {
        PrefixHasher(4, key=KEY).root(),
        PrefixHasher(8, key=KEY).root(),
        PrefixHasher(4, key=KEY, layout_digest="00").root(),
        PrefixHasher(4, key=KEY, layout_digest="01").root(),
        PrefixHasher(4, key=KEY[::-1]).root(),
    }
    assert len(roots) == 5


def test_key_same_key_same_digests_across_hashers(hasher):
    other = PrefixHasher(4, key=KEY)
    assert other.chain(other.root(), range(16)) == hasher.chain(hasher.root(), range(16))


def test_key_default_is_random_per_hasher():
    assert PrefixHasher(4).root() != PrefixHasher(4).root()


def test_key_changes_block_digests_even_under_one_root(hasher):
    root = hasher.root()
    assert PrefixHasher(4, key=KEY[::-1]).chain(root, range(4)) != hasher.chain(root, range(4))


@pytest.mark.parametrize("num_bytes", [0, 15, 65])
def test_key_length_out_of_range_is_refused(num_bytes):
    with pytest.raises(KvConfigError, match=f"{num_bytes} bytes"):
        PrefixHasher(4, key=bytes(num_bytes))


def test_block_size_zero_is_refused():
    with pytest.raises(KvConfigError, match="block_size_tokens is 0"):
        PrefixHasher(0)


ROOT_GOLDEN = "4cf47dc28b0958ea312cb7c523c9e0f3"
CHAIN_GOLDEN = ["3606d18914e82cddfc1b170cdb98c0e5", "1a6de505686d635375f4b2a227bec0b8"]


def plain_chain(hasher, root, ids):
    """As the module's docstring says, block by block."""
    digests, parent = [], root
    for start in range(0, len(ids) - 3, 4):
        block = struct.pack("<4I", *ids[start : start + 4])
        parent = blake2b(parent + block, digest_size=16, key=KEY, person=b"openinfer-block").digest()
        digests.append(parent)
    return digests


@pytest.mark.parametrize("num_tokens", [0, 3, 4 * 31, 4 * 32, 4 * 33 + 2, 4 * 100, 4 * 128])
def test_digests_that_are_known_are_those_of_the_ids(hasher, num_tokens):
    ids = array("I", range(num_tokens))
    for root in (hasher.root(), hasher.root(cache_salt="a"), hasher.root()):
        for first in (0, 1, 31, 32, 40):
            digests = []
            hasher.extend_chain(digests, root, ids, num_blocks=min(first, num_tokens // 4))
            hasher.extend_chain(digests, root, ids, num_blocks=num_tokens // 4)
            assert digests == plain_chain(hasher, root, ids)


def test_one_other_token_makes_other_digests_also_where_most_are_known(hasher):
    root, ids = hasher.root(), array("I", range(4 * 96))
    before = hasher.chain(root, ids)
    ids[4 * 40] += 1
    after = hasher.chain(root, ids)
    assert after[:40] == before[:40]
    assert not set(after[40:]) & set(before[40:])
    assert after == plain_chain(hasher, root, ids)


def test_known_digests_are_bounded(hasher, monkeypatch):
    monkeypatch.setattr("openinfer_kv_cache.digest.MAX_KNOWN_GROUPS", 3)
    chains = [array("I", range(first, first + 4 * 64)) for first in range(20)]
    for ids in (*chains, *chains):
        assert hasher.chain(hasher.root(), ids) == plain_chain(hasher, hasher.root(), ids)


def test_hashers_that_remember_together_compute_a_group_once():
    first, second = PrefixHasher(4, key=KEY), PrefixHasher(4, key=KEY)
    second.remember_with(first)
    ids, longer = array("I", range(4 * 96 + 4)), array("I", range(4 * 160))
    for computing, finding, asked, num_known in ((first, second, ids, 96), (second, first, longer, 160)):
        computed, found = (hasher.chain(hasher.root(), asked) for hasher in (computing, finding))
        assert computed == found == plain_chain(finding, finding.root(), asked)
        same = [mine is theirs for mine, theirs in zip(computed, found, strict=True)]
        assert same == [True] * num_known + [False] * (len(found) - num_known)  # what is found is the object itself


HASHERS = st.fixed_dictionaries(
    {
        "block_size_tokens": st.sampled_from((1, 2, 4)),
        "key": st.sampled_from((KEY, KEY[::-1])),
        "layout_digest": st.sampled_from(("", "00")),
    }
)
ROOTS = st.fixed_dictionaries(
    {
        "lora_name": st.sampled_from((None, "a")),
        "adapter_digest": st.sampled_from((None, None, bytes(16))),
        "cache_salt": st.sampled_from((None, "a", "b")),
    }
)
CHAINS = st.tuples(
    st.integers(0, 3),  # whose
    ROOTS,
    st.sampled_from(("", "v1")),
    st.integers(0, 300),  # tokens
    st.integers(0, 300),  # of which so many are those of all others
    st.integers(0, 80),  # blocks that are asked for first
)


@given(made=st.lists(HASHERS, min_size=4, max_size=4), chains=st.lists(CHAINS, min_size=1, max_size=12))
def test_what_others_have_computed_is_never_found_for_anything_else(made, chains):
    """Of any keys, block sizes, layouts, roots and versions: each digest is what a hasher of its own computes."""
    hashers = [PrefixHasher(**each) for each in made]
    for each in hashers[1:]:
        each.remember_with(hashers[0])
    for number, (index, names, version, num_tokens, num_common, first) in enumerate(chains):
        hasher, alone = hashers[index], PrefixHasher(**made[index])
        hasher.weights_version = alone.weights_version = version
        ids = array("I", (place if place < num_common else 1000 * number + place for place in range(num_tokens)))
        root = hasher.root(**names)
        digests = []
        num_blocks = num_tokens // hasher.block_size_tokens
        hasher.extend_chain(digests, root, ids, num_blocks=min(first, num_blocks))
        hasher.extend_chain(digests, root, ids, num_blocks=num_blocks)
        assert digests == alone.chain(alone.root(**names), ids)
        foreign = hashers[0].root(**names)  # also where a chain begins with what another hasher made
        assert hasher.chain(foreign, ids) == alone.chain(foreign, ids)

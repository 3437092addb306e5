"""The layouts of models without windows are those of the first release, byte by byte.

A digest is stamped on what tiers store and part of every block's identity, so a change of these constants voids
everything that users have stored: it needs a new LAYOUT_VERSION.
"""

import pytest

from openinfer_kv_cache import KvDtype, KvLayout, KvSpec, PagedGroup, PagedTensor, StateSlotGroup, StateTensor

BF16 = KvDtype.BFLOAT16


def paged(name, num_layers, *tensors, rope_tag="none"):
    return PagedGroup(name=name, num_layers=num_layers, tensors=tensors, rope_tag=rope_tag)


def tensor(name, num_heads, head_dim, **fields):
    return PagedTensor(name=name, num_heads=num_heads, head_dim=head_dim, dtype=BF16, **fields)


def state(name, num_layers, *tensors):
    return StateSlotGroup(name=name, num_layers=num_layers, tensors=tensors)


def keys_and_values(num_layers, num_heads, head_dim, rope_tag="none"):
    return paged("attention", num_layers, *(tensor(name, num_heads, head_dim) for name in "kv"), rope_tag=rope_tag)


SPECS = {
    "Qwen3-4B": KvSpec(model_tag="Qwen3-4B", paged=(keys_and_values(36, 8, 128, "half layout: theta 1000000"),)),
    "Qwen3-32B, rank 1 of 4": KvSpec(
        model_tag="Qwen3-32B", paged=(keys_and_values(64, 2, 128),), num_ranks=4, rank_index=1
    ),
    "Qwen3.5-4B": KvSpec(
        model_tag="Qwen3.5-4B",
        paged=(keys_and_values(8, 4, 256),),
        slots=(
            state(
                "linear_attention",
                24,
                StateTensor(name="conv", shape=(8192, 3), dtype=BF16),
                StateTensor(name="state", shape=(32, 128, 128), dtype=KvDtype.FLOAT32),
            ),
        ),
    ),
    "DeepSeek-V2-Lite": KvSpec(model_tag="DeepSeek-V2-Lite", paged=(paged("attention", 27, tensor("latent", 1, 576)),)),
    "Kimi-K2": KvSpec(model_tag="Kimi-K2", paged=(paged("attention", 61, tensor("latent", 1, 576)),)),
    "DeepSeek-V4-Flash": KvSpec(
        model_tag="DeepSeek-V4-Flash",
        paged=(
            paged("sparse", 20, tensor("kv", 1, 512, tokens_per_row=4)),
            paged("index", 20, tensor("kv", 1, 128, tokens_per_row=4)),
            paged("heavy", 21, tensor("kv", 1, 512, tokens_per_row=128)),
        ),
        slots=(state("window", 43, StateTensor(name="kv", shape=(128, 512), dtype=BF16)),),
    ),
}
DIGESTS = {
    "Qwen3-4B": "76bd6013768d6c07cc3d72c206768027",
    "Qwen3-32B, rank 1 of 4": "29e166b9ef10712570841b89a23d3a84",
    "Qwen3.5-4B": "d6404772b6a4e80f2eabc0d18e1740ee",
    "DeepSeek-V2-Lite": "499164628610826a9aa47535d7a56194",
    "Kimi-K2": "0fc095908a801167463e14e1286ac994",
    "DeepSeek-V4-Flash": "33fc61cbc415ada08629be9311a480b8",
}


@pytest.mark.parametrize("name", SPECS)
def test_layout_digest_without_windows_is_that_of_the_first_release(name):
    assert KvLayout.from_spec(SPECS[name]).digest == DIGESTS[name]
    assert KvLayout.from_spec(SPECS[name].without_windows()).digest == DIGESTS[name]

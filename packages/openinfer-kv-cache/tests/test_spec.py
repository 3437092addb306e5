import msgspec
import pytest

from openinfer_kv_cache import KvConfigError, KvDtype, KvSpec, PagedGroup, PagedTensor, StateSlotGroup, StateTensor

K = PagedTensor(name="k", num_heads=8, head_dim=128, dtype=KvDtype.BFLOAT16)
V = PagedTensor(name="v", num_heads=8, head_dim=128, dtype=KvDtype.BFLOAT16)
ATTENTION = PagedGroup(name="attention", num_layers=36, tensors=(K, V))
STATE = StateTensor(name="state", shape=(32, 128, 128), dtype=KvDtype.FLOAT32)
CONV = StateTensor(name="conv", shape=(8192, 3), dtype=KvDtype.BFLOAT16)
DELTA = StateSlotGroup(name="delta", num_layers=24, tensors=(STATE, CONV))


def replace(struct, **fields):
    return lambda: msgspec.structs.replace(struct, **fields)


def spec(**fields):
    return KvSpec(**({"model_tag": "m", "paged": (ATTENTION,)} | fields))


def test_bytes_of_qwen3_and_qwen35_are_those_of_their_papers():
    assert spec().bytes_per_token == 147_456
    assert spec(slots=(DELTA,)).bytes_per_slot == 24 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)
    assert spec().bytes_per_slot == 0


def test_bytes_of_a_shared_latent():
    latent = PagedTensor(name="latent", num_heads=1, head_dim=576, dtype=KvDtype.BFLOAT16)
    group = PagedGroup(name="mla", num_layers=27, tensors=(latent,))
    assert spec(paged=(group,)).bytes_per_token == 31_104


@pytest.mark.parametrize("dtype", list(KvDtype))
def test_itemsize_is_known_for_every_dtype(dtype):
    digits = "".join(character for character in dtype.value.split("_")[0] if character.isdigit())
    assert dtype.itemsize_bytes == int(digits) // 8


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (replace(K, name="K"), "a tensor's name is 'K'"),
        (replace(K, name=""), "a tensor's name is ''"),
        (replace(K, num_heads=0), "num_heads of tensor 'k' is 0"),
        (replace(K, head_dim=-1), "head_dim of tensor 'k' is -1"),
        (replace(STATE, shape=()), r"shape of tensor 'state' is \(\)"),
        (replace(STATE, shape=(2, 0)), "a dimension of tensor 'state' is 0"),
        (replace(ATTENTION, name="a b"), "a group's name is 'a b'"),
        (replace(ATTENTION, num_layers=0), "num_layers of group 'attention' is 0"),
        (replace(ATTENTION, num_layers=4097), "num_layers of group 'attention' is 4097"),
        (replace(ATTENTION, tensors=()), "group 'attention' has no tensors"),
        (replace(ATTENTION, tensors=(K, K)), "group 'attention' names 'k' twice"),
        (replace(ATTENTION, rope_tag=""), "rope_tag of group 'attention' is ''"),
        (replace(ATTENTION, rope_tag="a\nb"), "rope_tag of group"),
        (replace(DELTA, quantization_tag="é"), "quantization_tag of group 'delta'"),
        (replace(DELTA, tensors=()), "group 'delta' has no tensors"),
        (lambda: spec(model_tag=""), "model_tag is ''"),
        (lambda: spec(paged=()), "no paged group"),
        (lambda: spec(paged=(ATTENTION, ATTENTION)), "the spec names 'attention' twice"),
        (lambda: spec(slots=(replace(DELTA, name="attention")(),)), "the spec names 'attention' twice"),
        (lambda: spec(num_ranks=0), "num_ranks is 0"),
        (lambda: spec(num_ranks=2, rank_index=2), r"rank_index is 2; .* 0 \.\. 1"),
        (lambda: spec(rank_index=-1), "rank_index is -1"),
    ],
)
def test_spec_out_of_range_is_refused_by_name(make, message):
    with pytest.raises(KvConfigError, match=message):
        make()


def test_spec_survives_msgpack_and_refuses_unknown_fields():
    whole = spec(slots=(DELTA,), num_ranks=2, rank_index=1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(whole), type=KvSpec) == whole
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.json.decode(b'{"model_tag": "m", "paged": [], "layers": 3}', type=KvSpec)
    with pytest.raises(msgspec.ValidationError, match="no paged group"):
        msgspec.json.decode(b'{"model_tag": "m", "paged": []}', type=KvSpec)

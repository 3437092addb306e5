"""`TorchCopies` on tensors of a CPU and of a GPU; skipped where torch, which is vLLM's and never ours, is missing."""

import time

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; a user of vLLM has it")


each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture(autouse=True)
def _skip_without_gpu(request):
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")


def wait(copy):
    give_up_s = time.monotonic() + 30
    while not copy.is_done():
        assert time.monotonic() < give_up_s, "a copy does not end"


def layers(dtype, num_blocks, device):
    shapes = {"flash": (2, num_blocks, 4, 2, 8), "first": (num_blocks, 2, 4, 8), "latent": (num_blocks, 4, 24)}
    made = {name: torch.randn(shape).to(device, dtype) for name, shape in shapes.items()}
    made["permuted"] = torch.randn(num_blocks, 4, 2, 8).to(device, dtype).permute(0, 2, 1, 3)
    return made


@each_device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.uint8, torch.float32])
def test_blocks_go_to_staging_and_come_back_elsewhere(vllm, dtype, device):
    from openinfer_kv_offload.vllm.torch_copies import TorchCopies

    source, target = layers(dtype, 6, device), layers(dtype, 9, device)
    before = {name: tensor.clone() for name, tensor in target.items()}
    saving, loading = TorchCopies(source, num_blocks=6), TorchCopies(target, num_blocks=9)
    assert saving.identity == loading.identity
    staging = saving.allocate_staging(3)
    assert [len(each) for each in staging] == [saving.block_bytes] * 3
    wait(saving.to_staging([5, 0, 3], [2, 0, 1]))
    for into, view in zip(loading.allocate_staging(3), staging, strict=True):
        into[:] = view
    wait(loading.to_pool([2, 0, 1], [7, 1, 4]))
    for name, tensor in target.items():
        dim = 1 if name == "flash" else 0
        for block, origin in ((7, 5), (1, 0), (4, 3)):
            assert torch.equal(tensor.select(dim, block), source[name].select(dim, origin))
        for block in (0, 2, 3, 5, 6, 8):
            assert torch.equal(tensor.select(dim, block), before[name].select(dim, block))
    assert loading.to_pool([], []).is_done()


@each_device
def test_tables_have_layers_of_their_own_in_blocks_of_one_size(vllm, device):
    from openinfer_kv_offload.vllm.torch_copies import TorchCopies

    names = [["flash", "latent", "shares-another-layers-cache"], ["first", "permuted"]]
    source, target = layers(torch.bfloat16, 6, device), layers(torch.bfloat16, 6, device)
    before = {name: tensor.clone() for name, tensor in target.items()}
    saving = TorchCopies(source, num_blocks=6, tables=names)
    loading = TorchCopies(target, num_blocks=6, tables=names)
    assert saving.identity == loading.identity != TorchCopies(source, num_blocks=6).identity
    staging = saving.allocate_staging(2)
    wait(saving.to_staging([5], [1], table=0))
    wait(saving.to_staging([2], [0], table=1))
    for into, view in zip(loading.allocate_staging(2), staging, strict=True):
        into[:] = view
    wait(loading.to_pool([1], [4], table=0))
    wait(loading.to_pool([0], [3], table=1))
    for name, tensor in target.items():
        dim, (block, origin) = (1 if name == "flash" else 0), ((4, 5) if name in names[0] else (3, 2))
        assert torch.equal(tensor.select(dim, block), source[name].select(dim, origin))
        for other in {0, 1, 2, 3, 4, 5} - {block}:
            assert torch.equal(tensor.select(dim, other), before[name].select(dim, other))


@pytest.mark.parametrize("names", [[["flash"], ["first"]], [["flash", "first", "latent", "permuted"], ["absent"]]])
def test_caches_in_no_group_and_groups_without_a_cache_are_refused(vllm, names):
    from openinfer_kv_offload import TierConfigError
    from openinfer_kv_offload.vllm.torch_copies import TorchCopies

    with pytest.raises(TierConfigError, match="needs each cache in a group, and one in each group"):
        TorchCopies(layers(torch.bfloat16, 6, "cpu"), num_blocks=6, tables=names)


def test_a_layer_without_a_dimension_of_blocks_is_refused(vllm):
    from openinfer_kv_offload import TierConfigError
    from openinfer_kv_offload.vllm.torch_copies import TorchCopies

    with pytest.raises(TierConfigError, match=r"layer a is \(3, 4\); .* dimension of 6 blocks"):
        TorchCopies({"a": torch.zeros(3, 4)}, num_blocks=6)

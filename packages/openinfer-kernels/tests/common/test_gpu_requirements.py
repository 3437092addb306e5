"""What is said where the CUDA operators cannot run: one sentence that names what is there and what to do."""

import pytest

from openinfer_kernels import ArrayMismatchError, DeviceUnavailableError
from openinfer_kernels.gpu_requirements import (
    require_attention,
    require_capability,
    require_driver,
    require_entries,
    require_index,
    require_latents,
)


def test_driver_of_the_packages_or_a_newer_one_will_do():
    require_driver(supported=13000, needed=13020)  # minor versions are compatible
    require_driver(supported=13010, needed=12090)


def test_old_driver_is_named_with_the_extra_that_it_can_run():
    with pytest.raises(DeviceUnavailableError) as said:
        require_driver(supported=12040, needed=13000)
    assert str(said.value) == (
        "the NVIDIA driver is too old: it supports CUDA 12.4, and the packages installed here need CUDA 13; "
        "update the driver, or make the environment anew with ./run install --fresh --cuda12"
    )


@pytest.mark.parametrize(("index", "count"), [(1, 1), (99, 2), (-1, 4)])
def test_gpu_that_is_not_there_is_named_with_how_many_are(index: int, count: int):
    with pytest.raises(DeviceUnavailableError, match=f"GPU {index} was asked for; this machine has {count}, numbered"):
        require_index(index, count=count)


def test_gpu_before_ampere_is_named_with_its_capability():
    require_capability("NVIDIA A100", (8, 0))
    with pytest.raises(DeviceUnavailableError, match=r"Tesla T4 has compute capability 7\.5; .*need 8\.0 \(Ampere\)"):
        require_capability("Tesla T4", (7, 5))


def test_sizes_that_no_attention_kernel_is_for_are_named_with_those_that_are():
    require_attention(head_dim=128, block_tokens=16)
    with pytest.raises(ArrayMismatchError, match=r"heads of 80 values is not possible: one of \(32, 64, 128, 256\)"):
        require_attention(head_dim=80, block_tokens=16)
    with pytest.raises(ArrayMismatchError, match=r"blocks of 8 tokens are not possible: one of \(16, "):
        require_attention(head_dim=128, block_tokens=8)


def test_latents_of_sizes_without_kernels_are_refused():
    require_latents(entry_dim=576, block_tokens=16)
    with pytest.raises(ArrayMismatchError, match=r"latents of 320 values .* not possible: 576"):
        require_latents(entry_dim=320, block_tokens=16)
    with pytest.raises(ArrayMismatchError, match="blocks of 8 tokens"):
        require_latents(entry_dim=576, block_tokens=8)


def test_compressed_entries_of_sizes_without_kernels_are_refused():
    require_entries(num_heads=1, entry_dim=512)
    require_entries(num_heads=1, entry_dim=128)
    with pytest.raises(ArrayMismatchError, match=r"entries of 1 x 32 values are not possible: one vector of 512"):
        require_entries(num_heads=1, entry_dim=32)
    with pytest.raises(ArrayMismatchError, match="entries of 2 x 512 values"):
        require_entries(num_heads=2, entry_dim=512)

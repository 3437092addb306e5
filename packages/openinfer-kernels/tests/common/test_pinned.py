"""Copies of steps between pinned memory and the device, small ones by a kernel and large ones by a copy engine."""

import numpy as np
import pytest

pytestmark = pytest.mark.gpu

SIZES = (0, 1, 3, 4, 31, 512, 4099, 1 << 14, (1 << 14) + 1, 100_000)
"""Of int32 arrays: below, at and above what a kernel copies."""


@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "unaligned"])
def test_what_is_uploaded_comes_back(offset: int) -> None:
    from openinfer_kernels.cuda import Device
    from openinfer_kernels.cuda.common.graphs import Stream
    from openinfer_kernels.cuda.common.libraries import cupy
    from openinfer_kernels.cuda.common.pinned import StagingRing

    device = Device.open()
    ring, rng = StagingRing(device, 2), np.random.default_rng(0)
    with Stream(device):
        for _ in range(3):  # the ring comes round again
            staging = ring.take()
            hosts = [rng.integers(0, 1 << 30, size + offset).astype(np.int32) for size in SIZES]
            there = [array[offset:] for array in staging.upload(*hosts)]
            target = cupy.full(max(SIZES) + 2, -1, np.int32)
            staging.upload_into(hosts[-1], target)
            back = [staging.download(array) for array in [*there, target[offset:]]]
            staging.done.record()
            staging.done.wait()
            for host, found in zip(hosts, back, strict=False):
                np.testing.assert_array_equal(found, host[offset:])
            end = len(hosts[-1])
            np.testing.assert_array_equal(back[-1][: end - offset], hosts[-1][offset:])
            assert (back[-1][end - offset :] == -1).all()

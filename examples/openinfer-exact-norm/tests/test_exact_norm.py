"""The provider passes the kit, is found by its name, and serves what the engine is told that it serves."""

import numpy as np
import pytest

from openinfer_core import InvalidRequest, Refused
from openinfer_core.errors import UnknownPlugin
from openinfer_engine.kernel_providers import choose_providers, with_providers
from openinfer_exact_norm import ExactNorm
from openinfer_kernels.cpu import CpuOps
from openinfer_kernels.testing.providers import check_kernel_provider


def test_provider_conforms() -> None:
    check_kernel_provider(ExactNorm, CpuOps(), architecture="cpu")


def test_sums_that_float32_loses_are_kept() -> None:
    x = np.full((1, 1 << 16), 1, np.float32)
    x[0, 0] = 2e4  # beside its square, ones vanish in float32
    (chosen,) = choose_providers({"rms_norm": "exact-norm"}, architecture="cpu")
    assert chosen.origin == "exact-norm (openinfer-exact-norm 0.1.0)"
    ops = with_providers(CpuOps(), [chosen])
    normed = ops.rms_norm(x, np.ones(1 << 16, np.float32), eps=0.0)
    exact = 1 / np.sqrt((4e8 + 65535) / 65536)
    np.testing.assert_array_equal(normed[0, 1:], np.float32(exact))


@pytest.mark.parametrize(
    ("asked", "architecture", "error", "message"),
    [
        ({"rms_norm": "exact"}, "cpu", UnknownPlugin, "installed: exact-norm"),
        ({"rms_norm": "exact-norm"}, "sm_90a", Refused, "it serves cpu, and this device is sm_90a"),
        ({"linear": "exact-norm"}, "cpu", Refused, "does not serve linear, but add_rms_norm, rms_norm"),
        ({"rmsnorm": "exact-norm"}, "cpu", InvalidRequest, "possible are add_rms_norm, "),
    ],
)
def test_what_cannot_be_served_is_refused(
    asked: dict[str, str], architecture: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        choose_providers(asked, architecture=architecture)

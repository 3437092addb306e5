"""What the tests of every operator share.

Tests speak to an implementation through the contract only: inputs go through `upload`, weights and activations through
`activation`, which brings them to the compute dtype, and results through `download`. Expectations are computed from
what arrived (`host`), so that rounding an input is not counted as an error. A further
implementation is one more entry in `IMPLEMENTATIONS`.
"""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openinfer_kernels import DeviceUnavailableError, Ops, SamplingBatch
from openinfer_kernels.cpu import CpuOps
from openinfer_kernels.ops.sampling_columns import COLUMN_DTYPES, DEFAULTS
from openinfer_kernels.testing.paged import PagedCase, make_paged_case

AS_CAPABILITY = os.environ.get("OPENINFER_TEST_AS_CAPABILITY", "")
"""`8.0` runs the tests of a GPU with the kernels alone that Ampere has: paths that a newer GPU never takes."""
CUBINS = os.environ.get("OPENINFER_TEST_CUBINS", "")
"""A folder with these kernels as `tools/device/older_gpu.py` compiles them."""


def cuda_ops() -> Ops:
    from openinfer_kernels.cuda import CudaOps, Device

    if not AS_CAPABILITY:
        return CudaOps()
    major, minor = AS_CAPABILITY.split(".")
    cubins = {path.stem: path for path in Path(CUBINS).glob("*.cubin")} if CUBINS else None
    return CudaOps(Device.open(as_capability=(int(major), int(minor)), cubins=cubins))


def why_no_gpu() -> str | None:
    try:
        from openinfer_kernels.cuda import Device

        Device.open()
    except DeviceUnavailableError as reason:
        return str(reason)
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a GPU where there is none, and says why once per file."""
    of_gpu = [item for item in items if item.get_closest_marker("gpu")]
    reason = why_no_gpu() if of_gpu else None
    if reason is not None:
        for item in of_gpu:
            item.add_marker(pytest.mark.skip(reason=reason))


IMPLEMENTATIONS = [pytest.param(CpuOps, id="cpu"), pytest.param(cuda_ops, id="cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="session", params=IMPLEMENTATIONS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return request.param()


@pytest.fixture(scope="session")
def activation(ops: Ops) -> Callable[[np.ndarray], Any]:
    """Copies a float32 array to the device in the compute dtype."""
    return ops.upload_weight


@pytest.fixture(scope="session")
def host(ops: Ops) -> Callable[[Any], np.ndarray]:
    """Copies a floating-point array to the host as float32, which holds every value of any compute dtype."""
    return lambda array: ops.download(array).astype(np.float32)


@pytest.fixture(scope="session")
def rounded(ops: Ops) -> Callable[[np.ndarray], np.ndarray]:
    """What storing float32 values in the compute dtype leaves of them; for BF16, to nearest, ties to even."""

    def to_bfloat16(values: np.ndarray) -> np.ndarray:
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
        return np.where(np.isnan(values), np.float32(np.nan), nearest.view(np.float32))

    return to_bfloat16 if ops.name == "cuda" else lambda values: values


@pytest.fixture(scope="session")
def close(ops: Ops) -> Callable[..., None]:
    """Asserts equality up to a tolerance meant for float32; BF16 may be off by two of its roundings as well."""
    least_rtol = 2.0**-7 if ops.name == "cuda" else 0.0

    def check(got: Any, expected: Any, *, rtol: float, atol: float = 0.0) -> None:
        np.testing.assert_allclose(got, expected, rtol=max(rtol, least_rtol), atol=atol)

    return check


@pytest.fixture(scope="session")
def rounded_once(ops: Ops, rounded: Callable[[np.ndarray], np.ndarray]) -> Callable[..., None]:
    """Asserts that results are what was expected, computed in float32 and rounded to the compute dtype once.

    Float32 that was computed otherwise may lie on the other side of a boundary between two values of BF16, rarely.
    """

    def check(got: np.ndarray, expected: np.ndarray) -> None:
        if ops.name != "cuda":
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
            return
        right = rounded(expected.astype(np.float32))
        differing = np.abs(got - right) > 1e-12
        assert np.count_nonzero(differing) <= 1e-2 * right.size + 1
        np.testing.assert_allclose(got[differing], right[differing], rtol=2.0**-7)

    return check


@pytest.fixture(scope="session")
def upload(ops: Ops) -> Callable[[Any], Any]:
    """Copies an array, or every array in a batch type of the contract, to the device."""

    def uploaded(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return ops.upload(value)
        if isinstance(value, tuple):
            return tuple(map(uploaded, value))
        if dataclasses.is_dataclass(value):
            fields = dataclasses.fields(value)
            return dataclasses.replace(value, **{f.name: uploaded(getattr(value, f.name)) for f in fields})
        return value

    return uploaded


@pytest.fixture(scope="session")
def paged_case() -> Callable[..., PagedCase]:
    """Builds a case of `(context tokens, query tokens)` rows whose blocks are scattered over the cache."""
    return make_paged_case


@pytest.fixture(scope="session")
def sampling() -> Callable[..., SamplingBatch]:
    """Builds the sampling of `num_rows` rows; what is not named is off, each value a scalar or one per row."""

    def build(
        num_rows: int,
        *,
        num_token_ids: int,
        seeds: Any = None,
        positions: Any = 0,
        **changes: Any,
    ) -> SamplingBatch:
        def column(value: Any, dtype: Any) -> np.ndarray:
            return np.array(np.broadcast_to(np.asarray(value, dtype), (num_rows,)))

        return SamplingBatch(
            num_token_ids=num_token_ids,
            **{name: column(changes.pop(name, off), COLUMN_DTYPES[name]) for name, off in DEFAULTS.items()},
            seeds=column(np.arange(num_rows) if seeds is None else seeds, np.uint64),
            positions=column(positions, np.int64),
            **changes,
        )

    return build

"""What the tests of every operator share.

Tests speak to an implementation through the contract only: inputs go through `upload`, weights and activations through
`activation`, which brings them to the compute dtype, and results through `download`. Expectations are computed from
what arrived (`host`), so that rounding an input is nobody's error. A further implementation is one more entry in
`IMPLEMENTATIONS`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from openinfer_kernels import AttentionBatch, DeviceUnavailableError, Ops, SamplingBatch
from openinfer_kernels.cpu import CpuOps


def cuda_ops() -> Ops:
    from openinfer_kernels.cuda import CudaOps

    return CudaOps()


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
def upload(ops: Ops) -> Callable[[Any], Any]:
    """Copies an array, or every array in a batch type of the contract, to the device."""

    def uploaded(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return ops.upload(value)
        if dataclasses.is_dataclass(value):
            fields = dataclasses.fields(value)
            return dataclasses.replace(value, **{f.name: uploaded(getattr(value, f.name)) for f in fields})
        return value

    return uploaded


@dataclasses.dataclass(kw_only=True)
class PagedCase:
    """Rows in a paged cache, and the same keys and values unpaged."""

    batch: AttentionBatch
    kv_cache: np.ndarray
    """`[blocks, layers, 2, K, B, D]`; NaN wherever no row's context is."""
    contexts: list[np.ndarray]
    """Per row `[layers, 2, K, context, D]`."""

    @property
    def num_tokens(self) -> int:
        return len(self.batch.positions)


@pytest.fixture(scope="session")
def paged_case() -> Callable[..., PagedCase]:
    """Builds a case of `(context tokens, query tokens)` rows whose blocks are scattered over the cache."""

    def build(
        rng: np.random.Generator,
        rows: list[tuple[int, int]],
        *,
        num_kv_heads: int,
        head_dim: int,
        block_tokens: int,
        num_layers: int = 2,
    ) -> PagedCase:
        num_blocks = [-(-context // block_tokens) for context, _ in rows]
        total = sum(num_blocks) + 3
        free = rng.permutation(np.arange(1, total)).tolist()
        shape = (num_layers, 2, num_kv_heads)
        kv_cache = np.full((total, *shape, block_tokens, head_dim), np.nan, np.float32)
        block_tables = rng.integers(0, total, size=(len(rows), max(num_blocks) + 2), dtype=np.int32)
        positions, slots, contexts = [], [], []
        for row, (context, queries) in enumerate(rows):
            block_tables[row, : num_blocks[row]] = [free.pop() for _ in range(num_blocks[row])]
            contexts.append(rng.normal(size=(*shape, context, head_dim)).astype(np.float32))
            for position in range(context):
                block, offset = block_tables[row, position // block_tokens], position % block_tokens
                kv_cache[block, :, :, :, offset] = contexts[row][:, :, :, position]
                if position >= context - queries:
                    positions.append(position)
                    slots.append(int(block) * block_tokens + offset)
        query_tokens = [queries for _, queries in rows]
        batch = AttentionBatch(
            positions=np.array(positions, np.int32),
            query_starts=np.cumsum([0, *query_tokens]).astype(np.int32),
            context_lens=np.array([context for context, _ in rows], np.int32),
            block_tables=block_tables,
            cache_slots=np.array(slots, np.int64),
            max_query_tokens=max(query_tokens),
            max_context_tokens=max(context for context, _ in rows),
        )
        return PagedCase(batch=batch, kv_cache=kv_cache, contexts=contexts)

    return build


@pytest.fixture(scope="session")
def sampling() -> Callable[..., SamplingBatch]:
    """Builds the sampling of `num_rows` rows; what is not named is off, each value a scalar or one per row."""

    def build(
        num_rows: int,
        *,
        num_token_ids: int,
        temperature: Any = 1.0,
        top_k: Any = 0,
        top_p: Any = 1.0,
        min_p: Any = 0.0,
        seeds: Any = None,
        positions: Any = 0,
        **changes: Any,
    ) -> SamplingBatch:
        def column(value: Any, dtype: Any) -> np.ndarray:
            return np.array(np.broadcast_to(np.asarray(value, dtype), (num_rows,)))

        return SamplingBatch(
            num_token_ids=num_token_ids,
            temperature=column(temperature, np.float32),
            top_k=column(top_k, np.int32),
            top_p=column(top_p, np.float32),
            min_p=column(min_p, np.float32),
            seeds=column(np.arange(num_rows) if seeds is None else seeds, np.uint64),
            positions=column(positions, np.int64),
            **changes,
        )

    return build

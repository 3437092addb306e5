"""Windows, compressed entries and index keys on a GPU in captured steps: replayed on other rows, padding left alone.

What each operator computes is held against the CPU by the conformance kit; here it is held against itself, called one
by one without padding.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from openinfer_kernels import AttentionBatch, CompressedEntries, RopeParameters, rope_table
from openinfer_kernels.testing.sparse_cases import sparse_cache, sparse_case, sparse_state

pytestmark = pytest.mark.gpu

HEADS, INDEX_HEADS, DIM, INDEX_DIM, WINDOW, SELECTED = 64, 16, 512, 128, 128, 40
SPARSE, HEAVY = 4, 128
NUM_BLOCKS, NUM_SLOTS, MAX_CONTEXT = 160, 12, 640
STEPS = (((1, 1), (5, 1), (37, 1), (128, 1), (300, 1)), ((4, 1), (512, 1), (129, 1)))
PIECES = (((1, 1), (50, 17), (16, 16), (160, 30)), ((300, 40), (7, 7), (128, 1)), ((256, 64),))
"""Context and query tokens of the rows of each step; steps of one kind are replayed from one graph."""


@pytest.fixture
def cuda(ops):
    if ops.name != "cuda":
        pytest.skip("of the CUDA module only")
    return ops


class Layer:
    """The operators of a sparse and of a heavily compressed layer, over memory of its own."""

    def __init__(self, cuda: Any) -> None:
        rng = np.random.default_rng(0)
        self.cuda = cuda
        self.caches = {
            name: cuda.zeros((NUM_BLOCKS, 2, 1, rows, dim))
            for name, rows, dim in (("sparse", 4, DIM), ("index", 4, INDEX_DIM), ("heavy", 1, DIM))
        }
        self.states = {
            "window": cuda.zeros((NUM_SLOTS, 2, WINDOW, DIM)),
            "sparse": cuda.zeros((NUM_SLOTS, 2, 2 * SPARSE, 4 * DIM), np.float32),
            "index": cuda.zeros((NUM_SLOTS, 2, 2 * SPARSE, 4 * INDEX_DIM), np.float32),
            "heavy": cuda.zeros((NUM_SLOTS, 2, 3, DIM), np.float32),
        }
        self.rope = cuda.upload(rope_table(RopeParameters(theta=1e4), head_dim=64, positions=MAX_CONTEXT))
        self.sinks = cuda.upload(floats(rng, HEADS))
        self.compressors = {
            name: (cuda.upload(floats(rng, ratio, halves * dim)), cuda.upload_weight(floats(rng, dim)))
            for name, ratio, halves, dim in (
                ("sparse", SPARSE, 2, DIM),
                ("index", SPARSE, 2, INDEX_DIM),
                ("heavy", HEAVY, 1, DIM),
            )
        }

    def run(self, tokens: dict[str, Any], batch: AttentionBatch) -> tuple[Any, Any, Any]:
        """Selected entries, and what the sparse and the heavy layer attend to."""
        cuda = self.cuda
        for name in self.compressors:
            self._compress(name, tokens[name], batch)
        queries = cuda.rope_tail(tokens["index_queries"], rope=self.rope, batch=batch)
        scores = cuda.index_scores(
            queries,
            tokens["index_weights"],
            cache=self.caches["index"],
            layer=1,
            ratio=SPARSE,
            scale=INDEX_DIM**-0.5,
            batch=batch,
        )
        selected = cuda.select_entries(scores, SELECTED)
        sparse = CompressedEntries(cache=self.caches["sparse"], layer=1, ratio=SPARSE, selected=selected)
        heavy = CompressedEntries(cache=self.caches["heavy"], layer=1, ratio=HEAVY, selected=None)
        return selected, self._attend(0, tokens, sparse, batch), self._attend(1, tokens, heavy, batch)

    def _compress(self, name: str, projected: Any, batch: AttentionBatch) -> None:
        ape, norm = self.compressors[name]
        operator = self.cuda.compress_windows if name == "heavy" else self.cuda.compress_overlapping_windows
        memory = {"state": self.states[name], "cache": self.caches[name], "layer": 1}
        operator(projected, ape=ape, norm=norm, eps=1e-6, rope=self.rope, batch=batch, **memory)

    def _attend(self, layer: int, tokens: dict[str, Any], entries: CompressedEntries, batch: AttentionBatch) -> Any:
        q = self.cuda.norm_rope_tail(tokens["q"], None, eps=1e-6, rope=self.rope, batch=batch)
        return self.cuda.window_attention(
            q,
            tokens["kv"],
            sinks=self.sinks,
            window=self.states["window"],
            layer=layer,
            entries=entries,
            rope=self.rope,
            scale=DIM**-0.5,
            batch=batch,
        )

    def fill(self, rng: np.random.Generator, batch: AttentionBatch) -> None:
        """What earlier steps left of the batch's rows; NaN everywhere else."""
        for name, ratio in (("sparse", SPARSE), ("index", SPARSE), ("heavy", HEAVY)):
            cache = self.caches[name]
            made = sparse_cache(rng, batch, ratio, cache.shape[4])
            self._set(cache, made)
        for name, state in self.states.items():
            made = sparse_state(rng, batch, state.shape[2:])
            if name == "heavy":
                made[:, :, 1] = np.abs(made[:, :, 1]) + 1  # sums of weights
            self._set(state, made)

    def memory(self) -> dict[str, np.ndarray]:
        """All that it keeps, as bits."""
        arrays = {f"cache {name}": each for name, each in self.caches.items()} | self.states
        return {name: np.ascontiguousarray(self.cuda.download(each)).view(np.uint8) for name, each in arrays.items()}

    def _set(self, there: Any, values: np.ndarray) -> None:
        whole = np.full(there.shape, np.nan, np.float32)
        whole[: len(values)] = values
        there.set(whole.astype(there.dtype))


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def make_batch(seed: int, rows: Sequence[tuple[int, int]]) -> AttentionBatch:
    return sparse_case(np.random.default_rng(seed), rows)


def make_tokens(cuda: Any, seed: int, count: int, *, padded: int) -> dict[str, Any]:
    """What a step's tokens bring; NaN behind them."""
    rng = np.random.default_rng(seed)
    shapes = {
        "sparse": (4 * DIM,),
        "index": (4 * INDEX_DIM,),
        "heavy": (2 * DIM,),
        "index_weights": (INDEX_HEADS,),
        "index_queries": (INDEX_HEADS, INDEX_DIM),
        "q": (HEADS, DIM),
        "kv": (DIM,),
    }
    made: dict[str, Any] = {}
    for name, shape in shapes.items():
        values = np.full((padded, *shape), np.nan, np.float32)
        values[:count] = floats(rng, count, *shape)
        made[name] = cuda.upload_weight(values) if name in ("index_queries", "q", "kv") else cuda.upload(values)
    return made


def there(cuda: Any, batch: AttentionBatch) -> AttentionBatch:
    arrays = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    lists = {name: tuple(map(cuda.upload, value)) for name, value in arrays.items() if isinstance(value, tuple)}
    singles = {name: cuda.upload(value) for name, value in arrays.items() if isinstance(value, np.ndarray)}
    return dataclasses.replace(batch, **lists, **singles)


def padded_batch(batch: AttentionBatch, *, rows: int, tokens: int) -> AttentionBatch:
    """As an engine pads a captured step."""
    more_rows, more_tokens = rows - len(batch.context_lens), tokens - len(batch.positions)
    is_step = batch.max_query_tokens == 1
    ends = np.full(more_rows, len(batch.positions), np.int32) + (np.arange(1, more_rows + 1) if is_step else 0)
    (given,), (slots,) = batch.block_tables, batch.cache_slots
    tables = np.zeros((rows, MAX_CONTEXT // batch.block_tokens), np.int32)
    tables[: len(given), : given.shape[1]] = given
    return dataclasses.replace(
        batch,
        positions=np.pad(batch.positions, (0, more_tokens)),
        query_starts=np.concatenate((batch.query_starts, ends)).astype(np.int32),
        context_lens=np.pad(batch.context_lens, (0, more_rows)),
        block_tables=(tables,),
        cache_slots=(np.pad(slots, (0, more_tokens), constant_values=-1),),
        max_query_tokens=1 if is_step else tokens,
        max_context_tokens=MAX_CONTEXT,
        state_slots=np.pad(batch.state_slots, (0, more_rows), constant_values=-1),
    )


def set_all(cuda: Any, arrays: Any, values: Any) -> None:
    """Copies arrays of the device into those that a graph reads."""
    for name, value in values.items():
        pairs = zip(arrays[name], value, strict=True) if isinstance(value, tuple) else [(arrays[name], value)]
        for array, new in pairs:
            if hasattr(new, "dtype"):
                array.set(cuda.download(new))


def fields_of(batch: AttentionBatch) -> dict[str, Any]:
    return {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}


@pytest.mark.parametrize(("steps", "sizes"), [(STEPS, (8, 8)), (PIECES, (6, 96))])
def test_captured_steps_replay_and_leave_padding_alone(cuda, steps, sizes):
    from openinfer_kernels.cuda.common.libraries import cupy

    num_rows, num_tokens = sizes
    layer, other = Layer(cuda), Layer(cuda)
    first = make_batch(0, steps[0])
    batch = there(cuda, padded_batch(first, rows=num_rows, tokens=num_tokens))
    tokens = make_tokens(cuda, 0, len(first.positions), padded=num_tokens)
    cupy.cuda.Device().synchronize()  # the stream does not wait for the one that made the inputs
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        layer.fill(np.random.default_rng(0), first)
        layer.run(tokens, batch)
        stream.begin_capture()
        outputs = layer.run(tokens, batch)
        graph = stream.end_capture()
        for seed, rows in enumerate(steps, 1):
            plain = make_batch(seed, rows)
            count = len(plain.positions)
            set_all(
                cuda, fields_of(batch), fields_of(there(cuda, padded_batch(plain, rows=num_rows, tokens=num_tokens)))
            )
            set_all(cuda, tokens, make_tokens(cuda, seed, count, padded=num_tokens))
            for each in (layer, other):
                each.fill(np.random.default_rng(seed), plain)
            graph.launch(stream)
            expected = other.run(make_tokens(cuda, seed, count, padded=count), there(cuda, plain))
            stream.synchronize()
            np.testing.assert_array_equal(cuda.download(outputs[0])[:count], cuda.download(expected[0]))
            for got, right in zip(outputs[1:], expected[1:], strict=True):
                require_close(*(cuda.download(each[:count]).astype(np.float32) for each in (got, right)))
            for (name, got), right in zip(layer.memory().items(), other.memory().values(), strict=True):
                np.testing.assert_array_equal(got, right, err_msg=name)


def require_close(got: np.ndarray, expected: np.ndarray) -> None:
    """Keys may be divided otherwise: off by a rounding or two to BF16."""
    assert np.isfinite(got).all()
    typical = np.sqrt(np.mean(expected**2))
    assert np.abs(got - expected).max() < 0.03 * typical + 2**-7 * np.abs(expected).max()


@pytest.mark.parametrize("heads", [8, 64])
def test_batch_invariant_attention_has_the_same_bits_alone_and_in_a_captured_size(cuda, heads):
    from openinfer_kernels.cuda import BatchInvariantCudaOps

    ops = BatchInvariantCudaOps(cuda.device)
    plain = make_batch(3, PIECES[0])
    found = []
    for batch in (plain, padded_batch(plain, rows=8, tokens=200)):
        layer, count = Layer(ops), len(plain.positions)
        layer.sinks = layer.sinks[:heads]
        layer.fill(np.random.default_rng(0), plain)
        tokens = make_tokens(ops, 3, count, padded=len(batch.positions))
        tokens["q"] = ops.upload_weight(ops.download(tokens["q"]).astype(np.float32)[:, :heads])
        found.append([ops.download(each)[:count].view(np.uint8) for each in layer.run(tokens, there(ops, batch))])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_mixes_of_streams_have_the_same_bits_for_few_and_many_tokens(cuda):
    from openinfer_kernels import HyperWeights
    from openinfer_kernels.cuda import BatchInvariantCudaOps

    ops, rng = BatchInvariantCudaOps(cuda.device), np.random.default_rng(0)
    fn, base, scale = floats(rng, 24, 2048) / 45, floats(rng, 24), np.ones(3, np.float32)
    weights = HyperWeights(fn=ops.upload(fn), base=ops.upload(base), scale=ops.upload(scale))
    residual = ops.upload_weight(floats(rng, 600, 4, 512))
    few, many = (
        ops.hyper_read(streams, weights, eps=1e-6, mix_eps=1e-6, num_iterations=20)[0]
        for streams in (residual[:3], residual)
    )
    np.testing.assert_array_equal(ops.download(few).view(np.uint16), ops.download(many)[:3].view(np.uint16))

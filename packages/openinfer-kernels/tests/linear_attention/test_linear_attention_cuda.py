"""Linear attention on a GPU against the CPU module: published sizes, rows of every kind, padding, captured steps."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from openinfer_kernels.cpu import CpuOps
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.testing.paged import make_state_case

pytestmark = pytest.mark.gpu

PIECES = ((1, 1), (9, 1), (131, 131), (40, 3), (90, 64), (64, 1), (5, 5), (300, 17), (15, 15), (200, 16))
"""Context and query tokens: steps, short pieces, chunks with and without a remainder, sequences that begin."""
STEPS = ((1, 1), (9, 1), (64, 1))
KEY_HEADS, VALUE_HEADS, DIM, TAPS = 2, 6, 128, 4
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * DIM


@pytest.fixture
def cuda(ops):
    if ops.name != "cuda":
        pytest.skip("of the CUDA module only")
    return ops


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def require_close(got: np.ndarray, expected: np.ndarray) -> None:
    """Off by a few roundings to BF16: in the mean, and anywhere beside what is typical."""
    assert np.isfinite(got).all()
    off, typical = np.abs(got - expected), np.sqrt(np.mean(expected**2))
    assert np.sqrt(np.mean(off**2)) < 0.01 * typical
    assert (off < 0.05 * (np.abs(expected) + typical)).all()


class Case:
    """One layer's operators on rows, here and there."""

    def __init__(self, cuda: Any, rows: tuple[tuple[int, int], ...], seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.cuda = cuda
        self.batch, state = make_state_case(rng, rows, (VALUE_HEADS, DIM, DIM))
        conv = floats(rng, *state.shape[:2], CHANNELS, TAPS - 1)
        conv[np.isnan(state[:, 0, 0, 0, 0])] = np.nan
        tokens = len(self.batch.positions)
        self.projected = cuda.upload_weight(floats(rng, tokens, CHANNELS + 2 * VALUE_HEADS))
        self.weight = cuda.upload_weight(floats(rng, CHANNELS, TAPS))
        self.state, self.conv = cuda.upload(state / 8), cuda.upload_weight(conv)
        self.a_log = cuda.upload(np.log(rng.uniform(0.02, 2.0, VALUE_HEADS)).astype(np.float32))
        self.dt_bias = cuda.upload(floats(rng, VALUE_HEADS))
        arrays = {f.name: getattr(self.batch, f.name) for f in dataclasses.fields(self.batch)}
        uploaded = {name: cuda.upload(value) for name, value in arrays.items() if isinstance(value, np.ndarray)}
        self.batch_there = dataclasses.replace(self.batch, **uploaded)

    def run(self, batch: Any) -> tuple[Any, Any]:
        """Convolution and delta rule on the device."""
        u, gates = self.projected[:, :CHANNELS], self.projected[:, CHANNELS:]
        qkv = self.cuda.causal_conv_silu(u, self.weight, state=self.conv, layer=1, batch=batch)
        names = {"a_log": self.a_log, "dt_bias": self.dt_bias, "state": self.state}
        return qkv, self.cuda.gated_delta_rule(qkv, gates, **names, layer=1, batch=batch)

    def host(self, array: Any) -> np.ndarray:
        return self.cuda.download(array).astype(np.float32)

    def check(self, run: Any) -> None:
        """Runs it and compares everything that it left with the CPU."""
        cpu, given = CpuOps(), self.host(self.projected)
        conv, state = self.host(self.conv), self.host(self.state)
        before_conv, before_state = conv.copy(), state.copy()
        weight, a_log, dt_bias = map(self.host, (self.weight, self.a_log, self.dt_bias))
        qkv, out = map(self.host, run())
        expected = cpu.causal_conv_silu(given[:, :CHANNELS], weight, state=conv, layer=1, batch=self.batch)
        require_close(qkv, expected)
        names = {"a_log": a_log, "dt_bias": dt_bias, "state": state}
        expected = cpu.gated_delta_rule(qkv, given[:, CHANNELS:], **names, layer=1, batch=self.batch)
        ends = np.asarray(self.batch.query_starts)[1:]
        for first, end in zip(self.batch.query_starts, ends, strict=False):
            require_close(out[first:end], expected[first:end])
        slots = self.batch.state_slots[self.batch.state_slots >= 0]
        np.testing.assert_array_equal(self.host(self.conv)[slots], conv[slots])
        got = self.host(self.state)
        for slot in slots:
            require_close(got[slot, 1], state[slot, 1])
        others = np.setdiff1d(np.arange(len(got)), slots)
        np.testing.assert_array_equal(got[others], before_state[others])
        np.testing.assert_array_equal(self.host(self.conv)[others], before_conv[others])
        np.testing.assert_array_equal(got[:, 0], before_state[:, 0])


@pytest.mark.parametrize("rows", [PIECES, STEPS, ((700, 700),), ((513, 385), (77, 77)), ((40, 7), (3, 3))])
def test_pieces_and_steps_equal_the_cpu(cuda, rows):
    case = Case(cuda, rows)
    case.check(lambda: case.run(case.batch_there))


@pytest.mark.parametrize("padding_bytes", [0, 256, 4])
@pytest.mark.parametrize("rows", [PIECES, STEPS])
def test_states_that_share_a_piece_of_memory_per_slot_equal_the_cpu(cuda, rows, padding_bytes):
    """Layer by layer beside each other, as slots hold them; where vectors do not fit, slower kernels serve."""
    case = Case(cuda, rows)
    slots, layers = case.state.shape[:2]
    layer_bytes = [array[0, 0].nbytes for array in (case.conv, case.state)]
    memory = cuda.zeros((slots, layers * sum(layer_bytes) + padding_bytes), np.uint8)
    views = []
    for array, begin in ((case.conv, 0), (case.state, layer_bytes[0])):
        values = memory.reshape(-1).view(array.dtype).reshape(slots, -1)
        size, stride = array[0, 0].size, sum(layer_bytes) // array.dtype.itemsize
        places = values[:, : layers * stride].reshape(slots, layers, stride)
        first = begin // array.dtype.itemsize
        view = places[:, :, first : first + size].reshape(array.shape)
        view[...] = array
        views.append(view)
    assert (memory != 0).any()
    case.conv, case.state = views
    case.check(lambda: case.run(case.batch_there))


def test_captured_steps_replay_and_leave_padding_alone(cuda):
    from openinfer_kernels.cuda.common.libraries import cupy

    case = Case(cuda, STEPS)
    padded = {
        "query_starts": np.arange(6, dtype=np.int32),
        "context_lens": np.array([*case.batch.context_lens, 0, 0], np.int32),
        "state_slots": np.array([*case.batch.state_slots, -1, -1], np.int32),
    }
    batch = dataclasses.replace(case.batch_there, **{name: cuda.upload(value) for name, value in padded.items()})
    case.projected = cuda.upload_weight(
        np.concatenate([case.host(case.projected), np.full((2, CHANNELS + 12), np.nan)]).astype(np.float32)
    )
    state, conv = case.host(case.state), case.host(case.conv)
    cupy.cuda.Device().synchronize()  # the stream does not wait for the one that made the inputs
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        case.run(batch)
        stream.begin_capture()
        outputs = case.run(batch)
        graph = stream.end_capture()
        case.state.set(state)
        case.conv.set(cuda.download(cuda.upload_weight(conv)))
        stream.synchronize()
    case.projected, kept = case.projected[:3], case.projected

    def replay() -> tuple[Any, Any]:
        graph.launch(stream)
        stream.synchronize()
        return tuple(each[:3] for each in outputs)

    case.check(replay)
    assert kept is not None


def test_step_by_step_has_the_same_bits_however_a_prompt_is_cut(cuda):
    from openinfer_kernels.cuda import BatchInvariantCudaOps

    ops = BatchInvariantCudaOps(cuda.device)
    found = []
    for cuts in ((150,), (1, 64, 65, 150), (16, 48, 150)):
        case = Case(ops, ((150, 150),), seed=3)
        whole, pieces, begin = case.projected, [], 0
        for end in cuts:
            case.projected = whole[begin:end]
            batch, _ = make_state_case(np.random.default_rng(0), ((end, end - begin),), (1,))
            arrays = {n: ops.upload(getattr(batch, n)) for n in ("query_starts", "context_lens", "positions")}
            pieces.append(case.run(dataclasses.replace(batch, **arrays, state_slots=case.batch_there.state_slots))[1])
            begin = end
        slot = int(case.batch.state_slots[0])
        found.append((np.concatenate([case.host(piece) for piece in pieces]), case.host(case.state)[slot, 1]))
    for out, state in found[1:]:
        np.testing.assert_array_equal(out, found[0][0])
        np.testing.assert_array_equal(state, found[0][1])


def test_steps_have_the_same_bits_in_any_batch(cuda):
    case = Case(cuda, ((9, 1), (64, 1), (7, 1), (1, 1), (30, 1), (12, 1), (80, 1)))
    kept = case.host(case.projected), case.host(case.conv), case.host(case.state)
    together, states = case.host(case.run(case.batch_there)[1]), case.host(case.state)
    for row, slot in enumerate(case.batch.state_slots.tolist()):
        case.projected, case.conv = cuda.upload_weight(kept[0][row : row + 1]), cuda.upload_weight(kept[1])
        case.state = cuda.upload(kept[2])
        alone = {
            "query_starts": np.array([0, 1], np.int32),
            "context_lens": case.batch.context_lens[row : row + 1],
            "state_slots": case.batch.state_slots[row : row + 1],
        }
        batch = dataclasses.replace(case.batch_there, **{name: cuda.upload(value) for name, value in alone.items()})
        np.testing.assert_array_equal(case.host(case.run(batch)[1])[0], together[row])
        np.testing.assert_array_equal(case.host(case.state)[slot], states[slot])


def test_batch_without_slots_and_shapes_that_disagree_are_refused(cuda):
    case = Case(cuda, STEPS)
    with pytest.raises(ArrayMismatchError, match="no state_slots"):
        case.run(dataclasses.replace(case.batch_there, state_slots=None))
    case.weight = case.weight[:-8]
    with pytest.raises(ArrayMismatchError, match="do not agree"):
        case.run(case.batch_there)

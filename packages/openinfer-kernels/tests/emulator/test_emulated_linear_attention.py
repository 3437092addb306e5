"""Linear attention's steps on the CUDA kernels, emulated: states that take in kept inputs are those of plain steps."""

import ctypes
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from openinfer_kernels import AttentionBatch

SOURCE = """#pragma GCC optimize("no-strict-aliasing")
#include "fibers.hpp"
#include "bfloat16.hpp"
#undef __shared__
#define __shared__ static
inline float rsqrtf(float x) {{ return 1.0f / sqrtf(x); }}
#include "linear_attention/{stem}.cu"
using namespace emulated;
template <class Arguments>
int run_all(void (*function)(Arguments), const void* given, size_t bytes, const int* grid, int threads) {{
  if (bytes != sizeof(Arguments)) return kOtherArguments;
  Arguments arguments;
  memcpy(static_cast<void*>(&arguments), given, bytes);
  kernel = [&] {{ function(arguments); }};
  gridDim = {{grid[0], grid[1], grid[2]}}, blockDim = {{threads, 1, 1}};
  for (int z = 0; z < grid[2]; z++)
    for (int y = 0; y < grid[1]; y++)
      for (int x = 0; x < grid[0]; x++) {{
        blockIdx = {{x, y, z}};
        if (!run_block(threads)) return kStuck;
      }}
  return kDone;
}}
extern "C" __attribute__((visibility("default"))) int run(const char* kind, const void* arguments, size_t bytes,
                                                          const int* grid, int threads) {{
{calls}  return kNoSuchKernel;
}}
"""
KERNELS = {
    "gated_delta_steps": (
        "gated_delta_steps_32",
        "gated_delta_steps_64",
        "gated_delta_replay_32",
        "gated_delta_replay_64",
    ),
    "causal_conv": ("causal_conv_steps_vectors_4", "causal_conv_tiles_vectors_4", "causal_conv_replay"),
}
KEY_HEADS, HEADS, DIM, TAPS, LAYERS, SLOTS = 2, 4, 128, 4, 2, 3
CHANNELS = (2 * KEY_HEADS + HEADS) * DIM


class Kernel:
    """As `openinfer_kernels.cuda.common.launch.Kernel` is called."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self._run, self._name = library.run, name.encode()

    def __call__(self, grid: Any, block: Any, arguments: list[Any], *, overlap: bool) -> None:
        (given,) = arguments
        size = ctypes.c_size_t(ctypes.sizeof(given))
        assert self._run(self._name, ctypes.byref(given), size, (ctypes.c_int * 3)(*grid), block[0]) == 0


def empty(shape: Any, dtype: Any) -> np.ndarray:
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.full(count + 64, 0xFF, np.uint8)
    begin = -memory.ctypes.data % 64
    return memory[begin : begin + count].view(dtype).reshape(shape)


@pytest.fixture(scope="module")
def operators(compile_emulated: Callable[..., Any]) -> Iterator[Any]:
    """`CausalConv`, `GatedDeltaRule` and `KeptStates` over arrays of NumPy."""
    if importlib.util.find_spec("cupy") is not None:
        pytest.skip("CuPy is installed: kernels run on its GPU")
    libraries: dict[str, ctypes.CDLL] = {}
    for stem, names in KERNELS.items():
        calls = "".join(
            f'  if (!strcmp(kind, "{name}")) return run_all({name}, arguments, bytes, grid, threads);\n'
            for name in names
        )
        libraries[stem] = ctypes.CDLL(str(compile_emulated(stem, SOURCE.format(stem=stem, calls=calls))))

    def kernel(stem: str, name: str, *, shared_bytes: int = 0) -> Kernel | None:
        return Kernel(libraries[stem], name) if name in KERNELS.get(stem, ()) else None

    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=np.ndarray, empty=empty, zeros=aligned_zeros))
        patch.setitem(sys.modules, "cuda.bindings.driver", MagicMock())
        arrays = importlib.import_module("openinfer_kernels.cuda.common.arrays")
        patch.setattr(arrays, "address", lambda array: array.ctypes.data)
        conv = importlib.import_module("openinfer_kernels.cuda.linear_attention.causal_conv")
        rule = importlib.import_module("openinfer_kernels.cuda.linear_attention.gated_delta_rule")
        states = importlib.import_module("openinfer_kernels.cuda.linear_attention.kept_inputs")
        device = SimpleNamespace(kernel=kernel, max_shared_bytes=1 << 20)
        conv, rule = conv.CausalConv(device), rule.GatedDeltaRule(device)
        yield SimpleNamespace(conv=conv, rule=rule, kept=states.KeptStates(conv, rule))
    for name in set(sys.modules) - before:
        if name.startswith("openinfer_kernels.cuda"):
            del sys.modules[name]


def aligned_zeros(shape: Any, dtype: Any) -> np.ndarray:
    found = empty(shape, dtype)
    found[...] = 0
    return found


class Layers:
    """Two layers of random weights, and what some sequences are given."""

    def __init__(self, operators: Any, on_device: Callable[[np.ndarray], np.ndarray], *, tokens: int) -> None:
        rng = np.random.default_rng(3)
        self._operators, self._on_device = operators, on_device
        self.conv = on_device(rng.normal(size=(SLOTS, LAYERS, CHANNELS, TAPS - 1)))
        self.state = empty((SLOTS, LAYERS, HEADS, DIM, DIM), np.float32)
        self.state[...] = rng.normal(size=self.state.shape) / 8
        self.weight = on_device(rng.normal(size=(CHANNELS, TAPS)))
        self.a_log, self.dt_bias = empty(HEADS, np.float32), empty(HEADS, np.float32)
        self.a_log[...], self.dt_bias[...] = np.log(rng.uniform(0.02, 2.0, HEADS)), rng.normal(size=HEADS)
        self.inputs = rng.normal(size=(LAYERS, SLOTS, tokens, CHANNELS + 2 * HEADS))

    def run(self, rows: list[tuple[int, int, int]], *, kept: Any = None, kept_rows: Any = None) -> np.ndarray:
        """Outputs of all layers for rows of (slot, first token, tokens)."""
        counts = [count for _, _, count in rows]
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        batch = AttentionBatch(
            positions=np.concatenate([np.arange(first, first + n) + 7 for _, first, n in rows]).astype(np.int32),
            query_starts=starts,
            context_lens=np.array([7 + first + count for _, first, count in rows], np.int32),
            block_tables=(),
            cache_slots=(),
            max_query_tokens=max(counts),
            max_context_tokens=64,
            state_slots=np.array([slot for slot, _, _ in rows], np.int32),
            kept=kept,
            kept_rows=kept_rows,
        )
        outs = []
        for layer in range(LAYERS):
            given = np.concatenate([self.inputs[layer, slot, first : first + n] for slot, first, n in rows])
            x = self._on_device(given)
            qkv = self._operators.conv.causal_conv_silu(
                x[:, :CHANNELS], self.weight, state=self.conv, layer=layer, batch=batch
            )
            names = {"a_log": self.a_log, "dt_bias": self.dt_bias, "state": self.state}
            gates = self._on_device(given[:, CHANNELS:])
            outs.append(self._operators.rule.gated_delta_rule(qkv, gates, **names, layer=layer, batch=batch))
        return np.stack([np.asarray(out, np.float32) for out in outs])


@pytest.mark.parametrize(("tokens", "accepted"), [(3, (1, 2)), (3, (3, 1)), (6, (5, 2))])
def test_states_that_take_in_what_was_kept_are_those_of_single_steps(
    operators: Any, on_device: Any, tokens: int, accepted: tuple[int, int]
) -> None:
    drafted, plain = (Layers(operators, on_device, tokens=tokens) for _ in range(2))
    kept = operators.kept.keep_inputs(conv=drafted.conv, state=drafted.state, most_tokens=tokens)
    assert kept is not None
    states = drafted.state.copy(), drafted.conv.copy()
    # Slots 2 and 0 have drafts, and slot 1 one token without: its states take that in at once.
    out = drafted.run([(2, 0, tokens), (1, 0, 1), (0, 0, tokens)], kept=kept, kept_rows=np.array([1, 0, 1], np.int32))
    for before, after in zip(states, (drafted.state, drafted.conv), strict=True):
        np.testing.assert_array_equal(after[[0, 2]], before[[0, 2]])
        assert (after[1] != before[1]).any()
    slots, counts = np.array([2, 1, 0], np.int32), np.array([accepted[0], 0, accepted[1]], np.int32)
    operators.kept.replay_inputs(kept, conv=drafted.conv, state=drafted.state, slots=slots, counts=counts)

    steps = [plain.run([(1, 0, 1)])]
    for slot, count in ((2, accepted[0]), (0, accepted[1])):
        for token in range(count):
            found = plain.run([(slot, token, 1)])
            place = {2: 0, 0: tokens + 1}[slot] + token
            np.testing.assert_array_equal(out[:, place], found[:, 0])
    np.testing.assert_array_equal(out[:, tokens], steps[0][:, 0])
    np.testing.assert_array_equal(drafted.conv, plain.conv)
    np.testing.assert_array_equal(drafted.state, plain.state)

"""Logits against those that transformers' Gemma classes computed, however a sequence is cut into steps; and mutants.

`tools/golden/gemma.py` recorded them in float32. Windows are shorter than the sequences, and end inside of blocks, at
their borders and between chunks.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openinfer_engine.testing import Golden, RecordedModel, check_family, check_steps
from openinfer_gemma import Gemma
from openinfer_kernels import Array, PagedCache
from openinfer_kernels.cpu import CpuOps

TOLERANCE = 1e-4
"""The largest difference seen here was 1.2e-5."""
WIDE_TOLERANCE = 1e-3
"""8e-5 with sums over thousands of values, and logits up to 69."""


@pytest.fixture
def recorded(model_dir: Path, harness: Any) -> RecordedModel:
    return RecordedModel(make=harness, model_dir=model_dir, tolerance=TOLERANCE)


def test_recorded_sequences_are_long_and_their_logits_far_from_flat(recorded: RecordedModel) -> None:
    recorded.check_recording([150, 41, 7])


def test_whole_prefill_gives_the_recorded_logits(recorded: RecordedModel) -> None:
    recorded.check_whole()


@pytest.mark.parametrize("block_tokens", [1, 5, 16])
def test_prefill_of_all_sequences_in_one_step_gives_the_recorded_logits(
    recorded: RecordedModel, block_tokens: int
) -> None:
    recorded.check_together(block_tokens)


@pytest.mark.parametrize("chunk", [1, 7, 16, 20, 64, 149])
def test_chunked_prefill_gives_the_recorded_logits(recorded: RecordedModel, chunk: int) -> None:
    recorded.check_chunks(chunk)


def test_decode_after_prefill_gives_the_recorded_logits(recorded: RecordedModel) -> None:
    recorded.check_decode()


@pytest.mark.parametrize("seed", range(3))
def test_mixed_steps_of_chunks_and_decode_rows_give_the_recorded_logits(recorded: RecordedModel, seed: int) -> None:
    recorded.check_mixed(seed)


def test_prefix_of_another_sequence_gives_the_recorded_logits(recorded: RecordedModel) -> None:
    recorded.check_cached_prefix()


def test_ranks_together_give_the_recorded_logits(recorded: RecordedModel) -> None:
    recorded.check_ranks(2, prompt=30)


def test_models_of_real_widths_give_the_recorded_logits(wide_dir: Path, harness: Any) -> None:
    golden, model = Golden(wide_dir), harness(wide_dir, dummy=True, max_model_tokens=64)
    whole = model.step({name: golden.tokens(name) for name in golden.sequences})
    assert max(golden.error(name, logits) for name, logits in whole.items()) < WIDE_TOLERANCE
    model.restart("0")
    tokens = golden.tokens("0")
    model.step({"0": tokens[:50]})
    assert golden.error("0", model.step({"0": tokens[50:]})["0"], first=50) < WIDE_TOLERANCE


def rope(theta: float, factor: float = 1.0) -> dict[str, Any]:
    return {"rope_type": "linear", "rope_theta": theta, "factor": factor}


WRONG_CONFIGS = [
    ("gemma2", "window + 1", {"sliding_window": 21}),
    ("gemma2", "window - 1", {"sliding_window": 19}),
    ("gemma2", "no windows", {"layer_types": ["full_attention"] * 4}),
    ("gemma2", "windows in the other layers", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
    ("gemma2", "no cap of scores", {"attn_logit_softcapping": None}),
    ("gemma2", "no cap of logits", {"final_logit_softcapping": None}),
    ("gemma2", "scale of the head's size", {"query_pre_attn_scalar": 16}),
    ("gemma2", "another base", {"rope_parameters": rope(20000.0)}),
    ("gemma2", "embedding's scale not rounded", {"dtype": "float32"}),
    ("gemma3", "window + 1", {"sliding_window": 17}),
    ("gemma3", "window - 1", {"sliding_window": 15}),
    ("gemma3", "every fifth layer without one", {"layer_types": None, "sliding_window_pattern": 5}),
    ("gemma3", "scale of the head's size", {"query_pre_attn_scalar": 16}),
    ("gemma3", "a cap of logits", {"final_logit_softcapping": 30.0}),
    ("gemma3", "embedding's scale not rounded", {"dtype": "float32"}),
    (
        "gemma3",
        "bases swapped",
        {"rope_parameters": {"full_attention": rope(1e4, 8.0), "sliding_attention": rope(1e6)}},
    ),
    (
        "gemma3",
        "the windows' positions divided",
        {"rope_parameters": {"full_attention": rope(1e6), "sliding_attention": rope(1e4, 8.0)}},
    ),
    (
        "gemma3",
        "no positions divided",
        {"rope_parameters": {"full_attention": rope(1e6), "sliding_attention": rope(1e4)}},
    ),
]


@pytest.mark.parametrize(
    ("name", "change"),
    [(name, change) for name, _, change in WRONG_CONFIGS],
    ids=[f"{name}: {what}" for name, what, _ in WRONG_CONFIGS],
)
def test_recorded_logits_notice_a_wrong_config(fixtures: Path, harness: Any, name: str, change: dict[str, Any]) -> None:
    RecordedModel(make=harness, model_dir=fixtures / name, tolerance=TOLERANCE).check_notices(change)


class GatedBySilu(CpuOps):
    def linear_geglu(self, x: Array, gate_up: Array, batch: Any) -> Array:
        return self.linear_swiglu(x, gate_up, batch)


class NormsNotCentred(CpuOps):
    def zero_centred_rms_norm(self, x: Array, weight: Array, *, eps: float) -> Array:
        return self.rms_norm(x, weight, eps=eps)


class HeadNormsNotCentred(CpuOps):
    def zero_centred_qk_norm_rope_append(self, qkv: Array, **named: Any) -> Array:
        return self.qk_norm_rope_append(qkv, **named)


class NothingCapped(CpuOps):
    def soft_cap(self, logits: Array, *, cap: float) -> None:
        """Leaves them as they are."""


class WindowsOfDecodeRowsOneShort(CpuOps):
    def paged_attention(self, q: Array, cache: PagedCache, *, batch: Any, window: int | None, **named: Any) -> Array:
        if window is not None and batch.max_query_tokens == 1:
            window -= 1
        return super().paged_attention(q, cache, batch=batch, window=window, **named)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("gemma2", GatedBySilu),
        ("gemma3", GatedBySilu),
        ("gemma2", NormsNotCentred),
        ("gemma3", NormsNotCentred),
        ("gemma3", HeadNormsNotCentred),
        ("gemma2", NothingCapped),
        ("gemma2", WindowsOfDecodeRowsOneShort),
        ("gemma3", WindowsOfDecodeRowsOneShort),
    ],
)
def test_recorded_logits_notice_a_wrong_operator(fixtures: Path, harness: Any, name: str, wrong: type[CpuOps]) -> None:
    """A prompt of 40 tokens, then one at a time; some mistakes are in decode rows alone."""
    golden, model = Golden(fixtures / name), harness(fixtures / name, ops=wrong())
    tokens = golden.tokens("0")
    steps = [tokens[:40], *([token] for token in tokens[40:])]
    logits = np.concatenate([model.step({"0": step})["0"] for step in steps])
    assert golden.error("0", logits) > 10 * TOLERANCE


def test_conformance_kit_finds_nothing_wrong_and_notices_windows_that_depend_on_the_step(
    model_dir: Path, harness: Any
) -> None:
    tokens = Golden(model_dir).tokens("0")
    logits = harness(model_dir).step({"0": tokens})["0"]
    check_family(Gemma.definition, model_dir, tokens, logits, tolerance=TOLERANCE, ranks=(2,))
    wrong = harness(model_dir, ops=WindowsOfDecodeRowsOneShort(), num_blocks=1000)
    with pytest.raises(AssertionError, match="prompt, then token by token: logits differ"):
        check_steps(wrong, tokens, logits, tolerance=TOLERANCE, name="windows one short")

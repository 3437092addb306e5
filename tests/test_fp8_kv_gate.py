"""KV in FP8 of every family that has it: the same bits however a sequence is cut, and a gate of its own with controls.

The gate, stated before it was run against the controls, over 112 positions of a trained toy (openinfer-tiny-model; 8
layers, heads of 32): against KV in float32, of those of the reference's eight likeliest tokens that it gives more than
one in a thousand, the mean |difference of log-probabilities| is at most 0.15 and its 99th percentile at most 1.5, and
what the choice costs by the reference's measure (regret) is at most 0.25. Heads of 32 average less than those of 128
and a model of width 192 has little to spare: published sizes have the gate of `docs/reference/kv-cache-dtype.md`.
"""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tokenizers

from openinfer_core import Refused
from openinfer_deepseek.family import DeepseekV2Definition
from openinfer_engine.model import ModelDefinition
from openinfer_engine.testing import FamilyHarness, check_steps
from openinfer_kernels import CacheFormat
from openinfer_kernels.cpu import BatchInvariantCpuOps, CpuOps
from openinfer_kv_cache import KvDtype
from openinfer_llama.family import LlamaDefinition
from openinfer_qwen3.family import Qwen3Definition, Qwen3MoeDefinition
from openinfer_qwen35.family import Qwen35Definition, Qwen35MoeDefinition
from openinfer_tiny_model import model_dir

PACKAGES = Path(__file__).parents[1] / "packages"
FP8 = KvDtype.FLOAT8_E4M3
TEXTS = (
    (
        "The capital of France is Paris. The capital of Japan is Tokyo. A young dog is called a puppy. 12 + 30 = 42. "
        "The opposite of hot is cold. Once upon a time there was a small fox who lived in a forest."
    ),
    (
        "<|im_start|>user\nWhat is the currency of Japan?<|im_end|>\n<|im_start|>assistant\nThe currency of Japan is "
        "the yen.<|im_end|>\n<|im_start|>user\nWhat is the chemical symbol of gold?<|im_end|>\n<|im_start|>assistant\n"
    ),
)
MEAN, P99, REGRET = 0.15, 1.5, 0.25


class Seen(NamedTuple):
    """What the gate measures."""

    mean: float
    p99: float
    regret: float

    @property
    def passes(self) -> bool:
        return self.mean <= MEAN and self.p99 <= P99 and self.regret <= REGRET


class OtherScales(CpuOps):
    """Attention that reads wrong scales."""

    def __init__(self, mistake: str) -> None:
        self._mistake = mistake

    def paged_attention(self, q: Any, cache: Any, **keywords: Any) -> Any:  # type: ignore[override]
        scales = cache.scales.copy()
        if self._mistake == "V's scales doubled":
            scales[:, :, 1] *= 2
        elif self._mistake == "K's scales of the token before":
            before = np.roll(scales[:, :, 0], 1, axis=-1)
            scales[:, :, 0] = np.where(np.isfinite(before), before, scales[:, :, 0])  # not those of no token
        else:
            scales[...] = 1
        return CpuOps.paged_attention(q, dataclasses.replace(cache, scales=scales), **keywords)


def log_probabilities(ops: CpuOps, kv_dtype: KvDtype | None) -> np.ndarray:
    tokenizer = tokenizers.Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    sizes: dict[str, Any] = {"block_tokens": 16, "num_blocks": 40, "kv_dtype": kv_dtype}
    found = [
        FamilyHarness(Qwen3Definition(), model_dir(), ops=ops, **sizes).step({"text": tokenizer.encode(text).ids})
        for text in TEXTS
    ]
    logits = np.concatenate([each["text"] for each in found]).astype(np.float64)
    return logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)


@pytest.fixture(scope="module")
def reference() -> np.ndarray:
    return log_probabilities(CpuOps(), None)


def measured(reference: np.ndarray, found: np.ndarray) -> Seen:
    likeliest = np.argsort(-reference, axis=1)[:, :8]
    expected = np.take_along_axis(reference, likeliest, axis=1)
    differences = np.abs(np.take_along_axis(found, likeliest, axis=1) - expected)[expected > np.log(1e-3)]
    regret = reference.max(axis=1) - reference[np.arange(len(reference)), found.argmax(axis=1)]
    return Seen(float(differences.mean()), float(np.quantile(differences, 0.99)), float(regret.max()))


def test_tiny_model_passes_its_gate(reference: np.ndarray) -> None:
    seen = measured(reference, log_probabilities(CpuOps(), FP8))
    assert seen.passes, seen
    assert seen.mean > 1e-3, f"nothing was rounded: {seen}"


@pytest.mark.parametrize("mistake", ["V's scales doubled", "K's scales of the token before", "no scales"])
def test_gate_notices_wrong_scales(reference: np.ndarray, mistake: str) -> None:
    seen = measured(reference, log_probabilities(OtherScales(mistake), FP8))
    assert seen.mean > 3 * MEAN, seen
    assert seen.p99 > 2 * P99, seen


@pytest.mark.parametrize(
    ("definition", "folder"),
    [
        (Qwen35Definition(), "openinfer-qwen35/tests/fixtures"),
        (Qwen35MoeDefinition(), "openinfer-qwen35/tests/fixtures_moe"),
        (Qwen3MoeDefinition(), "openinfer-qwen3/tests/fixtures_moe"),
        (LlamaDefinition(), "openinfer-llama/tests/fixture_mistral"),  # with a window
    ],
    ids=["qwen35", "qwen35_moe", "qwen3_moe", "mistral"],
)
def test_steps_however_cut_have_the_bits_of_a_whole_prompt(definition: ModelDefinition[Any], folder: str) -> None:
    (config, *_) = sorted((PACKAGES / folder).rglob("config.json"))
    tokens = np.random.default_rng(4).integers(0, 60, 45).tolist()
    made: dict[str, Any] = {"ops": BatchInvariantCpuOps(), "num_blocks": 300, "kv_dtype": FP8}
    whole = FamilyHarness(definition, config.parent, **made).step({"whole": tokens})["whole"]
    check_steps(FamilyHarness(definition, config.parent, **made), tokens, whole, tolerance=0.0, name="KV in FP8")
    exact = FamilyHarness(definition, config.parent, num_blocks=300).step({"whole": tokens})["whole"]
    assert 1e-4 < float(np.abs(whole - exact).max()) < 2.5  # a mixture may choose another expert


def test_family_of_latents_refuses_by_name() -> None:
    with pytest.raises(Refused, match="the family deepseek_v2 does not keep its KV in fp8"):
        DeepseekV2Definition().check_cache_format(CacheFormat.FP8)

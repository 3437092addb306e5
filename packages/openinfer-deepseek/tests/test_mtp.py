"""The drafting layer of DeepSeek-V3: what it drafts, that it changes no token, and what is refused."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from openinfer_core import Refused, read_config
from openinfer_deepseek.family import DeepseekV3Definition
from openinfer_deepseek.mtp import DeepseekMtpDrafter, mtp_tensors
from openinfer_engine import Checkpoint, EngineOptions, build_loop, resolve
from openinfer_engine.testing import (
    DraftLog,
    agreeing_logits,
    check_model_drafter,
    drafts_after_prefixes,
    record_drafts,
)
from openinfer_engine.weights.stored_tensor import StoredTensor
from openinfer_kernels.cpu import CpuOps

TOLERANCE = 2e-3
SOURCE = Path(__file__).parent / "fixtures_v3" / "moonlight"
DRAFTS = 3
VOCABULARY = "embed_tokens", "shared_head.head"


def add_mtp(target: Path, *, is_shared: bool = False) -> Path:
    """A copy of a recorded model, in float32, with random weights of the layer; `is_shared`: without its vocabulary."""
    published = json.loads((SOURCE / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    config = DeepseekV3Definition().parse(published)
    with Checkpoint.open(SOURCE) as checkpoint:
        tensors: dict[str, Any] = {
            name: np.asarray(CpuOps().upload_weight(checkpoint.read(name)), np.float32) for name in checkpoint.tensors
        }
    rng = np.random.default_rng(1)
    for name, spec in mtp_tensors(config, {}).items():
        shape = spec.shape if isinstance(spec, StoredTensor) else spec
        is_vector = len(shape) == 1
        spread = 0.1 if is_vector else 1.5 * shape[-1] ** -0.5
        mean = float(is_vector and "bias" not in name)
        if not (is_shared and any(part in name for part in VOCABULARY)):
            tensors[name] = rng.normal(mean, spread, shape).astype(np.float32)
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text(json.dumps(published))
    save_file(tensors, target / "model.safetensors")
    return target


@dataclass(frozen=True, slots=True)
class Mtp64:
    """The layer in float64: transformers' `modeling_deepseek_v3` around vLLM's `deepseek_mtp`.

    Every token after the first is one pair of the hidden state before it and its embedding; the pairs are one sequence,
    counted from 0, which the layer reads from its first on.
    """

    tensors: dict[str, NDArray[Any]]
    config: dict[str, Any]
    shift: int = 0
    """A mutant's: pairs of a token and a hidden state of another row."""
    is_swapped: bool = False
    """A mutant's: the hidden state first."""
    keeps_first_embedding: bool = False
    """A mutant's: the embedding at position 0 is not taken to be zero."""
    recycles_stream: bool = False
    """A mutant's: further drafts take the layer's output before the norm."""

    def drafts(self, token_ids: list[int], hidden: NDArray[Any]) -> list[NDArray[np.float64]]:
        """Logits of each draft, which follow from the likeliest tokens before; `hidden [tokens - 1, h]`."""
        logits: list[NDArray[np.float64]] = []
        ids, states = list(token_ids[1:]), [each.astype(np.float64) for each in hidden]
        if self.shift:
            states = [np.zeros_like(states[0])] * self.shift + states[: len(states) - self.shift]
        for _ in range(DRAFTS):
            x = np.stack([self._input(*each) for each in zip(range(len(ids)), ids, states, strict=True)])
            last = self._layer(x)
            out = self._norm(last, "shared_head.norm")
            logits.append(self._vocabulary("shared_head.head", "lm_head") @ out)
            ids.append(int(np.argmax(logits[-1])))
            states.append(last if self.recycles_stream else out)
        return logits

    def _of(self, name: str) -> NDArray[np.float64]:
        return self.tensors[f"model.layers.2.{name}.weight"].astype(np.float64)

    def _vocabulary(self, own: str, models: str) -> NDArray[np.float64]:
        found = self.tensors.get(f"model.layers.2.{own}.weight")
        return (self.tensors[f"{models}.weight"] if found is None else found).astype(np.float64)

    def _norm(self, x: NDArray[Any], name: str, eps: float | None = None) -> NDArray[np.float64]:
        eps = self.config["rms_norm_eps"] if eps is None else eps
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * self._of(name)

    def _input(self, position: int, token_id: int, state: NDArray[Any]) -> NDArray[np.float64]:
        embedded = self._vocabulary("embed_tokens", "model.embed_tokens")[token_id]
        if position == 0 and not self.keeps_first_embedding:
            embedded = np.zeros_like(embedded)
        halves = [self._norm(embedded, "enorm"), self._norm(state, "hnorm")]
        return self._of("eh_proj") @ np.concatenate(halves[::-1] if self.is_swapped else halves)

    def _layer(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """What the layer gives for the last pair."""
        last = x[-1] + self._attention(self._norm(x, "input_layernorm"))[-1]
        return last + self._mixture(self._norm(last, "post_attention_layernorm"))

    def _attention(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        config, tokens = self.config, len(x)
        heads, nope, rank = config["num_attention_heads"], config["qk_nope_head_dim"], config["kv_lora_rank"]
        q = (x @ self._of("self_attn.q_proj").T).reshape(tokens, heads, -1)
        compressed = x @ self._of("self_attn.kv_a_proj_with_mqa").T
        latent = self._norm(compressed[:, :rank], "self_attn.kv_a_layernorm", eps=1e-6)
        both = (latent @ self._of("self_attn.kv_b_proj").T).reshape(tokens, heads, -1)
        rotated = self._rotated(compressed[:, None, rank:])
        k = np.concatenate((both[..., :nope], np.repeat(rotated, heads, axis=1)), axis=-1)
        q = np.concatenate((q[..., :nope], self._rotated(q[..., nope:])), axis=-1)
        scores = np.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        scores[:, np.triu(np.ones((tokens, tokens), bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out = np.einsum("hqk,khd->qhd", weights, both[..., nope:])
        return out.reshape(tokens, -1) @ self._of("self_attn.o_proj").T

    def _rotated(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        dim = x.shape[-1]
        angles = np.outer(np.arange(len(x)), self.config["rope_theta"] ** (-np.arange(0, dim, 2) / dim))
        turned = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)[:, None]
        return np.stack((turned.real, turned.imag), axis=-1).reshape(x.shape)

    def _mixture(self, y: NDArray[np.float64]) -> NDArray[np.float64]:
        scores = 1 / (1 + np.exp(-self._of("mlp.gate") @ y))
        bias = self.tensors["model.layers.2.mlp.gate.e_score_correction_bias"].astype(np.float64)
        chosen = np.argsort(scores + bias)[::-1][: self.config["num_experts_per_tok"]]
        weights = scores[chosen] / scores[chosen].sum() * self.config["routed_scaling_factor"]
        routed = (w * self._mlp(y, f"mlp.experts.{e}") for w, e in zip(weights, chosen.tolist(), strict=True))
        return sum(routed, start=self._mlp(y, "mlp.shared_experts"))

    def _mlp(self, y: NDArray[np.float64], name: str) -> NDArray[np.float64]:
        gate = self._of(f"{name}.gate_proj") @ y
        return self._of(f"{name}.down_proj") @ (gate / (1 + np.exp(-gate)) * (self._of(f"{name}.up_proj") @ y))


@pytest.fixture(scope="module")
def mtp_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_mtp(tmp_path_factory.mktemp("mtp"))


def recorded(folder: Path, *, rounds: int) -> DraftLog:
    sizes = {"vocab_size": 135, "max_drafts": DRAFTS}
    return record_drafts(DeepseekV3Definition(), folder, DeepseekMtpDrafter, rounds=rounds, **sizes)


@pytest.fixture(scope="module")
def log(mtp_dir: Path) -> DraftLog:
    return recorded(mtp_dir, rounds=2)


def layer(folder: Path, **mutant: Any) -> Mtp64:
    with Checkpoint.open(folder) as checkpoint:
        tensors = {name: np.array(checkpoint.read(name)) for name in checkpoint.tensors}
    return Mtp64(tensors, read_config(folder), **mutant)


def wrong_drafts(log: DraftLog, formulas: Mtp64, *, limit: int = 1000) -> int:
    """Contexts of which a draft is not the formula's; near ties are right either way, and end a row."""
    wrong = 0
    for context in log.contexts[:limit]:
        ids = list(context.token_ids)
        hidden = np.stack([log.hidden[tuple(ids[: n + 1])] for n in range(len(ids) - 2)] + [context.last_hidden])
        for draft, logits in zip(context.drafts, formulas.drafts(ids, hidden), strict=True):
            if not agreeing_logits(logits, draft, tolerance=TOLERANCE):
                wrong += 1
            if int(np.argmax(logits)) != draft:
                break
    return wrong


def test_drafts_are_those_of_the_formulas_in_a_thousand_contexts(mtp_dir: Path, log: DraftLog) -> None:
    assert len(log.contexts) >= 1000
    assert wrong_drafts(log, layer(mtp_dir)) == 0


def test_drafts_with_the_vocabulary_of_the_model_are_those_of_the_formulas(tmp_path: Path) -> None:
    folder = add_mtp(tmp_path / "shared", is_shared=True)
    assert wrong_drafts(recorded(folder, rounds=1), layer(folder), limit=100) == 0


@pytest.mark.parametrize(
    "mutant",
    [
        {"shift": 1},
        {"is_swapped": True},
        {"keeps_first_embedding": True},
        {"recycles_stream": True},
        {"plain_norm": True},
    ],
    ids=str,
)
def test_drafts_of_mutants_of_the_formulas_differ(mtp_dir: Path, log: DraftLog, mutant: dict[str, Any]) -> None:
    plain_norm = mutant.pop("plain_norm", False)
    formulas = layer(mtp_dir, **mutant)
    if plain_norm:  # as if the hidden state before the final norm were read: its weights are missing
        formulas.tensors["model.layers.2.hnorm.weight"] /= formulas.tensors["model.norm.weight"]
    assert wrong_drafts(log, formulas, limit=150) > 10


@pytest.mark.parametrize(
    ("happens", "options"),
    [
        ("preemptions", {"max_step_tokens": 24, "num_blocks": 19}),
        ("cached_tokens", {"num_blocks": 40, "tensor_parallel_size": 2}),
        ("cached_tokens", {"num_blocks": 40, "max_drafts": 9}),
    ],
)
def test_answers_with_the_layer_are_those_without(mtp_dir: Path, happens: str, options: dict[str, Any]) -> None:
    stats = check_model_drafter(DeepseekV3Definition(), mtp_dir, DeepseekMtpDrafter, **options)
    assert getattr(stats, happens) > 0


def test_drafts_after_a_cached_prefix_are_those_of_a_computed_one(mtp_dir: Path) -> None:
    """Bit for bit: blocks have the hidden state at their end, and the layer's latents."""
    cached, computed = drafts_after_prefixes(DeepseekV3Definition(), mtp_dir, DeepseekMtpDrafter, vocab_size=135)
    assert cached == computed


def asked(folder: Path, **options: Any) -> Any:
    return resolve(DeepseekV3Definition(), folder, EngineOptions(num_blocks=40, speculative="deepseek-mtp", **options))


def test_plan_shows_the_layer(mtp_dir: Path) -> None:
    plan = asked(mtp_dir).plan()
    assert plan.parts["drafter"].startswith("deepseek-mtp (openinfer-deepseek ")
    assert plan.parts["drafter_kv"] == "2 layers, 512 bytes of each token's KV"
    assert plan.memory_bytes["drafter_weights"] > 0


def test_what_the_layer_cannot_do_is_refused_by_name(mtp_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(
        Refused, match=r"drafter deepseek-mtp .*drafting layer of DeepSeek-V3.*, and this model has none"
    ):
        asked(SOURCE)
    folder = add_mtp(tmp_path / "several")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 2}))
    with pytest.raises(Refused, match=r"num_nextn_predict_layers: 1\), and this model has 2"):
        asked(folder)


def test_a_layer_with_numbers_that_are_not_finite_is_refused(tmp_path: Path) -> None:
    folder = add_mtp(tmp_path / "nan")
    with Checkpoint.open(folder) as checkpoint:
        tensors = {name: np.array(checkpoint.read(name)) for name in checkpoint.tensors}
    tensors["model.layers.2.mlp.experts.3.up_proj.weight"][1, 2] = np.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        Refused, match=r"the drafter's tensor model\.layers\.2\.mlp\.experts\.3\.up_proj\.weight has num"
    ):
        build_loop(asked(folder))

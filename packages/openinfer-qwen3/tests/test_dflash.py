"""DFlash folders: what they draft, that they change no token, and what is refused."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from openinfer_core import InvalidCheckpoint, Refused, read_config
from openinfer_engine import Checkpoint, EngineOptions, build_loop, resolve
from openinfer_engine.testing import (
    DraftLog,
    RecordingFactory,
    agreeing_logits,
    check_model_drafter,
    make_drafting_loop,
    random_requests,
    run_at_once,
    run_together,
)
from openinfer_kernels.cpu import CpuOps
from openinfer_qwen3.dflash import DFlashDrafter, dflash_tensors, read_dflash
from openinfer_qwen3.family import Qwen3Definition

TOLERANCE = 2e-3
MODEL = Path(__file__).parent / "fixtures" / "tied"
CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "block_size": 8,
    "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 2]},
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 96,
    "intermediate_size": 112,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "vocab_size": 257,
}
DRAFTS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter of random weights."""
    target = tmp_path_factory.mktemp("dflash")
    (target / "config.json").write_text(json.dumps(CONFIG))
    rng = np.random.default_rng(0)
    model = Qwen3Definition().parse(read_config(MODEL))
    tensors: dict[str, Any] = {}
    for name, shape in dflash_tensors(read_dflash(target, model, {})).items():
        is_vector = len(shape) == 1
        spread = 0.2 if is_vector else 2 * shape[-1] ** -0.5
        tensors[name] = rng.normal(float(is_vector), spread, shape).astype(np.float32)
    save_file(tensors, target / "model.safetensors")
    return target


@dataclass(frozen=True, slots=True)
class DFlash64:
    """The drafter in float64 by the equations of vLLM's `qwen3_dflash`."""

    tensors: dict[str, NDArray[Any]]
    embedding: NDArray[Any]
    shift: int = 0
    """A mutant's: hidden states of another row."""
    is_causal: bool = False
    """A mutant's: masks do not see those after them."""
    is_unnormed: bool = False
    """A mutant's: the context before its norm."""

    def logits(self, token_ids: list[int], taps: NDArray[Any]) -> NDArray[np.float64]:
        """`[DRAFTS, V]`; `taps [tokens - 1, taps h]`."""
        context = np.roll(taps, self.shift, axis=0).astype(np.float64) @ self._of("fc").T
        context = context if self.is_unnormed else self._norm(context, "hidden_norm")
        block = [token_ids[-1]] + [CONFIG["dflash_config"]["mask_token_id"]] * DRAFTS
        x = self.embedding[block].astype(np.float64)
        for index in range(CONFIG["num_hidden_layers"]):
            layer = f"layers.{index}"
            x = x + self._attention(self._norm(x, f"{layer}.input_layernorm"), context, layer)
            y = self._norm(x, f"{layer}.post_attention_layernorm")
            gate, up = y @ self._of(f"{layer}.mlp.gate_proj").T, y @ self._of(f"{layer}.mlp.up_proj").T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ self._of(f"{layer}.mlp.down_proj").T
        return self._norm(x, "norm")[1:] @ self.embedding.astype(np.float64).T

    def _of(self, name: str) -> NDArray[np.float64]:
        return self.tensors[f"{name}.weight"].astype(np.float64)

    def _norm(self, x: NDArray[Any], name: str) -> NDArray[np.float64]:
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + CONFIG["rms_norm_eps"]) * self._of(name)

    def _attention(self, x: NDArray[Any], context: NDArray[Any], layer: str) -> NDArray[np.float64]:
        dim, known = CONFIG["head_dim"], len(context)
        both = np.concatenate((context, x))
        q = (x @ self._of(f"{layer}.self_attn.q_proj").T).reshape(len(x), -1, dim)
        k, v = ((both @ self._of(f"{layer}.self_attn.{name}_proj").T).reshape(len(both), -1, dim) for name in "kv")
        q = _rotated(self._norm(q, f"{layer}.self_attn.q_norm"), first=known)
        k = _rotated(self._norm(k, f"{layer}.self_attn.k_norm"), first=0)
        out = np.empty_like(q)
        for head in range(q.shape[1]):
            group = head // (q.shape[1] // k.shape[1])
            scores = q[:, head] @ k[:, group].T * dim**-0.5
            if self.is_causal:
                scores[np.triu(np.ones(scores.shape, bool), known + 1)] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v[:, group]
        return out.reshape(len(x), -1) @ self._of(f"{layer}.self_attn.o_proj").T


def _rotated(x: NDArray[Any], *, first: int) -> NDArray[Any]:
    frequencies = CONFIG["rope_theta"] ** (-np.arange(0, x.shape[-1], 2) / x.shape[-1])
    angles = np.outer(first + np.arange(len(x)), frequencies)[:, None]
    low, high = np.split(x, 2, axis=-1)
    return np.concatenate(
        (low * np.cos(angles) - high * np.sin(angles), high * np.cos(angles) + low * np.sin(angles)), -1
    )


def named(folder: Path) -> dict[str, Any]:
    return {"drafter_options": {"model": str(folder)}}


@pytest.fixture(scope="module")
def log(folder: Path) -> DraftLog:
    """Of traffic with chunks, cached prefixes and preemptions."""
    factory = RecordingFactory(DFlashDrafter)
    sizes: dict[str, Any] = {"max_step_tokens": 24, "num_blocks": 19}
    loop = make_drafting_loop(Qwen3Definition(), MODEL, factory, max_drafts=DRAFTS, **sizes, **named(folder))
    requests = random_requests(24, vocab_size=257, max_prompt_tokens=40, shared_tokens=20, temperature=1.0)
    for seed in range(2):
        run_together(loop, requests, seed=seed)
    stats = loop.stats()
    loop.close()
    assert stats.drafter_faults == 0
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
    return factory.log


def wrong_drafts(log: DraftLog, folder: Path, *, limit: int = 1000, **mutant: Any) -> int:
    """Contexts of which a draft is not the formula's; near ties are right either way."""
    with Checkpoint.open(MODEL) as checkpoint:
        embedding = CpuOps().upload_weight(checkpoint.read("model.embed_tokens.weight"))
    drafter = DFlash64(load_file(folder / "model.safetensors"), embedding, **mutant)
    wrong = 0
    for context in log.contexts[:limit]:
        ids = list(context.token_ids)
        taps = np.stack([np.concatenate(log.taps[tuple(ids[: n + 1])]) for n in range(len(ids) - 1)])
        logits = drafter.logits(ids, taps)
        wrong += not all(
            agreeing_logits(each, draft, tolerance=TOLERANCE)
            for each, draft in zip(logits, context.drafts, strict=True)
        )
    return wrong


def test_drafts_are_those_of_the_formulas_in_a_thousand_contexts(folder: Path, log: DraftLog) -> None:
    assert len(log.contexts) >= 1000
    assert wrong_drafts(log, folder) == 0


@pytest.mark.parametrize("mutant", [{"shift": 1}, {"is_causal": True}, {"is_unnormed": True}], ids=str)
def test_drafts_of_mutants_of_the_formulas_differ(folder: Path, log: DraftLog, mutant: dict[str, Any]) -> None:
    assert wrong_drafts(log, folder, limit=100, **mutant) > 20


@pytest.mark.parametrize(
    ("happens", "options"),
    [
        ("preemptions", {"max_step_tokens": 24, "num_blocks": 19}),
        ("tier_tokens", {"num_blocks": 19, "kv_tier": ["host=16MiB"]}),
        ("cached_tokens", {"num_blocks": 40, "tensor_parallel_size": 2}),
        ("cached_tokens", {"num_blocks": 40, "max_drafts": 9}),
    ],
)
def test_answers_with_a_folder_are_those_without(folder: Path, happens: str, options: dict[str, Any]) -> None:
    stats = check_model_drafter(Qwen3Definition(), MODEL, DFlashDrafter, **named(folder), **options)
    assert getattr(stats, happens) > 0


def test_drafts_after_a_cached_prefix_are_those_of_a_computed_one(folder: Path) -> None:
    requests = random_requests(6, vocab_size=257, max_prompt_tokens=30, shared_tokens=40)
    drafts: list[list[list[int]]] = []
    for prefix_cache in (True, False):
        factory = RecordingFactory(DFlashDrafter)
        loop = make_drafting_loop(Qwen3Definition(), MODEL, factory, **named(folder), prefix_cache=prefix_cache)
        for request in requests:
            answers = run_at_once(loop, [request])
        assert (answers[request.request_id].cached_tokens >= 40) == prefix_cache
        loop.close()
        drafts.append([context.drafts for context in factory.log.contexts])
    assert drafts[0] == drafts[1]


def test_plan_shows_the_folders_kv(folder: Path) -> None:
    plan = resolve(
        Qwen3Definition(), MODEL, EngineOptions(num_blocks=40, speculative=f"dflash,k=3,model={folder}")
    ).plan()
    assert plan.parts["drafter"].startswith("dflash (openinfer-qwen3 ")
    assert plan.parts["drafter_kv"] == "2 layers, 1024 bytes of each token's KV"


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"vocab_size": 300}, {}, "another model's: vocab_size is 300, and the model's 257"),
        ({"hidden_size": 64}, {}, "hidden_size is 64, and the model's 96"),
        ({"dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 9]}}, {}, "after layers [0, 9]"),
        ({"dflash_config": {"mask_token_id": 900, "target_layer_ids": [0, 2]}}, {}, "mask_token_id is 900 of 257"),
        ({"dflash_config": {**CONFIG["dflash_config"], "causal": True}}, {}, "a causal block is not served"),
        ({"dflash_config": {**CONFIG["dflash_config"], "use_swa": True}}, {}, "windows are not served"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, {}, "only full attention is served"),
        ({"is_neox_style": False}, {}, "only RoPE of halves is served"),
        ({"architectures": ["Qwen3ForCausalLM"]}, {}, "is no DFlash folder"),
        ({"num_key_value_heads": 4}, {}, "KV has 4 heads of 32"),
        ({"block_size": 1}, {}, "no valid DFlash config"),
        ({}, {"lm_head.weight": np.zeros((257, 96), np.float32)}, "lm_head.weight is a tensor of its own"),
        ({}, {"norm.weight": np.full(96, np.nan, np.float32)}, "norm.weight has numbers that are not finite"),
        ({}, {"fc.weight": np.zeros((96, 96), np.float32)}, "fc.weight has shape [96, 96], not [96, 192]"),
    ],
    ids=range(14),
)
def test_other_folders_are_refused_by_name(
    folder: Path, tmp_path: Path, config: dict[str, Any], tensors: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | config))
    save_file({**load_file(folder / "model.safetensors"), **tensors}, tmp_path / "model.safetensors")
    with pytest.raises((Refused, InvalidCheckpoint)) as error:
        build_loop(
            resolve(Qwen3Definition(), MODEL, EngineOptions(num_blocks=40, speculative=f"dflash,model={tmp_path}"))
        )
    assert message in str(error.value)

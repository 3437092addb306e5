"""EAGLE-3 folders: what they draft, that they change no token, and what is refused."""

import json
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from openinfer_core import InvalidCheckpoint, Refused, read_config
from openinfer_core.control import Sleep, UpdateWeights, Wake
from openinfer_core.scheduling import SlotStart
from openinfer_engine import Checkpoint, EngineOptions, build_loop, resolve
from openinfer_engine.options import KvCacheDtype, LoadFormat
from openinfer_engine.testing import (
    DraftLog,
    RecordingFactory,
    accepted_share,
    agreeing_logits,
    check_model_drafter,
    drafts_after_prefixes,
    make_drafting_loop,
    random_requests,
    run_at_once,
    run_together,
)
from openinfer_kernels.cpu import CpuOps
from openinfer_qwen3.eagle3 import Eagle3Drafter, eagle3_tensors, read_eagle3
from openinfer_qwen3.family import Qwen3Definition

TOLERANCE = 2e-3
MODEL = Path(__file__).parent / "fixtures" / "tied"
TRAINED = Path(__file__).parent / "fixtures_eagle3"
PROMPTS = [
    b"A drafter that is a model reads hidden states of every token, and keeps keys and values of its own: a block of",
    b"The scheduler plans each step, and the worker computes it; what was sampled last stays on the device, so that",
    b"`--max-drafts` is how many drafts a sequence may have in one step. With `--batch-invariant true` the answers are",
]
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": 180,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3], "use_aux_hidden_state": True},
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 96,
    "intermediate_size": 112,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "vocab_size": 257,
}


def make_folder(folder: Path, *, seed: int = 0, config: dict[str, Any] | None = None) -> Path:
    """A drafter of random weights, with a vocabulary map at random."""
    said = CONFIG | (config or {})
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(said))
    rng = np.random.default_rng(seed)
    model = Qwen3Definition().parse(read_config(MODEL))
    tensors: dict[str, Any] = {}
    for name, spec in eagle3_tensors(read_eagle3(folder, model, {}), model).items():
        shape: Any = spec
        if name == "d2t":
            targets = np.sort(rng.permutation(257)[:180])
            tensors[name] = targets - np.arange(180)
            tensors["t2d"] = np.isin(np.arange(257), targets)
        elif len(shape) == 1:
            tensors[name] = rng.normal(1, 0.2, shape).astype(np.float32)
        else:
            tensors[name] = rng.normal(0, 2 * shape[-1] ** -0.5, shape).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    return folder


@dataclass(frozen=True, slots=True)
class Eagle64:
    """The drafter in float64 by the equations of vLLM's `llama_eagle3`; pairs are one sequence, counted from 0."""

    tensors: dict[str, NDArray[Any]]
    config: dict[str, Any]
    embedding: NDArray[Any]
    shift: int = 0
    """A mutant's: hidden states of another row."""
    recycles_normed: bool = False
    """After the last norm: `norm_output`, and a mutant's without that."""

    def drafts(self, token_ids: list[int], taps: NDArray[Any], num_drafts: int) -> list[NDArray[np.float64]]:
        """Logits over the model's vocabulary of each draft; `taps [tokens - 1, 3 h]`."""
        states = list(taps.astype(np.float64) @ self._of("fc").T)
        if self.shift:
            states = [np.zeros_like(states[0])] * self.shift + states[: len(states) - self.shift]
        ids, logits = list(token_ids[1:]), []
        for _ in range(num_drafts):
            prenorm = self._layer(np.asarray(ids), np.stack(states))[-1]
            normed = self._norm(prenorm, "norm")
            of_targets = np.full(self.config["vocab_size"], -np.inf)
            of_targets[np.arange(len(self.tensors["d2t"])) + self.tensors["d2t"]] = self._of("lm_head") @ normed
            logits.append(of_targets)
            ids.append(int(np.argmax(of_targets)))
            states.append(normed if self.recycles_normed else prenorm)
        return logits

    def _of(self, name: str) -> NDArray[np.float64]:
        return self.tensors[f"{name}.weight"].astype(np.float64)

    def _norm(self, x: NDArray[Any], name: str) -> NDArray[np.float64]:
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.config["rms_norm_eps"]) * self._of(name)

    def _layer(self, ids: NDArray[Any], states: NDArray[Any]) -> NDArray[np.float64]:
        hidden = self._norm(states, "midlayer.hidden_norm")
        residual = hidden if self.config.get("norm_before_residual") else states
        embedded = self._norm(self.embedding[ids].astype(np.float64), "midlayer.input_layernorm")
        x = residual + self._attention(np.concatenate((embedded, hidden), axis=1))
        y = self._norm(x, "midlayer.post_attention_layernorm")
        gate = y @ self._of("midlayer.mlp.gate_proj").T
        up = y @ self._of("midlayer.mlp.up_proj").T
        return x + (gate / (1 + np.exp(-gate)) * up) @ self._of("midlayer.mlp.down_proj").T

    def _attention(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        dim = self.config["head_dim"]
        q, k, v = ((x @ self._of(f"midlayer.self_attn.{each}_proj").T).reshape(len(x), -1, dim) for each in "qkv")
        frequencies = self.config["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
        angles = np.outer(np.arange(len(x)), frequencies)[:, None]
        q, k = (_rotated(each, angles) for each in (q, k))
        out = np.empty_like(q)
        for head in range(q.shape[1]):
            group = head // (q.shape[1] // k.shape[1])
            scores = q[:, head] @ k[:, group].T * dim**-0.5
            scores[np.triu(np.ones(scores.shape, bool), 1)] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v[:, group]
        return out.reshape(len(x), -1) @ self._of("midlayer.self_attn.o_proj").T


def _rotated(x: NDArray[Any], angles: NDArray[Any]) -> NDArray[Any]:
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("eagle"))


def transcription(folder: Path, **mutant: Any) -> Eagle64:
    with Checkpoint.open(MODEL) as checkpoint:
        embedding = CpuOps().upload_weight(checkpoint.read("model.embed_tokens.weight"))
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    return Eagle64(tensors, config, embedding, **mutant)


def record(folder: Path, *, count: int, **options: Any) -> DraftLog:
    """Of traffic with chunks, cached prefixes and preemptions."""
    factory = RecordingFactory(Eagle3Drafter)
    sizes: dict[str, Any] = {"max_step_tokens": 24, "num_blocks": 19, "drafter_options": {"model": str(folder)}}
    loop = make_drafting_loop(Qwen3Definition(), MODEL, factory, max_drafts=3, **sizes | options)
    requests = random_requests(count, vocab_size=257, max_prompt_tokens=40, shared_tokens=20, temperature=1.0)
    for seed in range(2):
        run_together(loop, requests, seed=seed)
    stats = loop.stats()
    loop.close()
    assert stats.drafter_faults == 0
    assert stats.cached_tokens > 0
    return factory.log


@pytest.fixture(scope="module")
def log(folder: Path) -> DraftLog:
    return record(folder, count=24)


def wrong_drafts(log: DraftLog, drafter: Eagle64, *, limit: int = 1000) -> int:
    """Contexts of which a draft is not the formula's; near ties are right either way, and end a row."""
    wrong = 0
    for context in log.contexts[:limit]:
        ids = list(context.token_ids)
        taps = np.stack([np.concatenate(log.taps[tuple(ids[: n + 1])]) for n in range(len(ids) - 1)])
        for draft, logits in zip(context.drafts, drafter.drafts(ids, taps, 3), strict=True):
            wrong += not agreeing_logits(logits, draft, tolerance=TOLERANCE)
            if int(np.argmax(logits)) != draft:
                break
    return wrong


def test_drafts_are_those_of_the_formulas_in_a_thousand_contexts(folder: Path, log: DraftLog) -> None:
    assert len(log.contexts) >= 1000
    assert wrong_drafts(log, transcription(folder)) == 0


@pytest.mark.parametrize("mutant", [{"shift": 1}, {"recycles_normed": True}], ids=str)
def test_drafts_of_mutants_of_the_formulas_differ(folder: Path, log: DraftLog, mutant: dict[str, Any]) -> None:
    assert wrong_drafts(log, transcription(folder, **mutant), limit=100) > 20


@pytest.mark.parametrize("config", [{"norm_before_residual": True}, {"norm_output": True}], ids=str)
def test_drafts_of_a_variant_are_those_of_its_formulas(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = make_folder(tmp_path / "variant", config=config)
    variant = {"recycles_normed": True} if "norm_output" in config else {}
    found = record(folder, count=4)

    assert wrong_drafts(found, transcription(folder, **variant)) == 0


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
    named = {"drafter_options": {"model": str(folder)}}
    stats = check_model_drafter(Qwen3Definition(), MODEL, Eagle3Drafter, **named, **options)
    assert getattr(stats, happens) > 0


class Forgetful(Eagle3Drafter):
    """A mutant that goes on from the hidden state of whatever sequence had the slot before."""

    def start(self, starts: Sequence[SlotStart]) -> None:
        del starts


def drafts_of(drafter: type[Eagle3Drafter], folder: Path) -> tuple[list[list[int]], list[list[int]]]:
    """With a prefix cache, and without."""
    named = {"drafter_options": {"model": str(folder)}}
    return drafts_after_prefixes(Qwen3Definition(), MODEL, drafter, vocab_size=257, **named)


def test_drafts_after_a_cached_prefix_are_those_of_a_computed_one(folder: Path) -> None:
    """Bit for bit: blocks have the layer's KV, and the hidden state before the boundary."""
    cached, computed = drafts_of(Eagle3Drafter, folder)
    assert cached == computed


def test_drafts_after_a_cached_prefix_without_its_hidden_state_are_others(folder: Path) -> None:
    cached, computed = drafts_of(Forgetful, folder)
    assert cached != computed


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_trained_folder_drafts_what_the_model_samples(prefix_cache: bool) -> None:
    """In first turns and in further ones, which begin with a cached prefix where there is a cache: the same."""
    named: dict[str, Any] = {"drafter_options": {"model": str(TRAINED / "drafter")}}
    loop = make_drafting_loop(
        Qwen3Definition(), TRAINED / "model", Eagle3Drafter, max_drafts=3, prefix_cache=prefix_cache, **named
    )
    shares = [accepted_share(loop, PROMPTS), accepted_share(loop, PROMPTS)]
    stats = loop.stats()
    loop.close()

    assert stats.drafter_faults == 0
    assert (stats.cached_tokens > 0) == prefix_cache
    assert shares[0] == shares[1] > 0.25


def test_a_head_in_fp8_drafts_what_the_model_samples_all_the_same() -> None:
    named = {"model": str(TRAINED / "drafter")}
    shares: list[float] = []
    for options in (named | {"head": "fp8"}, named):
        loop = make_drafting_loop(
            Qwen3Definition(), TRAINED / "model", Eagle3Drafter, max_drafts=3, drafter_options=options
        )
        shares.append(accepted_share(loop, PROMPTS))
        loop.close()
    assert abs(shares[0] - shares[1]) < 0.05
    with pytest.raises(Refused, match="head is fp8, or left out"):
        make_drafting_loop(
            Qwen3Definition(), TRAINED / "model", Eagle3Drafter, drafter_options=named | {"head": "e5m2"}
        )


def test_plan_shows_the_folders_weights_and_kv_and_other_weights_have_another_layout(
    folder: Path, tmp_path: Path
) -> None:
    other = make_folder(tmp_path / "other", seed=1)
    plans = [
        resolve(
            Qwen3Definition(),
            MODEL,
            EngineOptions(num_blocks=40, speculative=f"eagle3,k=2,model={each}"),
        )
        for each in (folder, other)
    ]
    plan = plans[0].plan()

    assert plan.parts["drafter"].startswith("eagle3 (openinfer-qwen3 ")
    assert plan.parts["drafter_kv"] == "2 layers, 1024 bytes of each token's KV"
    assert plan.parts["drafter_model"] != plans[1].plan().parts["drafter_model"]
    assert plan.memory_bytes["drafter_weights"] > 0
    assert plans[0].layouts[0].digest != plans[1].layouts[0].digest


def test_weights_replaced_while_it_drafts_are_drafted_for_anew(folder: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    with Checkpoint.open(MODEL) as checkpoint:
        tensors = {name: CpuOps().upload_weight(checkpoint.read(name)) for name in checkpoint.tensors}
    new = tmp_path / "new"
    new.mkdir()
    (new / "config.json").write_bytes((MODEL / "config.json").read_bytes())
    scaled = {name: each * rng.uniform(0.7, 1.3, each.shape).astype(np.float32) for name, each in tensors.items()}
    save_file(scaled, new / "model.safetensors")
    requests = random_requests(4, vocab_size=257, max_prompt_tokens=40)
    sizes: dict[str, Any] = {"num_blocks": 64, "max_num_seqs": 4, "batch_invariant": True}
    named = {"speculative": f"eagle3,adaptive=false,model={folder}", "weights_root": str(tmp_path)}
    loop = build_loop(resolve(Qwen3Definition(), MODEL, EngineOptions(**sizes, **named)))
    fresh = build_loop(resolve(Qwen3Definition(), new, EngineOptions(**sizes)))
    try:
        before = run_at_once(loop, requests)
        compared = loop.stats().spec_decode_num_draft_tokens
        loop.control(UpdateWeights(path="new"))
        after = run_at_once(loop, requests)
        stats = loop.stats()
        assert after == run_at_once(fresh, requests) != before
    finally:
        loop.close()
        fresh.close()
    assert stats.drafter_faults == 0
    assert stats.spec_decode_num_draft_tokens > compared


def worse_drafter(folder: Path, source: Path) -> Path:
    """A folder of the same drafter, whose matrices have their rows in another order."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    mixed: dict[str, Any] = {}
    with Checkpoint.open(source) as checkpoint:
        for name, info in checkpoint.tensors.items():
            stored = checkpoint.read(name)
            each = CpuOps().upload_weight(stored) if info.dtype == "BF16" else stored
            mixed[name] = rng.permutation(each) if each.ndim > 1 else each
    save_file(mixed, folder / "model.safetensors")
    return folder


def test_an_update_brings_a_drafter_weights_of_its_own(tmp_path: Path) -> None:
    for name in ("model", "drafter"):
        shutil.copytree(TRAINED / name, tmp_path / name)
    worse = worse_drafter(tmp_path / "worse", tmp_path / "drafter")
    shutil.copytree(worse, tmp_path / "other")
    (tmp_path / "other/config.json").write_text(json.dumps(read_config(worse) | {"rope_theta": 5.0}))
    shutil.copytree(worse, tmp_path / "cut")
    tensors = load_file(worse / "model.safetensors")
    save_file({name: tensors[name] for name in list(tensors)[1:]}, tmp_path / "cut/model.safetensors")
    (tmp_path / "link").mkdir()
    (tmp_path / "link/config.json").write_bytes((worse / "config.json").read_bytes())
    (tmp_path / "link/model.safetensors").symlink_to(TRAINED / "drafter/model.safetensors")
    requests = random_requests(12, vocab_size=128, max_prompt_tokens=40)
    sizes: dict[str, Any] = {"num_blocks": 64, "max_num_seqs": 4, "batch_invariant": True, "max_model_tokens": 160}
    sizes["weights_root"] = str(tmp_path)
    named = f"eagle3,k=3,adaptive=false,model={tmp_path / 'drafter'}"
    loop = build_loop(resolve(Qwen3Definition(), tmp_path / "model", EngineOptions(speculative=named, **sizes)))
    shares: list[float] = []

    def ask() -> Any:
        before = loop.stats()
        answers = run_at_once(loop, requests)
        after = loop.stats()
        accepted = after.spec_decode_num_accepted_tokens - before.spec_decode_num_accepted_tokens
        shares.append(accepted / (after.spec_decode_num_draft_tokens - before.spec_decode_num_draft_tokens))
        return answers

    with closing(loop):
        answers = ask()
        for wrong in ("other", "cut", "link", "../drafter", "gone"):
            with pytest.raises((Refused, InvalidCheckpoint)):
                loop.control(UpdateWeights(path="model", drafter_path=wrong))
        for command in (
            UpdateWeights(path="model"),
            UpdateWeights(path="model", drafter_path="worse"),
            UpdateWeights(path="model"),
            UpdateWeights(path="model", drafter_path="drafter"),
        ):
            loop.control(command)
            assert ask() == answers
            if command.drafter_path == "worse":
                loop.control(Sleep(keeps_weights=False))
                loop.control(Wake())
                assert ask() == answers
        assert loop.stats().drafter_faults == 0
    good, updated, worse_share, woken, kept, again = shares
    assert good == updated == again > 0.1
    assert worse_share == woken == kept < good / 4

    plain = build_loop(resolve(Qwen3Definition(), tmp_path / "model", EngineOptions(speculative="ngram", **sizes)))
    with closing(plain), pytest.raises(Refused, match="no drafter with a folder of its own"):
        plain.control(UpdateWeights(path="model", drafter_path="worse"))


def test_dummy_weights_need_no_files_of_weights(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    named = {"speculative": f"eagle3,model={tmp_path}", "load_format": LoadFormat.DUMMY}
    loop = build_loop(resolve(Qwen3Definition(), MODEL, EngineOptions(num_blocks=40, **named)))
    try:
        run_at_once(loop, random_requests(2, vocab_size=257, max_prompt_tokens=20))
        stats = loop.stats()
        assert stats.spec_decode_num_draft_tokens > 0
        assert stats.drafter_faults == 0
    finally:
        loop.close()


def refused(folder: str | None = None, **options: Any) -> str:
    speculative = "eagle3" if folder is None else f"eagle3,model={folder}"
    with pytest.raises((Refused, InvalidCheckpoint)) as error:
        build_loop(resolve(Qwen3Definition(), MODEL, EngineOptions(num_blocks=40, speculative=speculative, **options)))
    return str(error.value)


def changed(folder: Path, target: Path, config: dict[str, Any], **tensors: Any) -> str:
    """The folder with other keys and tensors; None takes a tensor away."""
    (target / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | config))
    found = {**load_file(folder / "model.safetensors"), **tensors}
    save_file({name: each for name, each in found.items() if each is not None}, target / "model.safetensors")
    return str(target)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"vocab_size": 300}, "another model's: vocab_size is 300, and the model has 257"),
        ({"target_hidden_size": 128}, "target_hidden_size is 128, and the model has 96"),
        ({"norm_before_fc": True}, "a norm before fc is not served"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}}, "before layers [1, 2, 9]"),
        ({"num_key_value_heads": 4}, "KV has 4 heads of 32, and the model's 2 of 32"),
        ({"architectures": ["LlamaForCausalLM"]}, "is no EAGLE-3 folder"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights are not served"),
        ({"rms_norm_eps": 0}, "config.json is no valid EAGLE-3 config"),
        ({"intermediate_size": 64}, "midlayer.mlp.gate_proj.weight has shape [112, 96], not [64, 96]"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_folder_of_another_model_or_variant_is_refused_by_name(
    folder: Path, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    assert message in refused(changed(folder, tmp_path, config))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"d2t": np.zeros(180, np.int64) - 7}, "d2t maps 180 ids to -7 .. 172, 180 different ones"),
        ({"d2t": -np.arange(180)}, "d2t maps 180 ids to 0 .. 0, 1 different ones"),
        ({"d2t": None}, "d2t is missing"),
        ({"t2d": np.ones(257, bool)}, "t2d names 257 tokens, and d2t 180 of them"),
        ({"norm.weight": np.full(96, np.inf, np.float32)}, "norm.weight has numbers that are not finite"),
        ({"fc.weight": np.zeros((96, 96), np.float32)}, "fc.weight has shape [96, 96], not [96, 288]"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_damaged_folder_is_refused_by_name(folder: Path, tmp_path: Path, tensors: dict[str, Any], message: str) -> None:
    assert message in refused(changed(folder, tmp_path, {}, **tensors))


def test_kv_in_fp8_and_no_folder_are_refused(folder: Path) -> None:
    assert "--speculative eagle3,model=DIR" in refused()
    assert "drafter eagle3" in refused(str(folder / "nowhere"))
    assert "FP8 holds none" in refused(str(folder), kv_cache_dtype=KvCacheDtype.FP8)

"""The drafting layer of Qwen3.5: what it drafts, that it changes no token, and what is refused."""

import json
import shutil
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from openinfer_core import InvalidCheckpoint, Refused, read_config
from openinfer_core.control import UpdateWeights
from openinfer_core.shared_weights import SharedTensor, SharedWeights
from openinfer_engine import Checkpoint, EngineOptions, build_loop, resolve
from openinfer_engine.options import DeviceKind, KvCacheDtype
from openinfer_engine.testing import (
    Answer,
    DraftLog,
    RecordingFactory,
    accepted_share,
    agreeing_logits,
    check_model_drafter,
    drafts_after_prefixes,
    make_drafting_loop,
    random_requests,
    record_drafts,
    run_at_once,
    run_together,
)
from openinfer_kernels.cpu import CpuOps
from openinfer_qwen35.family import Qwen35, Qwen35Definition, Qwen35MoeDefinition
from openinfer_qwen35.mtp import MtpDrafter, mtp_config, mtp_tensors

TOLERANCE = 2e-3
TRAINED = Path(__file__).parent / "fixtures_mtp"
PROMPTS = [
    b"A drafter that is a model reads hidden states of every token, and keeps keys and values of its own: a block of",
    b"The scheduler plans each step, and the worker computes it; what was sampled last stays on the device, so that",
    b"`--max-drafts` is how many drafts a sequence may have in one step. With `--batch-invariant true` the answers are",
]


def load_float32(folder: Path) -> dict[str, NDArray[np.float32]]:
    """All tensors of a folder."""
    with Checkpoint.open(folder) as checkpoint:
        return {name: CpuOps().upload_weight(checkpoint.read(name)) for name in checkpoint.tensors}


def add_mtp(source: Path, target: Path, *, is_mixture: bool = False, seed: int = 0) -> Path:
    """A copy of a recorded model, in float32, with random weights of the layer."""
    definition = Qwen35MoeDefinition() if is_mixture else Qwen35Definition()
    config = definition.parse(read_config(source))
    rng = np.random.default_rng(seed)
    tensors: dict[str, Any] = load_float32(source)
    for name, shape in mtp_tensors(mtp_config(config, {})).items():
        deviation = 0.1 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5
        tensors[name] = rng.normal(0, deviation, shape).astype(np.float32)
    target.mkdir(exist_ok=True)
    for path in source.glob("*.json"):
        shutil.copy(path, target)
    save_file(tensors, target / "model.safetensors")
    return target


@dataclass(frozen=True, slots=True)
class Mtp64:
    """The drafting layer of a dense model: Qwen3.5's equations (modeling_qwen3_5 of transformers) around vLLM's `mtp`.

    Every token after the first is one pair of the hidden state before it and its embedding; the pairs are one sequence,
    counted from 0, which the layer reads from its first on.
    """

    tensors: dict[str, NDArray[Any]]
    config: dict[str, Any]
    shift: int = 0
    """A mutant's: pairs of a token and a hidden state of another row."""
    is_swapped: bool = False
    """A mutant's: the hidden state first."""
    vocabulary: int | None = None
    """Token ids that drafts are among, from the first."""

    def drafts(self, token_ids: list[int], hidden: NDArray[Any], num_drafts: int) -> list[NDArray[np.float64]]:
        """Logits of each draft, which follow from the likeliest tokens before; `hidden [tokens - 1, h]`."""
        logits: list[NDArray[np.float64]] = []
        ids, states = list(token_ids[1:]), [each.astype(np.float64) for each in hidden]
        if self.shift:
            states = [np.zeros_like(states[0])] * self.shift + states[: len(states) - self.shift]
        for _ in range(num_drafts):
            x = np.stack([self._input(token_id, state) for token_id, state in zip(ids, states, strict=True)])
            last = self._layer(x)[-1]
            out = self._norm(last, self.tensors["mtp.norm.weight"])
            head = self.tensors.get("lm_head.weight")
            head = self._of_model("embed_tokens.weight") if head is None else head
            logits.append(head[: self.vocabulary].astype(np.float64) @ out)
            ids.append(int(np.argmax(logits[-1])))
            states.append(out)
        return logits

    def _of_model(self, name: str) -> NDArray[Any]:
        return next(self.tensors[p + name] for p in ("model.", "model.language_model.") if p + name in self.tensors)

    def _of(self, name: str) -> NDArray[np.float64]:
        return self.tensors[f"mtp.layers.0.{name}.weight"].astype(np.float64)

    def _norm(self, x: NDArray[Any], weight: NDArray[Any]) -> NDArray[np.float64]:
        mean = (x * x).mean(axis=-1, keepdims=True)
        return x / np.sqrt(mean + self.config["rms_norm_eps"]) * (1 + weight.astype(np.float64))

    def _input(self, token_id: int, state: NDArray[Any]) -> NDArray[np.float64]:
        embedded = self._of_model("embed_tokens.weight")[token_id].astype(np.float64)
        halves = [
            self._norm(embedded, self.tensors["mtp.pre_fc_norm_embedding.weight"]),
            self._norm(state, self.tensors["mtp.pre_fc_norm_hidden.weight"]),
        ]
        return self.tensors["mtp.fc.weight"].astype(np.float64) @ np.concatenate(
            halves[::-1] if self.is_swapped else halves
        )

    def _layer(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        x = x + self._attention(self._norm(x, self._of("input_layernorm")))
        y = self._norm(x, self._of("post_attention_layernorm"))
        gate = y @ self._of("mlp.gate_proj").T
        return x + (gate / (1 + np.exp(-gate)) * (y @ self._of("mlp.up_proj").T)) @ self._of("mlp.down_proj").T

    def _attention(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        tokens, dim = len(x), self.config["head_dim"]
        both = (x @ self._of("self_attn.q_proj").T).reshape(tokens, -1, 2, dim)
        q, gate = both[:, :, 0], both[:, :, 1]
        k, v = ((x @ self._of(f"self_attn.{name}_proj").T).reshape(tokens, -1, dim) for name in "kv")
        q = self._rotate(self._norm(q, self._of("self_attn.q_norm")))
        k = self._rotate(self._norm(k, self._of("self_attn.k_norm")))
        group = q.shape[1] // k.shape[1]
        out = np.empty_like(q)
        hidden = np.triu(np.ones((tokens, tokens), bool), 1)
        for head in range(q.shape[1]):
            scores = q[:, head] @ k[:, head // group].T * dim**-0.5
            scores[hidden] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v[:, head // group]
        gated = out / (1 + np.exp(-gate))
        return gated.reshape(tokens, -1) @ self._of("self_attn.o_proj").T

    def _rotate(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        rope = self.config["rope_parameters"]
        rotated = int(x.shape[-1] * rope["partial_rotary_factor"])
        angles = np.outer(np.arange(len(x)), rope["rope_theta"] ** (-np.arange(0, rotated, 2) / rotated))[:, None]
        first, second = x[..., : rotated // 2], x[..., rotated // 2 : rotated]
        turned = [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)]
        return np.concatenate([*turned, x[..., rotated:]], axis=-1)


@pytest.fixture(scope="module")
def mtp_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fixtures = Path(__file__).parent / "fixtures"
    return add_mtp(fixtures / "text_tied", tmp_path_factory.mktemp("mtp"))


@pytest.fixture(scope="module")
def log(mtp_dir: Path) -> DraftLog:
    return record_drafts(Qwen35Definition(), mtp_dir, MtpDrafter, vocab_size=263, max_drafts=3)


def wrong_drafts(log: DraftLog, layer: Mtp64, *, limit: int = 1000) -> int:
    """Contexts of which a draft is not the formula's; near ties are right either way, and end a row."""
    wrong = 0
    for context in log.contexts[:limit]:
        ids = list(context.token_ids)
        hidden = np.stack([log.hidden[tuple(ids[: n + 1])] for n in range(len(ids) - 2)] + [context.last_hidden])
        for draft, logits in zip(context.drafts, layer.drafts(ids, hidden, 3), strict=True):
            if not agreeing_logits(logits, draft, tolerance=TOLERANCE):
                wrong += 1
            if int(np.argmax(logits)) != draft:
                break
    return wrong


def test_drafts_are_those_of_the_formulas_in_a_thousand_contexts(mtp_dir: Path, log: DraftLog) -> None:
    assert len(log.contexts) >= 1000
    tensors, config = load_float32(mtp_dir), json.loads((mtp_dir / "config.json").read_text())

    assert wrong_drafts(log, Mtp64(tensors, config)) == 0


@pytest.mark.parametrize("mutant", [{"shift": 1}, {"is_swapped": True}, {"plain_norm": True}], ids=str)
def test_drafts_of_mutants_of_the_formulas_differ(mtp_dir: Path, log: DraftLog, mutant: dict[str, Any]) -> None:
    tensors, config = load_float32(mtp_dir), json.loads((mtp_dir / "config.json").read_text())
    if mutant.pop("plain_norm", False):  # as if the hidden state before the final norm were read
        tensors["mtp.pre_fc_norm_hidden.weight"] = tensors["mtp.pre_fc_norm_hidden.weight"] - 1

    assert wrong_drafts(log, Mtp64(tensors, config, **mutant), limit=100) > 20


@pytest.mark.parametrize(
    ("happens", "options"),
    [
        ("preemptions", {"max_step_tokens": 24, "num_blocks": 19}),
        ("tier_tokens", {"num_blocks": 19, "kv_tier": ["host=16MiB"]}),
        ("cached_tokens", {"num_blocks": 40, "tensor_parallel_size": 2}),
        ("cached_tokens", {"num_blocks": 40, "kv_cache_dtype": KvCacheDtype.AUTO, "max_drafts": 9}),
        # the layer's keys and values are rounded as the model's are; its hidden states lie with the recurrent ones
        ("preemptions", {"max_step_tokens": 24, "num_blocks": 19, "kv_cache_dtype": KvCacheDtype.FP8}),
        ("tier_tokens", {"num_blocks": 19, "kv_tier": ["host=16MiB"], "kv_cache_dtype": KvCacheDtype.FP8}),
    ],
)
def test_answers_with_the_layer_are_those_without(mtp_dir: Path, happens: str, options: dict[str, Any]) -> None:
    stats = check_model_drafter(Qwen35Definition(), mtp_dir, MtpDrafter, **options)
    assert getattr(stats, happens) > 0


def test_answers_of_a_mixture_with_the_layer_are_those_without(tmp_path: Path) -> None:
    source = Path(__file__).parent / "fixtures_moe" / "text"
    folder = add_mtp(source, tmp_path / "mixture", is_mixture=True)
    check_model_drafter(Qwen35MoeDefinition(), folder, MtpDrafter, seeds=[0])


def test_drafts_after_a_cached_prefix_are_those_of_a_computed_one(mtp_dir: Path) -> None:
    """Bit for bit: the copy of the states has the hidden state before the boundary, and blocks have the layer's KV."""
    cached, computed = drafts_after_prefixes(Qwen35Definition(), mtp_dir, MtpDrafter, vocab_size=263)
    assert cached == computed


@pytest.mark.parametrize("kv_cache_dtype", [KvCacheDtype.AUTO, KvCacheDtype.FP8])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_trained_layer_drafts_what_the_model_samples(prefix_cache: bool, kv_cache_dtype: KvCacheDtype) -> None:
    """In first turns and in further ones, which begin with a cached prefix where there is a cache: the same."""
    options: dict[str, Any] = {"prefix_cache": prefix_cache, "kv_cache_dtype": kv_cache_dtype}
    loop = make_drafting_loop(Qwen35Definition(), TRAINED, MtpDrafter, max_drafts=3, **options)
    shares = [accepted_share(loop, PROMPTS), accepted_share(loop, PROMPTS)]
    stats = loop.stats()
    loop.close()

    assert stats.drafter_faults == 0
    assert (stats.cached_tokens > 0) == prefix_cache
    assert shares[0] == shares[1] > 0.6


@pytest.mark.parametrize("device", [DeviceKind.CPU, pytest.param(DeviceKind.CUDA, marks=pytest.mark.gpu)], ids=str)
def test_an_update_brings_new_weights_of_the_layer(device: DeviceKind, tmp_path: Path) -> None:
    """From a folder, and from memory of another process."""
    rng = np.random.default_rng(0)
    good = load_float32(TRAINED)
    worse = {
        name: rng.permutation(each) if name.startswith("mtp.") and each.ndim > 1 else each
        for name, each in good.items()
    }
    for name, tensors in (("good", good), ("worse", worse)):
        (tmp_path / name).mkdir()
        for path in TRAINED.glob("*.json"):
            shutil.copy(path, tmp_path / name)
        save_file(tensors, tmp_path / name / "model.safetensors")
    sizes: dict[str, Any] = {"num_blocks": 64, "max_num_seqs": 4, "max_model_tokens": 200, "batch_invariant": True}
    options = EngineOptions(
        device=device,
        enable_sleep=device is DeviceKind.CUDA,
        speculative="mtp,k=2,adaptive=false",
        weights_root=str(tmp_path),
        **sizes,
    )
    try:
        loop = build_loop(resolve(Qwen35Definition(), tmp_path / "good", options))
    except Refused as reason:
        if device is DeviceKind.CPU:
            raise
        pytest.skip(str(reason))
    requests = random_requests(8, vocab_size=128, max_prompt_tokens=60)
    shares: list[float] = []

    def ask() -> Any:
        before = loop.stats()
        answers = run_at_once(loop, requests)
        after = loop.stats()
        accepted = after.spec_decode_num_accepted_tokens - before.spec_decode_num_accepted_tokens
        shares.append(accepted / (after.spec_decode_num_draft_tokens - before.spec_decode_num_draft_tokens))
        return {key: each.token_ids for key, each in answers.items()}

    with closing(loop):
        answers = ask()
        for by_memory in (False, True):
            for name, tensors in (("worse", worse), ("good", good)):
                if by_memory:
                    told = {key: SharedTensor("F32", each.shape, each.data) for key, each in tensors.items()}
                    with SharedWeights(told) as shared:
                        loop.control(UpdateWeights(segments=shared.names))
                else:
                    loop.control(UpdateWeights(path=name))
                assert ask() == answers
        wrong = {key: SharedTensor("F32", each.shape, each.data) for key, each in good.items()}
        name = next(key for key in wrong if key.startswith("mtp.") and good[key].ndim > 1)
        cut = np.ascontiguousarray(good[name][1:])
        wrong[name] = SharedTensor("F32", cut.shape, cut.data)
        with SharedWeights(wrong) as shared, pytest.raises(InvalidCheckpoint, match=name):
            loop.control(UpdateWeights(segments=shared.names))
        assert ask() == answers
        assert loop.stats().drafter_faults == 0
    first, *by_folder_and_memory, last = shares
    assert first > 0.1
    for found in (by_folder_and_memory[:2], by_folder_and_memory[2:]):
        assert found[0] < first / 3
        assert abs(found[1] - first) <= 0.1 * first
    assert abs(last - first) <= 0.1 * first


def test_drafts_of_a_part_of_the_vocabulary_are_the_likeliest_of_it(mtp_dir: Path) -> None:
    factory = RecordingFactory(MtpDrafter)
    options = {"vocabulary": "150"}
    loop = make_drafting_loop(Qwen35Definition(), mtp_dir, factory, max_drafts=3, drafter_options=options)
    run_together(loop, random_requests(8, vocab_size=263, max_prompt_tokens=40), seed=0)
    loop.close()
    tensors, config = load_float32(mtp_dir), json.loads((mtp_dir / "config.json").read_text())

    assert len(factory.log.contexts) > 100
    assert max(max(context.drafts) for context in factory.log.contexts) < 150
    assert wrong_drafts(factory.log, Mtp64(tensors, config, vocabulary=150)) == 0
    assert wrong_drafts(factory.log, Mtp64(tensors, config)) > 20


@pytest.mark.parametrize("option", ["0", "129", "all"])
def test_a_part_of_the_vocabulary_that_is_none_is_refused(option: str) -> None:
    message = refused(TRAINED, f"mtp,vocabulary={option}")
    assert f"vocabulary is {option}; it must be between 1 and 128" in message


def test_a_part_of_the_vocabulary_is_refused_with_several_ranks(mtp_dir: Path) -> None:
    options = {"vocabulary": "100"}
    with pytest.raises(Refused, match="its head is cut by ranks"):
        make_drafting_loop(Qwen35Definition(), mtp_dir, MtpDrafter, drafter_options=options, tensor_parallel_size=2)


def test_answers_with_drafts_of_a_part_of_the_vocabulary_are_those_without(mtp_dir: Path) -> None:
    options = {"vocabulary": "100"}
    check_model_drafter(Qwen35Definition(), mtp_dir, MtpDrafter, seeds=[0], drafter_options=options)


def test_answers_with_drafts_of_a_head_in_fp8_are_those_without(mtp_dir: Path) -> None:
    check_model_drafter(Qwen35Definition(), mtp_dir, MtpDrafter, seeds=[0], drafter_options={"head": "fp8"})


def test_a_head_in_fp8_drafts_what_the_model_samples_all_the_same() -> None:
    shares: list[float] = []
    for options in ({"head": "fp8"}, {}):
        loop = make_drafting_loop(Qwen35Definition(), TRAINED, MtpDrafter, max_drafts=3, drafter_options=options)
        shares.append(accepted_share(loop, PROMPTS))
        loop.close()
    assert abs(shares[0] - shares[1]) < 0.05


def test_a_head_in_fp8_is_a_part_of_the_plan_and_refused_in_anything_else(mtp_dir: Path) -> None:
    plans = [resolve(Qwen35Definition(), mtp_dir, EngineOptions(speculative=each)) for each in ("mtp,head=fp8", "mtp")]
    limits, width = plans[0].worker_limits, json.loads((mtp_dir / "config.json").read_text())["hidden_size"]
    assert plans[0].drafter_bytes - plans[1].drafter_bytes == limits.vocab_size * (width + 4)
    assert "head is fp8, or left out, not 'int4'" in refused(TRAINED, "mtp,head=int4")
    with pytest.raises(Refused, match="the head is cut by ranks"):
        make_drafting_loop(
            Qwen35Definition(), mtp_dir, MtpDrafter, drafter_options={"head": "fp8"}, tensor_parallel_size=2
        )


def test_answers_after_steps_were_timed_at_the_start_are_those_without(mtp_dir: Path) -> None:
    """Of a model with recurrent states, which the timed steps leave in their slots."""

    def answers(**options: Any) -> dict[int, Answer]:
        given = EngineOptions(num_blocks=40, max_num_seqs=4, batch_invariant=True, **options)
        loop = build_loop(resolve(Qwen35Definition(), mtp_dir, given))
        try:
            assert ("draft_times" in {phase.name for phase in loop.info.start}) == bool(options)
            requests = random_requests(6, vocab_size=loop.info.num_token_ids, max_prompt_tokens=40, logprobs=1)
            return run_at_once(loop, requests)
        finally:
            loop.close()

    assert answers(speculative="mtp,k=2") == answers()


def test_plan_shows_the_layer_its_weights_and_its_kv(mtp_dir: Path) -> None:
    plain = resolve(Qwen35Definition(), mtp_dir, EngineOptions(num_blocks=40))
    drafting = resolve(Qwen35Definition(), mtp_dir, EngineOptions(num_blocks=40, speculative="mtp,k=2"))
    plan = drafting.plan()

    assert plan.parts["drafter"].startswith("mtp (openinfer-qwen35 ")
    assert plan.parts["drafter_kv"] == "1 layers, 512 bytes of each token's KV, 256 bytes of each state slot"
    assert plan.memory_bytes["drafter_weights"] == 4 * sum(
        array.size for name, array in load_file(mtp_dir / "model.safetensors").items() if name.startswith("mtp.")
    )
    assert plan.memory_bytes["kv_cache"] == 2 * plain.plan().memory_bytes["kv_cache"]
    assert drafting.layouts[0].digest != plain.layouts[0].digest


def refused(folder: Path, speculative: str = "mtp") -> str:
    with pytest.raises((Refused, InvalidCheckpoint)) as error:
        build_loop(resolve(Qwen35Definition(), folder, EngineOptions(num_blocks=40, speculative=speculative)))
    return str(error.value)


def test_folder_without_the_layer_is_refused_by_name(fixtures: Path) -> None:
    assert "drafter mtp" in (message := refused(fixtures / "text_tied"))
    assert "mtp.fc.weight is missing" in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda fc: fc[:, :-1], r"mtp.fc.weight has shape [64, 127], not [64, 128]"),
        (lambda fc: np.where(np.arange(128) == 5, np.nan, fc).astype(np.float32), "mtp.fc.weight has numbers that are"),
    ],
    ids=["shape", "nan"],
)
def test_damaged_layer_is_refused_by_name(mtp_dir: Path, tmp_path: Path, change: Any, message: str) -> None:
    tensors = load_file(mtp_dir / "model.safetensors")
    tensors["mtp.fc.weight"] = np.ascontiguousarray(change(tensors["mtp.fc.weight"]))
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((mtp_dir / "config.json").read_bytes())
    assert message in refused(tmp_path)


def test_a_plan_for_a_gpu_has_what_the_layer_takes(mtp_dir: Path) -> None:
    taken = Qwen35().plan_for_gpu(mtp_dir, EngineOptions(speculative="mtp"), gpu="h200-141g").memory_bytes

    assert all(taken[purpose] > 0 for purpose in ("drafter_weights", "drafter_spans", "drafter_work"))
    assert "drafter_work" not in Qwen35().plan_for_gpu(mtp_dir, EngineOptions(), gpu="h200-141g").memory_bytes


def test_kv_of_the_layer_in_fp8_is_refused_on_a_gpu(mtp_dir: Path) -> None:
    options = EngineOptions(speculative="mtp", kv_cache_dtype=KvCacheDtype.FP8)
    with pytest.raises(Refused, match="its KV in FP8 is served on the device cpu alone, not on cuda"):
        Qwen35().plan_for_gpu(mtp_dir, options, gpu="h200-141g")


def test_folder_of_its_own_is_refused(mtp_dir: Path) -> None:
    assert "has no option 'model'" in refused(mtp_dir, f"mtp,model={mtp_dir}")

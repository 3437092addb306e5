"""Draft models: they change no token, draft what they would answer, and what does not fit is refused by name."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from openinfer_core import GenerateRequest, InvalidCheckpoint, Refused, RequestId, SamplingParams
from openinfer_engine import Checkpoint, EngineOptions, StepLoop, build_loop, resolve
from openinfer_engine.drafters.draft_model import DraftModelDrafter
from openinfer_engine.drafters.requirements import ask_drafter
from openinfer_engine.options import DeviceKind, KvCacheDtype, LoadFormat
from openinfer_engine.testing import (
    DraftLog,
    accepted_share,
    check_model_drafter,
    random_weights,
    record_drafts,
    run_at_once,
)
from openinfer_engine.testing.quantised_checkpoints import SCHEMES, write_quantised, write_safetensors
from openinfer_engine.testing.quantised_family import projections
from openinfer_kv_cache import KvDtype
from openinfer_qwen3.family import Qwen3Definition
from openinfer_tiny_model import model_dir as tiny_model_dir

DRAFTS = 4
VOCAB, NUM_TOKEN_IDS = 96, 93
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "vocab_size": VOCAB,
}
SHALLOW: dict[str, Any] = CONFIG | {"num_hidden_layers": 2}
"""The same without its last layer."""
NARROW: dict[str, Any] = CONFIG | {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB + 16,
}
"""KV of another shape than the model's, and more rows of padding in its embedding."""


def write_model(folder: Path, config: Mapping[str, Any], *, texts: str | None = "t", **tensors: NDArray[Any]) -> Path:
    """A folder; ids stand for `t0`, `t1` and so on."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if texts is not None:
        write_vocabulary(folder, texts)
    weights: dict[str, Any] = dict(random_weights(Qwen3Definition(), config))
    weights["model.embed_tokens.weight"][NUM_TOKEN_IDS:] = 0  # padding, which is not to be the likeliest
    save_file(weights | tensors, folder / "model.safetensors")
    return folder


def write_vocabulary(folder: Path, texts: str) -> None:
    vocab = {f"{texts}{token_id}": token_id for token_id in range(NUM_TOKEN_IDS - 1)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": NUM_TOKEN_IDS - 1, "content": "<end>", "special": True, **flags}]
    content = {"model": {"type": "WordLevel", "vocab": vocab, "unk_token": f"{texts}0"}, "added_tokens": added}
    (folder / "tokenizer.json").write_text(json.dumps(content))


def shallow_copy(source: Path, target: Path, *, num_layers: int) -> Path:
    """A model's first layers, with its embedding and norm, as a model of its own."""
    target.mkdir()
    config = json.loads((source / "config.json").read_text()) | {"num_hidden_layers": num_layers}
    (target / "config.json").write_text(json.dumps(config))
    (target / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    with Checkpoint.open(source) as checkpoint:
        kept = {
            name: (info.dtype, checkpoint.read(name))
            for name, info in checkpoint.tensors.items()
            if not name.startswith("model.layers.") or int(name.split(".")[2]) < num_layers
        }
        write_safetensors(target / "model.safetensors", kept)
    return target


@dataclass(frozen=True)
class Folders:
    model: Path
    shallow: Path
    narrow: Path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    folder = tmp_path_factory.mktemp("models")
    model = write_model(folder / "model", CONFIG)
    shallow = shallow_copy(model, folder / "shallow", num_layers=SHALLOW["num_hidden_layers"])
    return Folders(model=model, shallow=shallow, narrow=write_model(folder / "narrow", NARROW))


def named(folder: Path) -> dict[str, Any]:
    return {"drafter_options": {"model": str(folder)}}


@pytest.mark.parametrize(
    ("draft", "options", "happens"),
    [
        ("shallow", {"max_step_tokens": 24}, "cached_tokens"),
        ("narrow", {"max_step_tokens": 24}, "cached_tokens"),
        ("shallow", {"num_blocks": 24, "max_step_tokens": 40}, "preemptions"),
        ("narrow", {"num_blocks": 36, "block_size_tokens": 4, "max_step_tokens": 40}, "preemptions"),
        ("narrow", {"num_blocks": 24, "kv_tier": ["host=16MiB"]}, "tier_tokens"),
        ("shallow", {"tensor_parallel_size": 2}, "spec_decode_num_accepted_tokens"),
        ("narrow", {"tensor_parallel_size": 2, "num_blocks": 24}, "preemptions"),
        ("model", {"num_blocks": 40}, "spec_decode_num_accepted_tokens"),
    ],
)
def test_answers_with_a_draft_model_are_those_without(
    folders: Folders, draft: str, options: dict[str, Any], happens: str
) -> None:
    folder: Path = getattr(folders, draft)
    factory: Any = DraftModelDrafter
    stats = check_model_drafter(Qwen3Definition(), folders.model, factory, **named(folder), **options)
    assert getattr(stats, happens) > 0


@pytest.fixture(scope="module")
def quantised(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantised") / "awq"
    source = write_model(folder.with_name("plain"), CONFIG | {"hidden_size": 128, "intermediate_size": 128})
    write_quantised(source, folder, SCHEMES["awq"], projections(source))
    (folder / "tokenizer.json").write_bytes((folders.model / "tokenizer.json").read_bytes())
    return folder


def recorded(model: Path, draft: Path, **options: Any) -> DraftLog:
    drafting: dict[str, Any] = {"max_drafts": DRAFTS, **named(draft), **options}
    return record_drafts(Qwen3Definition(), model, DraftModelDrafter, vocab_size=NUM_TOKEN_IDS, **drafting)


def continued(draft: Path, contexts: list[tuple[int, ...]], **options: Any) -> list[list[int]]:
    """What the draft model answers each context with, greedily, served by an engine of its own.

    Its answers do not depend on what else is in a batch: of one context at a time they took three times as long.
    """
    sizes: dict[str, Any] = {"max_num_seqs": 32, "num_blocks": 800, "block_size_tokens": 8, "batch_invariant": True}
    loop = build_loop(resolve(Qwen3Definition(), draft, EngineOptions(**sizes | options)))
    sampling = SamplingParams(max_tokens=DRAFTS, temperature=0.0)
    requests = [
        GenerateRequest(request_id=RequestId(index), prompt_token_ids=context, sampling=sampling)
        for index, context in enumerate(contexts)
    ]
    answers = run_at_once(loop, requests)
    loop.close()
    return [answers[index].token_ids for index in range(len(contexts))]


@pytest.mark.parametrize(
    ("draft", "options"),
    [("shallow", {}), ("narrow", {}), ("shallow", {"kv_cache_dtype": KvCacheDtype.FP8}), ("quantised", {})],
    ids=["of one shape", "of another shape", "fp8 kv", "awq"],
)
def test_drafts_are_what_the_draft_model_would_answer(
    folders: Folders, quantised: Path, draft: str, options: dict[str, Any]
) -> None:
    folder: Path = quantised if draft == "quantised" else getattr(folders, draft)
    log = recorded(folders.model, folder, **options)
    drafted = {context.token_ids: context.drafts for context in log.contexts}
    contexts = sorted(drafted)[:: len(drafted) // 150]
    assert len(contexts) >= 150

    expected = continued(folder, contexts, **options)
    is_id = [all(token < NUM_TOKEN_IDS for token in drafted[context]) for context in contexts]
    right = [drafted[context] == answer for context, answer in zip(contexts, expected, strict=True)]

    # A row of padding may be the likeliest: an engine samples none, and a draft of one ends its row.
    assert all(same for same, known in zip(right, is_id, strict=True) if known)
    assert sum(is_id) > 120
    # Mutants: a context that lacks its last token, and one that lacks a token of its prompt.
    for mutant in ([each[:-1] for each in contexts if len(each) > 1], [each[1:] for each in contexts if len(each) > 1]):
        answers = continued(folder, mutant[:120], **options)
        whole = [drafted[context] for context in contexts if len(context) > 1][:120]
        assert sum(answer != drafts for answer, drafts in zip(answers, whole, strict=True)) > 5


def tiny_loop(draft: Path) -> StepLoop:
    options = {"num_blocks": 400, "max_num_seqs": 4, "batch_invariant": True, "max_model_tokens": 512}
    speculative = f"draft-model,model={draft},k={DRAFTS},adaptive=false"
    return build_loop(resolve(Qwen3Definition(), tiny_model_dir(), EngineOptions(**options, speculative=speculative)))


def test_a_trained_model_accepts_all_of_its_own_drafts_and_fewer_of_a_worse_one(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 2000, 30).tolist() for _ in range(4)]
    shares: list[float] = []
    worse = shallow_copy(tiny_model_dir(), tmp_path / "worse", num_layers=7)
    for draft in (tiny_model_dir(), worse):
        loop = tiny_loop(draft)
        shares.append(accepted_share(loop, prompts))
        loop.close()
    assert shares[0] == 1.0
    assert 0.02 < shares[1] < 0.9


def asked(model: Path, draft: Path | str, **options: Any) -> Any:
    speculative = f"draft-model,model={draft}" if draft else "draft-model"
    return resolve(Qwen3Definition(), model, EngineOptions(num_blocks=200, speculative=speculative, **options))


def test_plan_shows_the_draft_model_and_its_memory(folders: Folders) -> None:
    plan = asked(folders.model, folders.narrow).plan()
    assert plan.parts["drafter"].startswith("draft-model (openinfer-engine ")
    # 2 layers of 2 heads of 8 take half as much as as many of the model's.
    assert plan.parts["drafter_kv"] == "1 layers, 256 bytes of each token's KV"
    assert plan.parts["drafter_model"].startswith("narrow ")
    parameters = sum(np.prod(shape) for shape in Qwen3Definition().tensors(Qwen3Definition().parse(NARROW)).values())
    assert plan.memory_bytes["drafter_weights"] == 4 * parameters

    same = asked(folders.model, folders.shallow).plan()
    assert same.parts["drafter_kv"] == "2 layers, 512 bytes of each token's KV"


def test_blocks_of_two_draft_models_are_never_mixed(folders: Folders) -> None:
    digests = {
        asked(folders.model, draft).layouts[0].digest for draft in (folders.shallow, folders.narrow, folders.model)
    }
    assert len(digests) == 3


def test_another_vocabulary_is_refused(folders: Folders, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", SHALLOW, texts="u")
    with pytest.raises(Refused, match=r"draft-model .*has another vocabulary than .*: 92 token ids stand for"):
        asked(folders.model, other)
    (other / "tokenizer.json").unlink()
    with pytest.raises(Refused, match=r"draft-model .*other has no tokenizer to compare with"):
        asked(folders.model, other)
    without = write_model(tmp_path / "without", CONFIG, texts=None)
    with pytest.raises(Refused, match=r"nothing says whether their token ids stand for the same text"):
        asked(without, other)


def test_a_vocabulary_that_lacks_one_token_is_refused(folders: Folders, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", SHALLOW)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = []
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(Refused, match=r"1 token ids stand for something else, the first is 92: 'nothing', and '<end>'"):
        asked(folders.model, other)


def test_random_weights_need_vocabularies_of_one_size(tmp_path: Path) -> None:
    model, draft = (write_model(tmp_path / name, CONFIG, texts=None) for name in ("model", "draft"))
    assert asked(model, draft, load_format=LoadFormat.DUMMY).drafter is not None
    wider = write_model(tmp_path / "wider", NARROW, texts=None)
    with pytest.raises(Refused, match=rf"has a vocabulary of {VOCAB + 16}, and the model one of {VOCAB}"):
        asked(model, wider, load_format=LoadFormat.DUMMY)


def write_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_a_model_that_cannot_draft_is_refused_by_name(folders: Folders, tmp_path: Path) -> None:
    draft = write_model(tmp_path / "draft", SHALLOW)
    write_config(draft, max_position_embeddings=256)
    with pytest.raises(Refused, match=r"position encoding of .* reaches 256 tokens, .* --max-model-tokens 256"):
        asked(folders.model, draft)
    assert asked(folders.model, draft, max_model_tokens=256).drafter is not None
    write_config(draft, model_type="gpt_neox")
    with pytest.raises(Refused, match=r"drafter draft-model .*no installed family serves model_type 'gpt_neox'"):
        asked(folders.model, draft, max_model_tokens=256)
    with pytest.raises(Refused, match=r"name the folder of a smaller model: --speculative draft-model,model=DIR"):
        asked(folders.model, "")
    with pytest.raises(InvalidCheckpoint, match=r"neither model\.safetensors"):
        asked(folders.model, tmp_path / "none")


def test_recurrent_states_are_refused(folders: Folders, tmp_path: Path) -> None:
    draft = write_model(tmp_path / "draft", SHALLOW)
    hybrid = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 8,
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    }
    write_config(draft, **hybrid)
    with pytest.raises(Refused, match=r"family qwen35 has recurrent states, which cannot be set back"):
        asked(folders.model, draft)


def test_tensors_that_do_not_fit_are_refused(folders: Folders, tmp_path: Path) -> None:
    draft = write_model(tmp_path / "draft", SHALLOW)
    write_config(draft, num_hidden_layers=3)
    with pytest.raises(InvalidCheckpoint, match=r"drafter draft-model .*model\.layers\.2\.\S+ is missing"):
        asked(folders.model, draft)
    write_config(draft, num_hidden_layers=1)
    with pytest.raises(InvalidCheckpoint, match=r"drafter draft-model .*model\.layers\.1\.\S+ is not a tensor of this"):
        asked(folders.model, draft)


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused_when_they_are_read(
    folders: Folders, tmp_path: Path, number: float
) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    matrix = np.ones((SHALLOW["hidden_size"], SHALLOW["intermediate_size"]), np.float32)
    matrix[3, 5] = number
    draft = write_model(tmp_path / "draft", SHALLOW, **{name: matrix})
    with pytest.raises(Refused, match=rf"the drafter's tensor {name} has numbers that are not finite"):
        build_loop(asked(folders.model, draft))


@pytest.mark.parametrize(
    ("scheme", "dtype", "code"), [("fp8 blocks F32", "F8_E4M3", 0xFF), ("fp8 blocks F8_E8M0", "F8_E8M0", 0xFF)]
)
def test_codes_that_are_no_numbers_are_refused_when_they_are_read(
    folders: Folders, tmp_path: Path, scheme: str, dtype: str, code: int
) -> None:
    source = write_model(tmp_path / "plain", CONFIG | {"hidden_size": 128, "intermediate_size": 128})
    draft = tmp_path / "quantised"
    write_quantised(source, draft, SCHEMES[scheme], projections(source))
    (draft / "tokenizer.json").write_bytes((folders.model / "tokenizer.json").read_bytes())
    build_loop(asked(folders.model, draft)).close()
    with Checkpoint.open(draft) as checkpoint:
        stored = {name: (info.dtype, np.array(checkpoint.read(name))) for name, info in checkpoint.tensors.items()}
    name = next(name for name, (kind, _) in sorted(stored.items()) if kind == dtype)
    stored[name][1].reshape(-1)[-1] = code
    write_safetensors(draft / "model.safetensors", stored)
    with pytest.raises(Refused, match=rf"the drafter's tensor {name} has numbers that are not finite"):
        build_loop(asked(folders.model, draft))


def test_fp8_kv_of_another_shape_is_refused(folders: Folders) -> None:
    with pytest.raises(Refused, match=r"FP8 holds one shape: leave --kv-cache-dtype at auto"):
        asked(folders.model, folders.narrow, kv_cache_dtype=KvCacheDtype.FP8)


def test_a_gpu_refuses_what_its_kernels_do_not_read(folders: Folders, quantised: Path) -> None:
    def requirements(draft: Path) -> Any:
        factory: Any = DraftModelDrafter
        asked = ask_drafter(
            factory,
            name="draft-model",
            drafter_dir=draft,
            definition=Qwen3Definition(),
            model_config=Qwen3Definition().parse(CONFIG),
            model_dir=folders.model,
            options=EngineOptions(device=DeviceKind.CUDA),
            max_drafts=DRAFTS,
            kv_dtype=KvDtype.BFLOAT16,
            state_dtype=KvDtype.BFLOAT16,
        )
        assert asked is not None
        return asked.requirements(1)

    assert requirements(folders.shallow).is_queued
    with pytest.raises(Refused, match=r"draft-model: its KV has another shape than the model's, which the kernels of"):
        requirements(folders.narrow)
    with pytest.raises(Refused, match=r"draft-model: its weights are quantised, which was not tried on the device"):
        requirements(quantised)

"""DSpark folders of both layouts: what they draft, that they change no token, and what is refused."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blocks_in_float64 import (
    LAYERS,
    MODEL,
    Blocks64,
    models_embedding,
    recorded,
    save_random_weights,
    wrong_drafts,
)
from dspark_bigrams import TRAINED, make_bigram_folder
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from openinfer_core import InvalidCheckpoint, Refused, read_config
from openinfer_engine import EngineOptions, build_loop, resolve
from openinfer_engine.drafters.requirements import ask_drafter
from openinfer_engine.options import DeviceKind, KvCacheDtype, LoadFormat
from openinfer_engine.testing import (
    DraftLog,
    RecordingFactory,
    accepted_share,
    check_model_drafter,
    drafts_after_prefixes,
    make_drafting_loop,
    random_requests,
    run_at_once,
)
from openinfer_kv_cache import KvDtype
from openinfer_qwen3.dspark import DSparkDrafter, dspark_tensors, read_dspark
from openinfer_qwen3.family import Qwen3Definition

NATIVE: dict[str, Any] = LAYERS | {
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 7,
    "confidence_head_with_markov": True,
    "enable_confidence_head": True,
    "layer_types": ["full_attention", "full_attention"],
    "markov_head_type": "vanilla",
    "markov_rank": 24,
    "mask_token_id": 7,
    "num_anchors": 512,
    "num_target_layers": 3,
    "target_layer_ids": [-1, 0, 2],
    "tie_word_embeddings": False,
}
SPECULATORS: dict[str, Any] = {
    "architectures": ["DSparkDraftModel"],
    "aux_hidden_state_layer_ids": [1, 3],
    "block_size": 6,
    "draft_vocab_size": 190,
    "enable_confidence_head": False,
    "markov_head_type": "vanilla",
    "markov_rank": 16,
    "mask_token_id": 11,
    "sample_from_anchor": False,
    "speculators_model_type": "dspark",
    "target_hidden_size": 96,
    "transformer_layer_config": LAYERS,
}
DRAFTS = 5
KINDS = "native", "with a vocabulary", "speculators"


@dataclass(frozen=True)
class Folder:
    """A drafter of random weights."""

    path: Path
    config: dict[str, Any]
    ids_of_head: NDArray[Any] | None = None
    """Of each token of the model, -1 where the head has none."""

    def formula(self, **mutant: Any) -> Blocks64:
        is_at_anchor = self.config["architectures"] == ["Qwen3DSparkModel"]
        tensors = load_file(self.path / "model.safetensors")
        return Blocks64(
            tensors, models_embedding(), self.config["mask_token_id"], drafts_at_anchor=is_at_anchor, **mutant
        )

    def named(self) -> dict[str, Any]:
        return {"drafter_options": {"model": str(self.path)}}


def make_folder(path: Path, kind: str) -> Folder:
    config = SPECULATORS if kind == "speculators" else NATIVE
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    names: tuple[str, ...] = ("confidence_head.proj.weight", "confidence_head.proj.bias")
    ids_of_head, given = None, {}
    if kind != "native":
        names += ("embed_tokens.weight", "lm_head.weight")
    if kind == "speculators":
        names += ("d2t", "t2d")
        ids = np.sort(np.random.default_rng(3).permutation(257)[:190])
        ids_of_head = np.full(257, -1)
        ids_of_head[ids] = np.arange(190)
        given = {"d2t": ids - np.arange(190), "t2d": ids_of_head >= 0}
    read = read_dspark(path, Qwen3Definition().parse(read_config(MODEL)), dict.fromkeys(names))
    save_random_weights(path, dspark_tensors(read), **given)
    return Folder(path, config, ids_of_head)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return make_folder(tmp_path_factory.mktemp("dspark"), "native")


@pytest.fixture(scope="module", params=KINDS)
def drafted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Folder, DraftLog]:
    """A folder of each layout, and what it drafted."""
    made = make_folder(tmp_path_factory.mktemp("dspark"), request.param)
    return made, recorded(DSparkDrafter, made.path, max_drafts=DRAFTS)


def test_drafts_are_those_of_the_formulas_in_a_thousand_contexts(drafted: tuple[Folder, DraftLog]) -> None:
    folder, log = drafted
    assert len(log.contexts) >= 1000
    assert wrong_drafts(log, folder.formula(), ids_of_head=folder.ids_of_head) == 0


MUTANTS: list[dict[str, Any]] = [
    {"shift": 1},
    {"is_causal": True},
    {"is_unnormed": True},
    {"is_shifted_place": True},
    {"markov": "none"},
    {"markov": "last token"},
    {"markov": "draft after"},
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_drafts_of_mutants_of_the_formulas_differ(drafted: tuple[Folder, DraftLog], mutant: dict[str, Any]) -> None:
    folder, log = drafted
    assert wrong_drafts(log, folder.formula(**mutant), limit=100, ids_of_head=folder.ids_of_head) > 20


def test_a_block_has_as_many_drafts_as_the_folder_says(folder: Folder) -> None:
    log = recorded(DSparkDrafter, folder.path, max_drafts=12)
    assert {len(context.drafts) for context in log.contexts} == {7}
    assert wrong_drafts(log, folder.formula(), limit=100) == 0


def test_kv_in_fp8_rounds_drafts_and_says_the_same(folder: Folder) -> None:
    """Of five drafts one differs in a fifth of the contexts, where logits are random; in most of a mutant's."""
    recording = RecordingFactory(DSparkDrafter)
    options: dict[str, Any] = {"max_drafts": DRAFTS, "kv_cache_dtype": KvCacheDtype.FP8}
    loop = make_drafting_loop(Qwen3Definition(), MODEL, recording, **options, **folder.named())
    run_at_once(loop, random_requests(12, vocab_size=257, max_prompt_tokens=40, temperature=1.0))
    loop.close()
    wrong = [
        wrong_drafts(recording.log, folder.formula(**mutant), limit=150)
        for mutant in ({}, {"shift": 1}, {"is_causal": True}, {"markov": "none"})
    ]
    assert wrong[0] < 50
    assert min(wrong[1:]) > 90


@pytest.mark.parametrize(
    ("kind", "happens", "options"),
    [
        ("native", "preemptions", {"max_step_tokens": 24, "num_blocks": 19}),
        ("speculators", "tier_tokens", {"num_blocks": 19, "kv_tier": ["host=16MiB"]}),
        ("with a vocabulary", "cached_tokens", {"num_blocks": 40, "tensor_parallel_size": 2}),
        ("native", "cached_tokens", {"num_blocks": 40, "max_drafts": 9}),
        ("speculators", "preemptions", {"num_blocks": 19, "max_step_tokens": 24, "tensor_parallel_size": 2}),
        ("native", "preemptions", {"num_blocks": 19, "max_step_tokens": 24, "kv_cache_dtype": KvCacheDtype.FP8}),
    ],
)
def test_answers_with_a_folder_are_those_without(
    tmp_path: Path, kind: str, happens: str, options: dict[str, Any]
) -> None:
    named = make_folder(tmp_path, kind).named()
    stats = check_model_drafter(Qwen3Definition(), MODEL, DSparkDrafter, **named, **options)
    assert getattr(stats, happens) > 0


@pytest.mark.parametrize("kv_cache_dtype", [KvCacheDtype.AUTO, KvCacheDtype.FP8])
def test_drafts_after_a_cached_prefix_are_those_of_a_computed_one(folder: Folder, kv_cache_dtype: KvCacheDtype) -> None:
    options: dict[str, Any] = {"vocab_size": 257, "kv_cache_dtype": kv_cache_dtype, **folder.named()}
    cached, computed = drafts_after_prefixes(Qwen3Definition(), MODEL, DSparkDrafter, **options)
    assert cached == computed


def test_plan_shows_the_folders_kv_and_an_installed_drafter(folder: Folder) -> None:
    plan = resolve(
        Qwen3Definition(), MODEL, EngineOptions(num_blocks=40, speculative=f"dspark,k=3,model={folder.path}")
    ).plan()
    assert plan.parts["drafter"].startswith("dspark (openinfer-qwen3 ")
    assert plan.parts["drafter_kv"] == "2 layers, 1024 bytes of each token's KV"


def test_random_weights_need_no_tensors(folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(NATIVE))
    options = EngineOptions(num_blocks=40, load_format=LoadFormat.DUMMY, speculative=f"dspark,model={tmp_path}")
    loop = build_loop(resolve(Qwen3Definition(), MODEL, options))
    assert accepted_share(loop, [range(20)]) <= 1
    loop.close()


OWN = {"lm_head.weight": np.zeros((257, 96), np.float32)}


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"vocab_size": 300}, {}, "another model's: vocab_size is 300, and the model's 257"),
        ({"hidden_size": 64}, {}, "hidden_size is 64, and the model's 96"),
        ({"num_target_layers": 36}, {}, "it was made for a model of 36 layers, and this one has 3"),
        ({"target_hidden_size": 64}, {}, "target_hidden_size is 64, and the model's 96"),
        ({"target_layer_ids": [0, 9]}, {}, "after layers [0, 9]"),
        ({"target_layer_ids": [-2]}, {}, "no valid DSpark config"),
        ({"target_layer_ids": None}, {}, "no valid DSpark config"),
        ({"mask_token_id": 900}, {}, "mask_token_id is 900 of 257"),
        ({"markov_head_type": "gated"}, {}, "markov_head_type is 'gated': only 'vanilla' is served"),
        ({"markov_head_type": "rnn"}, {}, "markov_head_type is 'rnn': only 'vanilla' is served"),
        ({"markov_rank": 0}, {}, "no valid DSpark config"),
        ({"markov_rank": "24"}, {}, "no valid DSpark config"),
        ({"sample_from_anchor": "yes"}, {}, "no valid DSpark config"),
        ({"topk_context": 64}, {}, "topk_context is 64"),
        ({"causal": True}, {}, "a causal block is not served"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, {}, "only full attention is served"),
        ({"rope_is_neox_style": False}, {}, "only RoPE of halves is served"),
        ({"quantization_config": {"quant_algo": "NVFP4"}}, {}, "quantised weights are not served"),
        ({"architectures": ["Gemma4DSparkModel"]}, {}, "is no DSpark folder for Qwen3"),
        ({"architectures": ["DFlashDraftModel"]}, {}, "is no DSpark folder for Qwen3"),
        ({"model_type": "lfm2"}, {}, "model_type is 'lfm2': only layers of Qwen3 are served"),
        ({"num_key_value_heads": 4}, {}, "KV has 4 heads of 32"),
        ({"block_size": 1}, {}, "no valid DSpark config"),
        ({"draft_vocab_size": 300}, {}, "draft_vocab_size is 300 of 257"),
        ({"draft_vocab_size": 200}, {}, "draft_vocab_size is 200 of 257, and lm_head.weight or d2t is missing"),
        ({}, {"markov_head.markov_w2.weight": np.zeros((257, 8), np.float32)}, "has shape [257, 8], not [257, 24]"),
        ({}, {"markov_head.gate_proj.weight": np.zeros((24, 120), np.float32)}, "markov_head.gate_proj.weight"),
        ({}, {"markov_head.markov_w1.weight": np.full((257, 24), np.nan, np.float32)}, "that are not finite"),
        ({}, {"norm.weight": np.full(96, np.inf, np.float32)}, "norm.weight has numbers that are not finite"),
        ({}, OWN | {"d2t": np.full(257, 300)}, "each must be another token of 0 .. 256"),
        ({}, OWN | {"d2t": np.where(np.arange(257) == 5, 1, 0)}, "each must be another token of 0 .. 256"),
        ({}, OWN | {"d2t": np.zeros(257, np.int64), "t2d": np.arange(257) > 0}, "t2d names 256 tokens"),
        ({}, OWN | {"d2t": np.zeros(190, np.int64)}, "d2t has shape [190], not [257]"),
    ],
    ids=range(33),
)
def test_other_folders_are_refused_by_name(
    folder: Folder, tmp_path: Path, config: dict[str, Any], tensors: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(NATIVE | config))
    save_file({**load_file(folder.path / "model.safetensors"), **tensors}, tmp_path / "model.safetensors")
    with pytest.raises((Refused, InvalidCheckpoint)) as error:
        build_loop(
            resolve(Qwen3Definition(), MODEL, EngineOptions(num_blocks=40, speculative=f"dspark,model={tmp_path}"))
        )
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({k: v for k, v in SPECULATORS.items() if k != "sample_from_anchor"}, {}, "sample_from_anchor is not said"),
        (SPECULATORS | {"transformer_layer_config": LAYERS | {"model_type": "llama"}}, {}, "only layers of Qwen3"),
        (SPECULATORS | {"transformer_layer_config": None}, {}, "only layers of Qwen3"),
        (SPECULATORS | {"aux_hidden_state_layer_ids": ["1"]}, {}, "no valid DSpark config"),
        (SPECULATORS | {"speculators_model_type": "dflash"}, {}, "is no DSpark folder for Qwen3"),
    ],
)
def test_what_the_plan_refuses(tmp_path: Path, config: dict[str, Any], options: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = EngineOptions(
        num_blocks=40, load_format=LoadFormat.DUMMY, speculative=f"dspark,model={tmp_path}", **options
    )
    with pytest.raises((Refused, InvalidCheckpoint)) as error:
        resolve(Qwen3Definition(), MODEL, given)
    assert message in str(error.value)


def test_a_gpu_refuses_ranks_that_its_kernels_do_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(NATIVE | {"markov_rank": 20}))
    asked = ask_drafter(
        DSparkDrafter,  # type: ignore[arg-type]
        name="dspark",
        drafter_dir=tmp_path,
        definition=Qwen3Definition(),
        model_config=Qwen3Definition().parse(read_config(MODEL)),
        model_dir=MODEL,
        options=EngineOptions(device=DeviceKind.CUDA, load_format=LoadFormat.DUMMY),
        max_drafts=DRAFTS,
        kv_dtype=KvDtype.BFLOAT16,
        state_dtype=KvDtype.BFLOAT16,
    )
    assert asked is not None
    with pytest.raises(Refused, match="markov_rank is 20: on a GPU only multiples of 8"):
        asked.requirements(1)


def test_a_head_of_bigrams_is_accepted_and_each_draft_depends_on_the_one_before(tmp_path: Path) -> None:
    """The folder that is run on a GPU, too."""
    made = make_bigram_folder(tmp_path)
    options = EngineOptions(num_blocks=64, batch_invariant=True, speculative=f"dspark,k=3,adaptive=false,model={made}")
    loop = build_loop(resolve(Qwen3Definition(), TRAINED, options))
    requests = random_requests(12, vocab_size=128, max_prompt_tokens=60)
    run_at_once(loop, requests)
    stats = loop.stats()
    loop.close()
    share = stats.spec_decode_num_accepted_tokens / stats.spec_decode_num_draft_tokens
    assert share > 0.05
    assert stats.spec_decode_num_accepted_tokens_per_pos[2] > 0

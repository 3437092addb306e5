"""`openinfer plan --config FILE --gpu NAME`: published shapes against parameters, KV and contexts counted by hand.

`fixtures/published_shapes.json` has the keys of the published `config.json`s that shape a model, and the parameters
that their publishers count (Moonlight's are counted by hand; a tied head counts once; DeepSeek-V3 and Qwen3.5 without
their MTP layers). Nothing here needs CuPy or a GPU.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from openinfer.commands.main import main
from openinfer.models import find_family
from openinfer_core import Refused, UnclaimedModel
from openinfer_core.family import FamilyPlan, PlansForGpu
from openinfer_engine import EngineOptions
from openinfer_engine.cuda.named_gpus import NAMED_GPUS
from openinfer_kernels.cubins import ARCHITECTURES

SHAPES: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).parent / "fixtures/published_shapes.json").read_text()
)
SERVED = {each["name"]: each for each in SHAPES["served"]}
BF16_BYTES = 2
# FP8 of 128 x 128 blocks: a byte per weight and a float32 per block; what is not quantised is BF16 or float32
FP8_BYTES_PER_PARAMETER = (1.0, 1.02)
MOST_BF16_PARAMETERS_OF_A_GPU = 60e9


@pytest.fixture
def config_file(tmp_path: Path) -> Any:
    def write(config: dict[str, Any]) -> Path:
        path = tmp_path / "model" / "config.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(config))
        return path

    return write


def plan(path: Path, *, gpu: str = "h200-141g", **options: Any) -> FamilyPlan:
    family, _ = find_family(path.parent)
    assert isinstance(family, PlansForGpu)
    return family.plan_for_gpu(path.parent, EngineOptions(**options), gpu=gpu)


@pytest.mark.parametrize(
    "name", [name for name, shape in SERVED.items() if "quantization_config" not in shape["config"]]
)
def test_plan_of_a_published_shape_counts_weights_kv_and_context_as_by_hand(name: str, config_file: Any) -> None:
    shape = SERVED[name]
    gpus = 1 if shape["parameters"] < MOST_BF16_PARAMETERS_OF_A_GPU else 8
    planned = plan(config_file(shape["config"]), num_blocks=1000, tensor_parallel_size=gpus)
    # Of several ranks each has the whole embedding, norms, routers and down-projections of latents.
    parameters = shape["parameters"] + (gpus - 1) * shape.get("replicated_parameters", 0)
    float32_bytes = shape.get("float32_parameters", 0) * (4 - BF16_BYTES)
    assert planned.memory_bytes["weights"] == parameters * BF16_BYTES + float32_bytes
    kv_bytes = 1000 * 16 * values_of_a_block(shape) * BF16_BYTES
    assert planned.memory_bytes["kv_cache"] == kv_bytes * (1 if shape["kv_is_shared"] else gpus)
    context_of_pool = shape["tables"]["context_of_1000_blocks"] if "tables" in shape else 1000 * 16
    assert planned.limits["max_model_tokens"] == min(shape["context_tokens"], context_of_pool)
    assert planned.limits.get("model_context_tokens", shape["context_tokens"]) == shape["context_tokens"]


def values_of_a_block(shape: dict[str, Any]) -> int:
    """Of one token: all layers, or those of one piece where layers have windows."""
    tables = shape.get("tables")
    return (
        shape["kv_values_per_token"] if tables is None else tables["layers_of_a_block"] * tables["kv_values_per_layer"]
    )


@pytest.mark.parametrize("name", [name for name, shape in SERVED.items() if "tables" in shape])
def test_plan_of_a_shape_with_windows_counts_contexts_by_its_block_tables(name: str, config_file: Any) -> None:
    shape = SERVED[name]
    tables, context = shape["tables"], shape["context_tokens"]
    planned = plan(config_file(shape["config"]), gpu="h200-141g")
    window_blocks = tables["window_tokens"] // 16 + 2  # it may begin inside a block, and one is written ahead
    context_blocks = tables["whole"] * context // 16 + tables["windowed"] * window_blocks
    kv_bytes = planned.memory_bytes["kv_cache"]
    assert planned.limits["num_blocks"] == kv_bytes // (16 * values_of_a_block(shape) * BF16_BYTES)
    assert planned.limits["kv_cache_tokens"] == planned.limits["num_blocks"] * context // context_blocks
    assert planned.by_ranks[0].kv_cache_tokens >= planned.limits["kv_cache_tokens"]  # not more than all slots use
    of_one_table = kv_bytes // (shape["kv_values_per_token"] * BF16_BYTES)
    assert planned.limits["kv_cache_tokens"] > 1.3 * of_one_table
    whole, windowed = tables["whole"], tables["windowed"]
    assert planned.parts["kv_tables"] == (
        f"{whole + windowed} block tables: {whole} of layers that see all tokens, "
        f"{windowed} of layers that see the last {tables['window_tokens']:,} tokens"
    )


def test_plan_of_a_context_within_its_windows_has_one_table(config_file: Any) -> None:
    planned = plan(config_file(SERVED["Gemma-2-9B"]["config"]), max_model_tokens=4096)
    assert planned.parts["kv_tables"].startswith(
        "1 block table, which keeps the KV of all tokens; some layers see 4,096"
    )
    assert planned.parts["kv_tables"].endswith("but no context is longer than 4,096")


def test_plan_of_fp8_blocks_counts_a_byte_per_weight(config_file: Any) -> None:
    shape = SERVED["DeepSeek-V3"]
    planned = plan(config_file(shape["config"]), tensor_parallel_size=8)
    low, high = (rate * shape["parameters"] for rate in FP8_BYTES_PER_PARAMETER)
    assert low < planned.memory_bytes["weights"] < high + 8 * 2 * 129280 * 7168  # embedding and head are BF16


@pytest.mark.parametrize(
    ("name", "gpu"), [("Qwen3-8B", "h100-80g"), ("Llama-3.1-8B", "rtx5090-32g"), ("Qwen3-4B", "l4-24g")]
)
def test_kv_cache_of_a_plan_is_what_the_ledger_leaves(name: str, gpu: str, config_file: Any) -> None:
    shape = SERVED[name]
    planned = plan(config_file(shape["config"]), gpu=gpu, gpu_memory_fraction=0.9, max_num_seqs=256)
    granted = int(NAMED_GPUS[gpu].memory_bytes * 0.9)
    block_bytes = 16 * shape["kv_values_per_token"] * BF16_BYTES
    rest = granted - sum(size for part, size in planned.memory_bytes.items() if part != "kv_cache")
    assert planned.limits["num_blocks"] == min(rest // block_bytes, 256 * shape["context_tokens"] // 16)
    assert planned.limits["kv_cache_tokens"] == planned.limits["num_blocks"] * 16


def test_a_model_that_does_not_fit_is_refused_with_the_number_of_gpus_that_hold_it(config_file: Any) -> None:
    path = config_file(SERVED["Llama-3.1-70B"]["config"])  # 131.4 GiB of weights
    with pytest.raises(
        Refused, match=r"does not fit into NVIDIA H100 80GB HBM3: weights take 131\.4 GiB.*fits on 4, 8"
    ):
        plan(path, gpu="h100-80g")
    assert plan(path, gpu="h100-80g", tensor_parallel_size=4).limits["kv_cache_tokens"] > 131072


def test_plan_of_a_mixture_on_two_gpus_counts_the_rank_with_most_experts(config_file: Any) -> None:
    """257 with the shared one: 129 on rank 0; routers are whole on both, in 320 rows, as are embedding and norms."""
    shape = SERVED["Qwen3.5-35B-A3B"]
    planned = plan(config_file(shape["config"]), tensor_parallel_size=2)
    expert, layers = 3 * 512 * 2048, 40
    experts_and_routers = layers * (257 * expert + 257 * 2048)
    embedding_and_norms = 248320 * 2048 + 2048 + layers * 2 * 2048 + 10 * 2 * 256
    float32 = 30 * (2 * 32 + 128)  # of linear attention, which norms are whole and decays are not
    shared_equally = shape["parameters"] - experts_and_routers - embedding_and_norms - float32
    of_rank = layers * (129 * expert + 320 * 2048) + embedding_and_norms + shared_equally // 2
    assert planned.memory_bytes["weights"] == 2 * (of_rank * BF16_BYTES + 30 * (2 * 16 + 128) * 4)


def test_ranks_that_cannot_share_a_model_are_refused(config_file: Any) -> None:
    with pytest.raises(Refused, match="3 ranks cannot share the model"):
        plan(config_file(SERVED["Qwen3-8B"]["config"]), tensor_parallel_size=3)


@pytest.mark.parametrize("shape", SHAPES["refused"], ids=lambda shape: shape["name"])
def test_plan_of_a_model_that_no_package_serves_is_refused_by_its_type(shape: dict[str, Any], config_file: Any) -> None:
    with pytest.raises(UnclaimedModel, match=f"no installed family serves model_type '?{shape['model_type']}'?"):
        find_family(config_file(shape["config"]).parent)


def test_a_refusal_names_what_is_served_and_not_every_family_that_is_not_asked_for(config_file: Any) -> None:
    with pytest.raises(UnclaimedModel) as refused:
        find_family(config_file({"model_type": "qwen3_next"}).parent)
    message = str(refused.value)
    assert message.count("qwen3_next") == 1
    for model_type in ("deepseek_v3", "kimi_k2", "qwen3", "qwen3_5"):
        assert f" {model_type}," in message or f" {model_type}:" in message
    assert "take a model of one of these types" in message


def test_named_gpus_have_kernels() -> None:
    assert {gpu.architecture for gpu in NAMED_GPUS.values()} <= set(ARCHITECTURES)


# --- the command ---------------------------------------------------------------------------------------------


def test_command_prints_the_plan_of_a_config_without_importing_cupy(
    config_file: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config_file(SERVED["Qwen3-8B"]["config"])
    assert main(["plan", "--config", str(path), "--gpu", "h100-80g", "--gpus", "2", "--json"]) == 0
    composition = json.loads(capsys.readouterr().out)
    assert composition["kernels"]["device"] == "NVIDIA H100 80GB HBM3 (sm_90a)"
    assert composition["limits"]["tensor_parallel_size"] == 2
    assert composition["parts"]["weights"] == "counted from config.json"
    assert "cupy" not in sys.modules


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--config", "CONFIG"], "--config needs --gpu NAME"),
        (["--config", "CONFIG", "--gpu", "h100-80g", "--model", "tiny"], "give one of them"),
        (["--config", "ABSENT", "--gpu", "h100-80g"], "cannot be read"),
        (["--config", "CONFIG", "--gpu", "voodoo2"], "'voodoo2' is not known; known are"),
        (["--config", "CONFIG", "--gpu", "h100-80g", "--gpus", "0"], "--gpus is 0; it must be in 1 .."),
        (["--model", "tiny", "--gpus", "2"], "--gpus needs --gpu NAME"),
    ],
)
def test_command_refuses_in_one_line_what_it_cannot_plan(
    flags: list[str], message: str, config_file: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config_file(SERVED["Qwen3-0.6B"]["config"])
    files = {"CONFIG": str(path), "ABSENT": str(path) + ".gone"}
    assert main(["plan", *(files.get(flag, flag) for flag in flags)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("openinfer plan: ")
    assert message in told
    assert told.count("\n") == 1

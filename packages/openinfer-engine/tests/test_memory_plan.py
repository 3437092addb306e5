"""What each rank would take, against what loading really uploads."""

import copy
import logging
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openinfer_core import InvalidCheckpoint, Refused, find_plugin, read_config
from openinfer_engine import EngineOptions, LocalGroup, resolve
from openinfer_engine.backends import Backend
from openinfer_engine.cpu.backend import CpuBackend
from openinfer_engine.cpu.worker import WorkerLimits
from openinfer_engine.cuda.named_gpus import NAMED_GPUS, NamedGpuBackend
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.kv_tables import TableChoice
from openinfer_engine.launch import build_loop
from openinfer_engine.memory_plan import plan_ranks, weights_of_rank
from openinfer_engine.options import DeviceKind, LoopHost
from openinfer_engine.served_context import fit_context
from openinfer_engine.testing.quantised_checkpoints import SCHEMES
from openinfer_engine.weights.dummy import DummyWeights
from openinfer_engine.weights.weight_bytes import RankWeights, rank_weights
from openinfer_kernels import Array, WeightPart
from openinfer_kernels.cpu import CpuOps
from openinfer_kv_cache import KvDtype, KvLayout, KvSpec, attention_group

DEFINITION: Any = find_plugin("openinfer.models", "qwen3").load()().definition
MODEL_DIR: Path = find_plugin("openinfer.checkpoints", "tiny").load()()
PUBLISHED = read_config(MODEL_DIR)
LIMITS = WorkerLimits(
    max_num_seqs=4, max_model_tokens=64, block_size_tokens=16, num_token_ids=256, vocab_size=PUBLISHED["vocab_size"]
)
MIB = 1 << 20


class WeighingOps(CpuOps):
    """Adds up what it uploads."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def upload_weight(self, *parts: WeightPart) -> Array:
        uploaded = super().upload_weight(*parts)
        self.num_bytes += uploaded.nbytes
        return uploaded


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False, "attention_bias": True, "vocab_size": 1001}])
def test_weights_of_a_rank_are_counted_as_they_are_loaded(ranks: int, changes: Mapping[str, Any]) -> None:
    config = DEFINITION.parse({**PUBLISHED, "num_key_value_heads": 4, "num_hidden_layers": 2, **changes})

    def load(communicator: Communicator) -> int:
        ops = WeighingOps()
        weights = DummyWeights(DEFINITION.tensors(config), rank=communicator.rank, size=ranks)
        DEFINITION.load(config, weights, ops=ops, communicator=communicator, max_model_tokens=16)
        return ops.num_bytes

    of_rank_0, *_ = LocalGroup(ranks).run(load)
    assert (
        rank_weights(DEFINITION, config, DEFINITION.tensors(config), size=ranks, itemsize_bytes=4).num_bytes
        == of_rank_0
    )


def bytes_and_products(config: Any, backend: Backend) -> RankWeights:
    return weights_of_rank(DEFINITION, config, DEFINITION.tensors(config), backend, ranks=1)


def planned(gpu: str, quantization: Mapping[str, Any], **options: Any) -> tuple[float, str]:
    """Bytes of weights on one GPU, as a share of BF16's, and what is said of the kernels."""
    published = {**PUBLISHED, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    backend = NamedGpuBackend(NAMED_GPUS[gpu], EngineOptions(device=DeviceKind.CUDA, **options))
    plain = bytes_and_products(DEFINITION.parse(published), backend)
    config = DEFINITION.parse(published | {"quantization_config": quantization})
    found = bytes_and_products(config, backend)
    return found.num_bytes / plain.num_bytes, backend.weight_kernels(found.products).get("quantised weights", "")


def test_plan_says_which_kernel_a_gpu_has_for_a_format_and_what_it_does_without() -> None:
    awq, nvfp4 = SCHEMES["awq"].config, SCHEMES["nvfp4"].config
    on_hopper, said = planned("h200-141g", awq)
    assert said == (
        "4 of int4 in groups of 1 x 32 with f16 scales and zero points: lowbit_gemm_int4, "
        "dequantised to BF16 first for many tokens"
    )
    on_ampere, said = planned("a100-40g", awq)
    assert on_ampere == on_hopper < 0.7
    assert "no kernel on this GPU, dequantised to BF16 at each product" in said
    assert "no kernel on this GPU, dequantised to BF16 at each" in planned("h200-141g", awq, batch_invariant=True)[1]
    share, said = planned("h200-141g", nvfp4)
    assert said.endswith("a global scale: lowbit_gemm_nvfp4, dequantised to BF16 first for many tokens")
    assert planned("a100-40g", nvfp4)[0] == share < 0.7
    narrow = copy.deepcopy(SCHEMES["w4a16"].config)
    narrow["config_groups"]["group_0"]["weights"]["group_size"] = 16
    share, said = planned("h200-141g", narrow)
    assert share == 1, "without a kernel it is as large as BF16"
    assert said.endswith("no kernel on this GPU, dequantised to BF16 when loaded, which takes a BF16 model's memory")
    assert "grouped_gemm_fp8" in planned("a100-40g", SCHEMES["fp8 blocks F32"].config)[1]
    assert planned("a100-40g", {}) == (1.0, "")


def test_plan_counts_tiles_as_they_are_on_a_gpu() -> None:
    mxfp4 = SCHEMES["mxfp4"].config
    in_tiles, in_rows = planned("h200-141g", mxfp4)[0], planned("a100-40g", mxfp4)[0]
    # Q and K's, O's, gate's and up's, and down's numbers, of a head of 32 and of hidden 256; a scale for each 32.
    plain = DEFINITION.parse({**PUBLISHED, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1})
    heads = plain.num_attention_heads + 2 * plain.num_key_value_heads, plain.num_attention_heads
    matrices = 256 * (plain.head_dim * sum(heads) + 3 * 512)
    backend = NamedGpuBackend(NAMED_GPUS["h200-141g"], EngineOptions(device=DeviceKind.CUDA))
    of_bf16 = bytes_and_products(plain, backend).num_bytes
    assert (in_tiles - in_rows) * of_bf16 == pytest.approx(matrices / 32), "a byte in a checkpoint, two in a tile"


class SmallDevice(CpuBackend):
    """A device with so much memory for weights and KV."""

    memory_bytes = 10 * MIB

    def kv_cache_bytes(self, *, weights_bytes: int, workspace_bytes: int) -> int:
        if weights_bytes + workspace_bytes > self.memory_bytes:
            raise Refused("it does not fit")
        return self.memory_bytes - weights_bytes - workspace_bytes


def test_numbers_of_ranks_that_do_not_fit_say_why() -> None:
    options, config = EngineOptions(), DEFINITION.parse(PUBLISHED)
    backend = SmallDevice(options)
    one, two, four, eight = plan_ranks(DEFINITION, config, options, backend, LIMITS, tables=TableChoice())
    assert one.refusal == "it does not fit"
    assert one.weights_bytes > two.weights_bytes > one.weights_bytes // 2
    assert two.refusal is None
    assert two.kv_cache_bytes == 10 * MIB - two.weights_bytes
    assert two.kv_cache_tokens > 0
    assert "4 ranks cannot share the model" in str(four.refusal)
    assert eight.weights_bytes == 0


def test_a_model_that_does_not_fit_is_refused_with_what_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openinfer_engine.engine_plan.open_backend", lambda options, **_: SmallDevice(options))
    with pytest.raises(Refused, match=r"it does not fit; by the same ledger it fits on 2 such devices"):
        resolve(DEFINITION, MODEL_DIR, EngineOptions())
    monkeypatch.setattr(SmallDevice, "memory_bytes", MIB)
    with pytest.raises(Refused, match="it does not fit; more devices of this kind would not help"):
        resolve(DEFINITION, MODEL_DIR, EngineOptions())


def test_a_loading_that_cannot_be_counted_is_said_and_taken_as_cut_evenly(caplog: pytest.LogCaptureFixture) -> None:
    class Odd:
        def __getattr__(self, name: str) -> Any:
            return getattr(DEFINITION, name)

        def load(self, config: Any, weights: Any, *, ops: Any, communicator: Any, max_model_tokens: int) -> None:
            ops.sample(config, weights, communicator, max_model_tokens)

    odd: Any = Odd()
    config = DEFINITION.parse(PUBLISHED)
    whole = bytes_and_products(config, CpuBackend(EngineOptions())).num_bytes
    assert rank_weights(odd, config, DEFINITION.tensors(config), size=2, itemsize_bytes=4).num_bytes == whole // 2
    assert "calls the operator sample" in caplog.text


def test_a_start_without_weights_says_how_it_starts_without(tmp_path: Path) -> None:
    shutil.copy(MODEL_DIR / "config.json", tmp_path)
    with pytest.raises(InvalidCheckpoint, match=r"has neither model\.safetensors nor .* --load-format dummy starts it"):
        resolve(DEFINITION, tmp_path, EngineOptions())


def test_device_that_the_family_does_not_run_on_is_refused_before_it_is_opened() -> None:
    class OnCpus(type(DEFINITION)):
        devices = frozenset({DeviceKind.CPU})

    resolve(OnCpus(), MODEL_DIR, EngineOptions(device=DeviceKind.CPU))
    with pytest.raises(Refused, match=r"^the family qwen3 does not run on the device cuda; possible: cpu$"):
        resolve(OnCpus(), MODEL_DIR, EngineOptions(device=DeviceKind.CUDA))


def test_bits_that_would_depend_on_the_rank_are_refused_on_gpus() -> None:
    """Which data-parallel rank has a request depends on the others."""
    group = attention_group(name="kv", num_layers=2, num_heads=2, head_dim=128, dtype=KvDtype.BFLOAT16, rope_tag="none")
    layout = KvLayout.from_spec(KvSpec(model_tag="tiny", paged=(group,)), block_size_tokens=16)

    def check(**options: Any) -> None:
        NamedGpuBackend(NAMED_GPUS["h200-141g"], EngineOptions(device=DeviceKind.CUDA, **options)).check_layout(layout)

    check(batch_invariant=True)
    check(data_parallel_size=2)
    with pytest.raises(Refused, match=r"--batch-invariant: .* give --data-parallel-size 1, or use --device cpu"):
        check(batch_invariant=True, data_parallel_size=2)


# --- the served context ------------------------------------------------------------------------------------------


def sizes_for(max_model_tokens: int) -> WorkerLimits:
    return replace(LIMITS, max_model_tokens=max_model_tokens)


def blocks_of_one_table(num_tokens: int) -> int:
    return -(-num_tokens // 16)


def test_a_context_that_the_pool_holds_is_served_whole() -> None:
    assert fit_context(sizes_for(64), EngineOptions(), lambda sizes: 4, blocks_for_context=blocks_of_one_table) == (
        sizes_for(64),
        4,
    )
    assert fit_context(sizes_for(63), EngineOptions(), lambda sizes: 9, blocks_for_context=blocks_of_one_table) == (
        sizes_for(63),
        9,
    )


@given(context=st.integers(2, 3000), memory=st.integers(1, 20_000), per_block=st.integers(1, 9), rows=st.integers(0, 9))
def test_the_longest_context_is_served_that_the_pool_beside_it_holds(
    context: int, memory: int, per_block: int, rows: int
) -> None:
    def pool_of(sizes: WorkerLimits) -> int:
        blocks = (memory - rows * -(-sizes.max_model_tokens // 16)) // per_block
        if blocks < 1:
            raise Refused("it does not fit")
        return blocks

    def holds(tokens: int) -> bool:
        return memory - rows * -(-tokens // 16) >= per_block * -(-tokens // 16)

    if not holds(min(16, context)):
        with pytest.raises(Refused, match=r"it does not fit"):
            fit_context(sizes_for(context), EngineOptions(), pool_of, blocks_for_context=blocks_of_one_table)
        return
    served, num_blocks = fit_context(
        sizes_for(context), EngineOptions(), pool_of, blocks_for_context=blocks_of_one_table
    )
    assert num_blocks <= pool_of(served)
    assert served.max_model_tokens <= num_blocks * 16
    if served.max_model_tokens < context:
        assert served.max_model_tokens == num_blocks * 16
        assert not holds(min(context, served.max_model_tokens + 16))


def test_a_context_that_was_asked_for_is_not_clipped() -> None:
    options = EngineOptions(max_model_tokens=64, num_blocks=3)
    with pytest.raises(Refused, match=r"max_model_tokens is 64, and the KV pool holds 48 tokens: .* raise num_blocks"):
        fit_context(sizes_for(64), options, lambda sizes: 3, blocks_for_context=blocks_of_one_table)


def test_an_engine_says_that_its_context_is_clipped(caplog: pytest.LogCaptureFixture) -> None:
    options = EngineOptions(num_blocks=4, engine_host=LoopHost.THREAD)
    plan = resolve(DEFINITION, MODEL_DIR, options)
    assert plan.info.max_model_tokens == plan.scheduler_config.max_model_tokens == 64
    assert plan.plan().limits["model_context_tokens"] == PUBLISHED["max_position_embeddings"]
    with caplog.at_level(logging.WARNING, logger="openinfer.engine"):
        build_loop(plan).close()
    assert f"the context is 64 of the model's {PUBLISHED['max_position_embeddings']} tokens" in caplog.text


def test_the_smallest_pool_of_several_ranks_is_the_context() -> None:
    plan = resolve(DEFINITION, MODEL_DIR, EngineOptions(num_blocks=8))
    assert plan.with_num_blocks(5).info.max_model_tokens == 5 * 16

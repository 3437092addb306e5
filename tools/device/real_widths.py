"""Models too large for one GPU, at their real widths with few layers and experts: a GPU's logits against the CPU's.

    python3 tools/device/real_widths.py kimi-k2-int4 kimi-k2-fp8 [--json FILE] [--commit COMMIT]

Both have the same random weights, in the formats of the published checkpoints. Each sequence is computed whole, in
pieces, and token by token. Printed: the error of each position's logits over their norm, in the median and at worst,
and how often the likeliest token is the same. An expert that is chosen on one side and not on the other, for two scores
that are almost equal, moves a position as a whole: so the median decides, and it is measured beside that of the CPU
whose operators' results are rounded to BF16, as every GPU's are.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from source_packages import folders

sys.path[:0] = folders()

import msgspec  # noqa: E402
import numpy as np  # noqa: E402

from openinfer_core.provenance import provenance  # noqa: E402
from openinfer_engine.testing import FamilyHarness  # noqa: E402
from openinfer_kernels.cpu import CpuOps  # noqa: E402
from openinfer_kernels.cuda import CudaOps  # noqa: E402
from openinfer_kimi_k2 import KimiK2  # noqa: E402

MAX_RATIO = 2.5
"""Of the GPU's median error to that of the CPU with rounded results; a GPU rounds inside of operators too."""
TOKENS = 300
KIMI_K2 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.827,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 32.0,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    # few, for the CPU's sake:
    "vocab_size": 4096,
    "num_hidden_layers": 2,
    "n_routed_experts": 12,
}
INT4 = {"num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": True, "type": "int"}
MODELS = {
    "kimi-k2-int4": KIMI_K2
    | {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": INT4}},
        }
    },
    "kimi-k2-fp8": KIMI_K2
    | {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("models", nargs="+", choices=MODELS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit")
    options = parser.parse_args()
    ops = CudaOps()
    rows = [row for name in options.models for row in compare(name, ops)]
    if options.json:
        facts = {"tokens": TOKENS, "max_ratio": MAX_RATIO, "models": MODELS}
        written = msgspec.structs.asdict(provenance(commit=options.commit)) | {"set_up": facts, "rows": rows}
        options.json.write_text(json.dumps(written, indent=1) + "\n")
    return 0 if all(row["passes"] for row in rows) else 1


class RoundedOps:
    """The CPU's operators; what they return in the compute dtype is rounded to BF16."""

    ROUNDED = (
        "add_rms_norm",
        "latent_attention",
        "latent_norm_rope_append",
        "linear",
        "linear_swiglu",
        "quantised_linear",
        "rms_norm",
        "swiglu",
    )

    def __init__(self) -> None:
        self._cpu = CpuOps()

    def __getattr__(self, name: str):
        operator = getattr(self._cpu, name)
        if name not in self.ROUNDED:
            return operator
        return lambda *given, **named: rounded(operator(*given, **named))


def rounded(array):
    """Float32 to the nearest BF16, ties to even."""
    bits = np.ascontiguousarray(array).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def compare(name: str, ops: CudaOps) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[name]))
        there = {"dummy": True, "num_blocks": 400, "max_model_tokens": 1024, "block_tokens": 16}
        made = [FamilyHarness(KimiK2.definition, Path(folder), ops=each, **there) for each in (None, RoundedOps(), ops)]
    cpu, rounding, gpu = made
    ids = np.random.default_rng(7).integers(0, 4096, TOKENS).tolist()
    truth = cpu.step({"all": ids})["all"]
    baseline = facts_of(rounding.step({"all": ids})["all"], truth)
    print(f"{name}: spread of the logits {truth.std():.2f}")
    show("CPU, results rounded", baseline)
    cuts = {
        "whole": [TOKENS],
        "pieces": [120, 121, 250, TOKENS],
        "token by token behind 270": [270, *range(271, TOKENS + 1)],
    }
    rows = []
    for run, ends in cuts.items():
        pieces = [gpu.step({run: ids[a:b]})[run] for a, b in zip([0, *ends], ends, strict=False)]
        facts = facts_of(np.concatenate(pieces), truth)
        show(run, facts)
        passes = facts["median_error"] <= MAX_RATIO * baseline["median_error"]
        rows.append({"model": name, "run": run, **facts, "cpu_rounded": baseline, "passes": passes})
    return rows


def facts_of(got, truth) -> dict[str, float]:
    errors = np.linalg.norm(got - truth, axis=1) / np.linalg.norm(truth, axis=1)
    same = float((got.argmax(axis=1) == truth.argmax(axis=1)).mean())
    return {"median_error": float(np.median(errors)), "worst_error": float(errors.max()), "same_likeliest": same}


def show(run: str, facts: dict[str, float]) -> None:
    error, worst = facts["median_error"], facts["worst_error"]
    print(
        f"  {run:26} error {error:.4f}, at worst {worst:.4f}; same likeliest {facts['same_likeliest']:.3f}", flush=True
    )


if __name__ == "__main__":
    sys.exit(main())

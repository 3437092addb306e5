"""Models too large for one GPU, at their real widths with few layers and experts: a GPU's logits against the CPU's.

    python3 tools/device/real_widths.py kimi-k2-int4 kimi-k2-fp8 [--json FILE] [--commit COMMIT]

Both have the same random weights, in the formats of the published checkpoints. Each sequence is computed whole, in
pieces, and token by token. Printed: the error of each position's logits over their norm, in the median and at worst, and
how often the likeliest token is the same. An expert that is chosen on one side and not on the other, for two scores that
are almost equal, moves a position as a whole: so the median decides.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from source_packages import folders

sys.path[:0] = folders()

import msgspec  # noqa: E402
import numpy as np  # noqa: E402

from openinfer_core.provenance import provenance  # noqa: E402
from openinfer_engine.testing import FamilyHarness  # noqa: E402
from openinfer_kernels.cuda import CudaOps  # noqa: E402
from openinfer_kimi_k2 import KimiK2  # noqa: E402

MAX_MEDIAN_ERROR = 0.04
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
        facts = {"tokens": TOKENS, "max_median_error": MAX_MEDIAN_ERROR, "models": MODELS}
        written = msgspec.structs.asdict(provenance(commit=options.commit)) | {"set_up": facts, "rows": rows}
        options.json.write_text(json.dumps(written, indent=1) + "\n")
    return 0 if all(row["median_error"] <= MAX_MEDIAN_ERROR for row in rows) else 1


def compare(name: str, ops: CudaOps) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[name]))
        there = {"dummy": True, "num_blocks": 400, "max_model_tokens": 1024, "block_tokens": 16}
        began = time.perf_counter()
        cpu = FamilyHarness(KimiK2.definition, Path(folder), **there)
        gpu = FamilyHarness(KimiK2.definition, Path(folder), ops=ops, **there)
    ids = np.random.default_rng(7).integers(0, 4096, TOKENS).tolist()
    loaded = time.perf_counter()
    truth = cpu.step({"all": ids})["all"]
    computed = time.perf_counter()
    print(
        f"{name}: loaded twice in {loaded - began:.1f} s, CPU {computed - loaded:.1f} s, logits spread {truth.std():.2f}"
    )
    cuts = {
        "whole": [TOKENS],
        "pieces": [120, 121, 250, TOKENS],
        "token by token behind 270": [270, *range(271, TOKENS + 1)],
    }
    rows = []
    for run, ends in cuts.items():
        pieces = [gpu.step({run: ids[a:b]})[run] for a, b in zip([0, *ends], ends, strict=False)]
        got = np.concatenate(pieces)
        errors = np.linalg.norm(got - truth, axis=1) / np.linalg.norm(truth, axis=1)
        same = float((got.argmax(axis=1) == truth.argmax(axis=1)).mean())
        row = {"model": name, "run": run, "median_error": float(np.median(errors)), "worst_error": float(errors.max())}
        rows.append(row | {"same_likeliest": same})
        print(
            f"  {run:26} error {row['median_error']:.4f}, at worst {row['worst_error']:.4f}; same likeliest {same:.3f}"
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())

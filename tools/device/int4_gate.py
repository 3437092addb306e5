"""The golden gate of INT4 weights at real shapes on a GPU: prompts and captured decode steps, against float32.

    python3 tools/device/int4_gate.py [--layers N] [--commit COMMIT] [--out FILE]

Qwen3-4B of `golden_reference.py`, its matrices quantised by PyTorch to INT4 in groups of 128, packed as
compressed-tensors packs them. The truth is transformers in float32 on what the codes stand for, teacher-forced over
prompts and what the engine went on with; the engine is held to the gate of BF16 in `golden_gate.py`. Two controls must
not pass: scales of the group after, and pairs of codes that are exchanged.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from source_packages import folders

sys.path[:0] = [*folders(), str(Path(__file__).parent)]

import golden_reference  # noqa: E402
import msgspec  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from golden_gate import GATE, TOP, Answer, Comparison, ask, play  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import AutoConfig  # noqa: E402

from openinfer_core import find_plugin  # noqa: E402
from openinfer_core.provenance import provenance  # noqa: E402
from openinfer_engine import EngineOptions, build_loop, resolve  # noqa: E402
from openinfer_engine.options import DeviceKind  # noqa: E402

GROUP, PROMPTS, PROMPT_TOKENS, DECODED = 128, 4, 300, 48
WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None}},
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
}
Packed = tuple[torch.Tensor, torch.Tensor]
"""Words of eight codes, the first in the low bits, and scales."""


def quantised(values: torch.Tensor) -> tuple[Packed, torch.Tensor]:
    """Codes and scales, and what they stand for in float32."""
    rows, columns = values.shape
    groups = values.float().reshape(rows, columns // GROUP, GROUP)
    scales = (groups.abs().amax(dim=2) / 7).to(torch.bfloat16)
    codes = (groups / scales.float()[..., None]).round().clamp(-8, 7)
    stands_for = (codes * scales.float()[..., None]).reshape(rows, columns)
    nibbles = (codes.reshape(rows, columns // 8, 8) + 8).to(torch.int64) << torch.arange(0, 32, 4, device=values.device)
    words = nibbles.sum(dim=2)
    return ((words - (words >> 31 << 32)).to(torch.int32), scales), stands_for


def of_group_after(packed: torch.Tensor, scales: torch.Tensor) -> Packed:
    return packed, scales.roll(-1, dims=1)


def exchanged(packed: torch.Tensor, scales: torch.Tensor) -> Packed:
    return (packed & 0x0F0F0F0F) << 4 | (packed >> 4 & 0x0F0F0F0F), scales


def as_packed(packed: torch.Tensor, scales: torch.Tensor) -> Packed:
    return packed, scales


def stored(weights: dict[str, torch.Tensor], change: Callable[[torch.Tensor, torch.Tensor], Packed]) -> Any:
    """The tensors of a checkpoint, by name, on the host."""
    found: dict[str, torch.Tensor] = {}
    for name, values in weights.items():
        if "_proj." in name:
            packed, scales = change(*quantised(values)[0])
            found[f"{name}_packed"], found[f"{name}_scale"] = packed.cpu(), scales.contiguous().cpu()
            found[f"{name}_shape"] = torch.tensor(values.shape, dtype=torch.int64)
        else:
            found[name] = values.cpu()
    return found


def answers_of(folder: Path, prompts: list[list[int]]) -> list[Answer]:
    family = find_plugin("openinfer.models", "qwen3").load()()
    asked = EngineOptions(device=DeviceKind.CUDA, num_blocks=1024, max_num_seqs=8, prefix_cache=False)
    with closing(build_loop(resolve(family.definition, folder, asked))) as loop:
        return play(loop, ask(prompts, [DECODED] * len(prompts), prompt_logprobs=TOP, logprobs=TOP))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--commit", help="where the checkout does not say")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    config = golden_reference.CONFIGS["qwen3-4b"] | {"num_hidden_layers": arguments.layers}
    made = AutoConfig.for_model(**config)
    weights = golden_reference.random_weights(made, logit_std=2.0)
    stands_for = {
        name: quantised(values)[1] if "_proj." in name else values.float() for name, values in weights.items()
    }
    model = golden_reference._model(made, stands_for, torch.float32, device="cuda")  # noqa: SLF001 - the gate's half
    del stands_for
    prompts = np.random.default_rng(1).integers(0, config["vocab_size"], (PROMPTS, PROMPT_TOKENS)).tolist()
    rows: list[dict[str, Any]] = []

    def run(name: str, change: Callable[[torch.Tensor, torch.Tensor], Packed], *, must_pass: bool) -> None:
        folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        try:
            save_file(stored(weights, change), folder / "model.safetensors", metadata={"format": "pt"})
            (folder / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZATION}))
            torch.cuda.empty_cache()
            answers = answers_of(folder, prompts)
        finally:
            shutil.rmtree(folder)
        comparison = Comparison(GATE)
        for answer in answers:
            with torch.no_grad():
                logits = model(torch.tensor([answer.prompt + answer.tokens], device="cuda")).logits[0]
                truth = torch.log_softmax(logits.float(), -1)
            for position, top_ids, top_logprobs in answer.scored():
                comparison.add(truth[position], top_ids, top_logprobs)
        row = {"run": name, **comparison.result(), "must_pass": must_pass}
        rows.append(row)
        print("  ".join(f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)

    run("as stored", as_packed, must_pass=True)
    run("control, scales of the group after", of_group_after, must_pass=False)
    run("control, pairs of codes exchanged", exchanged, must_pass=False)
    if arguments.out:
        report = msgspec.to_builtins(provenance(commit=arguments.commit)) | {
            "command": "python3 tools/device/int4_gate.py",
            "set_up": {
                "layers": arguments.layers,
                "prompts": PROMPTS,
                "prompt_tokens": PROMPT_TOKENS,
                "decoded_tokens": DECODED,
                "logit_std": 2.0,
            },
            "gate": GATE,
            "runs": rows,
        }
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(row["passes"] == row["must_pass"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

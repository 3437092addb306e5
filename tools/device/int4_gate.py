"""The golden gate of INT4 or FP8 weights at real shapes on a GPU: prompts and captured decode steps, against float32.

    python3 tools/device/int4_gate.py [--format fp8] [--prompts N] [--prompt-tokens N] [--decoded N] [--layers N]
                                      [--without-controls] [--commit COMMIT] [--out FILE]

Qwen3-4B of `golden_reference.py`, its matrices quantised by PyTorch to INT4 in groups of 128, packed as
compressed-tensors packs them, or to E4M3 in blocks of 128 x 128. The truth is transformers in float32 on what the codes
stand for, teacher-forced over prompts and what the engine went on with; the engine is held to the gate of BF16 in
`golden_gate.py`. Controls must not pass: scales of the group or of the block after and, of INT4, pairs of codes that
are exchanged.
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
import low_bit_gate  # noqa: E402
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

GROUP = 128
WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None}},
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
}
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
Packed = tuple[torch.Tensor, torch.Tensor]
"""Words of eight codes, the first in the low bits, or codes of E4M3; and scales."""


def quantised(values: torch.Tensor, *, fp8: bool) -> tuple[Packed, torch.Tensor]:
    """Codes and scales, and what they stand for in float32."""
    if fp8:
        codes, scales, stands_for = low_bit_gate.quantised(values)
        return (codes, scales), stands_for
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


def stored(
    weights: dict[str, torch.Tensor], change: Callable[[torch.Tensor, torch.Tensor], Packed], *, fp8: bool
) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, by name, on the host."""
    found: dict[str, torch.Tensor] = {}
    for name, values in weights.items():
        if "_proj." in name:
            packed, scales = change(*quantised(values, fp8=fp8)[0])
            codes_name, scales_name = (name, f"{name}_scale_inv") if fp8 else (f"{name}_packed", f"{name}_scale")
            found[codes_name], found[scales_name] = packed.cpu(), scales.contiguous().cpu()
            if not fp8:
                found[f"{name}_shape"] = torch.tensor(values.shape, dtype=torch.int64)
        else:
            found[name] = values.cpu()
    return found


def answers_of(folder: Path, prompts: list[list[int]], decoded: int) -> list[Answer]:
    family = find_plugin("openinfer.models", "qwen3").load()()
    asked = EngineOptions(device=DeviceKind.CUDA, num_blocks=1024, max_num_seqs=8, prefix_cache=False)
    with closing(build_loop(resolve(family.definition, folder, asked))) as loop:
        return play(loop, ask(prompts, [decoded] * len(prompts), prompt_logprobs=TOP, logprobs=TOP))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", choices=("int4", "fp8"), default="int4")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=300)
    parser.add_argument("--decoded", type=int, default=48, help="tokens after each prompt")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--without-controls", action="store_true")
    parser.add_argument("--commit", help="where the checkout does not say")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    fp8 = arguments.format == "fp8"
    config = golden_reference.CONFIGS["qwen3-4b"] | {"num_hidden_layers": arguments.layers}
    made = AutoConfig.for_model(**config)
    weights = golden_reference.random_weights(made, logit_std=2.0)
    stands_for = {
        name: quantised(values, fp8=fp8)[1] if "_proj." in name else values.float() for name, values in weights.items()
    }
    model = golden_reference._model(made, stands_for, torch.float32, device="cuda")  # noqa: SLF001 - the gate's half
    del stands_for
    prompts = (
        np.random.default_rng(1)
        .integers(0, config["vocab_size"], (arguments.prompts, arguments.prompt_tokens))
        .tolist()
    )
    rows: list[dict[str, Any]] = []

    def run(name: str, change: Callable[[torch.Tensor, torch.Tensor], Packed], *, must_pass: bool) -> None:
        folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        try:
            save_file(stored(weights, change, fp8=fp8), folder / "model.safetensors", metadata={"format": "pt"})
            (folder / "config.json").write_text(
                json.dumps(config | {"quantization_config": BLOCKS if fp8 else QUANTIZATION})
            )
            torch.cuda.empty_cache()
            answers = answers_of(folder, prompts, arguments.decoded)
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
    if not arguments.without_controls:
        run("control, scales of the group or block after", of_group_after, must_pass=False)
    if not (arguments.without_controls or fp8):
        run("control, pairs of codes exchanged", exchanged, must_pass=False)
    if arguments.out:
        report = msgspec.to_builtins(provenance(commit=arguments.commit)) | {
            "command": "python3 tools/device/int4_gate.py",
            "set_up": {
                "format": arguments.format,
                "layers": arguments.layers,
                "prompts": arguments.prompts,
                "prompt_tokens": arguments.prompt_tokens,
                "decoded_tokens": arguments.decoded,
                "logit_std": 2.0,
            },
            "gate": GATE,
            "runs": rows,
        }
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(row["passes"] == row["must_pass"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

"""The golden gate of what a user may have in few bits: prompts' activations, the output head; at real shapes on a GPU.

    python3 tools/device/low_bit_gate.py [--layers N] [--tokens N] [--commit COMMIT] [--out FILE]

Qwen3-4B of `golden_reference.py`, its matrices quantised by PyTorch to E4M3 in blocks of 128 x 128. The truth is
transformers in float32 on what the codes stand for; compared is as in `golden_gate.py`, over all positions of prompts.
The engine without these options is held to the BF16 gate. Stated before anything was measured: twice that gate for
activations, and for a head in FP8 in its place the gate itself, with at most 3 % of positions with another likeliest
token than without it. Engines with a mistake must not pass.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any

from source_packages import folders

sys.path[:0] = [*folders(), str(Path(__file__).parent)]

import golden_reference  # noqa: E402
import msgspec  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from golden_gate import GATE, TOP, Answer, Comparison, ask, play  # noqa: E402
from low_bit_activations import mistaken  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import AutoConfig  # noqa: E402

from openinfer_core import find_plugin  # noqa: E402
from openinfer_core.provenance import provenance  # noqa: E402
from openinfer_engine import EngineOptions, build_loop, resolve  # noqa: E402
from openinfer_engine.options import DeviceKind, LowBitActivations  # noqa: E402

TWICE = {name: 2 * limit for name, limit in GATE.items()}
MOST_FLIPS = 0.03
BLOCK = 128
PREFILL = {"low_bit_activations": LowBitActivations.PREFILL}
HEAD = {"fp8_head": True}


def quantised(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and what they stand for in float32."""
    rows, columns = values.shape
    blocks = values.float().reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scales = blocks.abs().amax(dim=(1, 3)) / 448
    spread = scales[:, None, :, None]
    codes = (blocks / spread).to(torch.float8_e4m3fn)
    return codes.reshape(rows, columns), scales, (codes.float() * spread).reshape(rows, columns)


def make_model(folder: Path, config: dict[str, Any]) -> Any:
    """Writes the quantised checkpoint; returns transformers' model of what it stands for, in float32."""
    made = AutoConfig.for_model(**config)
    stored: dict[str, torch.Tensor] = {}
    truth: dict[str, torch.Tensor] = {}
    for name, values in golden_reference.random_weights(made, logit_std=2.0).items():
        if "_proj." in name:
            codes, scales, truth[name] = quantised(values)
            stored[name], stored[f"{name}_scale_inv"] = codes.cpu(), scales.cpu()
        else:
            stored[name], truth[name] = values.cpu(), values.float()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    blocks = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": blocks}))
    return golden_reference._model(made, truth, torch.float32, device="cuda")  # noqa: SLF001 - the gate's other half


def answers_of(folder: Path, prompts: Sequence[Sequence[int]], **options: Any) -> list[Answer]:
    family = find_plugin("openinfer.models", "qwen3").load()()
    asked = EngineOptions(
        device=DeviceKind.CUDA, num_blocks=1024, max_num_seqs=8, prefix_cache=False, cuda_graph=False, **options
    )
    with closing(build_loop(resolve(family.definition, folder, asked))) as loop:
        return play(loop, ask(prompts, [1] * len(prompts), prompt_logprobs=TOP, logprobs=TOP))


def compare(answers: Sequence[Answer], truths: Sequence[torch.Tensor], limits: dict[str, float]) -> dict[str, Any]:
    comparison = Comparison(limits)
    for answer, truth in zip(answers, truths, strict=True):
        for position, top_ids, top_logprobs in answer.scored():
            comparison.add(truth[position], top_ids, top_logprobs)
    return comparison.result()


def flips(answers: Sequence[Answer], others: Sequence[Answer]) -> float:
    """The share of positions whose likeliest tokens differ."""
    pairs = [
        (ours[0], theirs[0])
        for answer, other in zip(answers, others, strict=True)
        for (_, ours, _), (_, theirs, _) in zip(answer.scored(), other.scored(), strict=True)
    ]
    return float(np.mean([ours != theirs for ours, theirs in pairs]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--tokens", type=int, default=600, help="of each of four prompts")
    parser.add_argument("--commit", help="where the checkout does not say")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    config = golden_reference.CONFIGS["qwen3-4b"] | {"num_hidden_layers": arguments.layers}
    prompts = np.random.default_rng(1).integers(0, config["vocab_size"], (4, arguments.tokens)).tolist()
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    rows: list[dict[str, Any]] = []
    exact: list[Answer] = []

    def run(
        name: str,
        limits: dict[str, float],
        options: dict[str, Any],
        *,
        mistake: Callable[[], AbstractContextManager[None]] = nullcontext,
        must_pass: bool = True,
    ) -> None:
        with mistake():
            answers = answers_of(folder, prompts, **options)
        exact.extend(answers if not exact else ())
        row = {"run": name, **compare(answers, truths, limits), "flips": flips(answers, exact), "must_pass": must_pass}
        if options == HEAD:
            row["passes"] = row["passes"] and row["flips"] <= MOST_FLIPS
        rows.append(row)
        print(
            name, "  ".join(f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True
        )

    try:
        model = make_model(folder, config)
        with torch.no_grad():
            truths = [
                torch.log_softmax(model(torch.tensor([each], device="cuda")).logits[0].float(), -1) for each in prompts
            ]
        del model
        torch.cuda.empty_cache()
        run("as stored", GATE, {})
        run("FP8 activations", TWICE, PREFILL)
        run("FP8 head", GATE, HEAD)
        run("both", TWICE, PREFILL | HEAD)
        for mistake in ("scales of the token after", "scales of blocks transposed"):
            made = lambda mistake=mistake: mistaken(mistake)  # noqa: E731
            run(f"control, {mistake}", TWICE, PREFILL, mistake=made, must_pass=False)
        made = lambda: mistaken("scales of the row after")  # noqa: E731
        run("control, scales of the row after", GATE, HEAD, mistake=made, must_pass=False)
    finally:
        shutil.rmtree(folder)
    if arguments.out:
        report = msgspec.to_builtins(provenance(commit=arguments.commit)) | {
            "command": "python3 tools/device/low_bit_gate.py",
            "set_up": {"layers": arguments.layers, "prompts": 4, "prompt_tokens": arguments.tokens, "logit_std": 2.0},
            "gates": {"activations": TWICE, "head": GATE | {"flips": MOST_FLIPS}},
            "runs": rows,
        }
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(row["passes"] == row["must_pass"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

"""The golden gate of quantised weights at real shapes on a GPU: prompts and captured decode steps, against float32.

    python3 tools/device/formats_gate.py [--formats nvfp4 awq …] [--prompts N] [--prompt-tokens N] [--decoded N]
                                         [--layers N] [--without-controls] [--commit COMMIT] [--out FILE]

Qwen3-4B of `golden_reference.py`, its matrices quantised and packed by PyTorch as `FORMATS` says. The truth is
transformers in float32 on what the codes stand for, teacher-forced over prompts and what the engine went on with; the
engine is held to the gate of BF16 in `golden_gate.py`. Controls must not pass: scales of the group, block or row after,
pairs of codes that are exchanged, zero points one too high.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
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
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight columns a half byte is of, from the lowest on (AutoAWQ's `order_map`)."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
Packed = dict[str, torch.Tensor]
"""Tensors by the end of their name, which is empty for codes that take the place of the weight."""
Change = Callable[[Packed], Packed]


@dataclass(frozen=True)
class Format:
    """A published layout."""

    config: dict[str, Any]
    """`quantization_config`."""
    quantise: Callable[[torch.Tensor], tuple[Packed, torch.Tensor]]
    """Of a matrix in float32: its tensors, and what they stand for in float32."""
    controls: dict[str, Change]


def words_of(codes: torch.Tensor, order: tuple[int, ...] = tuple(range(8)), bits: int = 4) -> torch.Tensor:
    """Codes of so many bits in each int32, along the last dimension."""
    codes_of_word = codes.reshape(*codes.shape[:-1], -1, 32 // bits)[..., list(order)[: 32 // bits]].to(torch.int64)
    words = (codes_of_word << torch.arange(0, 32, bits, device=codes.device)).sum(dim=-1)
    return (words - (words >> 31 << 32)).to(torch.int32)


def int4(values: torch.Tensor, group: int = GROUP) -> tuple[Packed, torch.Tensor]:
    groups = values.reshape(len(values), -1, group)
    scales = (groups.abs().amax(dim=2) / 7).to(torch.bfloat16)
    codes = (groups / scales.float()[..., None]).round().clamp(-8, 7)
    stands_for = (codes * scales.float()[..., None]).reshape(values.shape)
    shape = torch.tensor(values.shape, dtype=torch.int64)
    return {"packed": words_of((codes + 8).reshape(values.shape)), "scale": scales, "shape": shape}, stands_for


def awq(values: torch.Tensor) -> tuple[Packed, torch.Tensor]:
    groups = values.reshape(len(values), -1, GROUP)
    low, high = groups.amin(dim=2).clamp(max=0), groups.amax(dim=2).clamp(min=0)
    scales = ((high - low) / 15).to(torch.float16)
    zeros = (-low / scales.float()).round().clamp(0, 15)
    codes = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 15)
    stands_for = ((codes - zeros[..., None]) * scales.float()[..., None]).reshape(values.shape)
    turned = codes.reshape(values.shape).T
    return {
        "qweight": words_of(turned, AWQ_ORDER),
        "qzeros": words_of(zeros.T, AWQ_ORDER),
        "scales": scales.T,
    }, stands_for


def gptq(values: torch.Tensor) -> tuple[Packed, torch.Tensor]:
    """Of the first version, which stores zero points less one."""
    groups = values.reshape(len(values), -1, GROUP)
    low, high = groups.amin(dim=2).clamp(max=0), groups.amax(dim=2).clamp(min=0)
    scales = ((high - low) / 15).to(torch.float16)
    zeros = (-low / scales.float()).round().clamp(1, 15)
    codes = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 15)
    stands_for = ((codes - zeros[..., None]) * scales.float()[..., None]).reshape(values.shape)
    return {
        "qweight": words_of(codes.reshape(values.shape)).T,
        "qzeros": words_of(zeros.T - 1),
        "scales": scales.T,
        "g_idx": (torch.arange(values.shape[1], device=values.device) // GROUP).to(torch.int32),
    }, stands_for


def w8a16(values: torch.Tensor) -> tuple[Packed, torch.Tensor]:
    scales = (values.abs().amax(dim=1, keepdim=True) / 127.5).to(torch.bfloat16)
    codes = (values / scales.float()).round().clamp(-128, 127)
    shape = torch.tensor(values.shape, dtype=torch.int64)
    return {"packed": words_of(codes + 128, bits=8), "scale": scales, "shape": shape}, codes * scales.float()


def int8(values: torch.Tensor) -> tuple[Packed, torch.Tensor]:
    scales = (values.abs().amax(dim=1, keepdim=True) / 127.5).to(torch.bfloat16)
    codes = (values / scales.float()).round().clamp(-128, 127)
    return {"": codes.to(torch.int8), "scale": scales}, codes * scales.float()


def fp8(values: torch.Tensor) -> tuple[Packed, torch.Tensor]:
    codes, scales, stands_for = low_bit_gate.quantised(values)
    return {"": codes, "scale_inv": scales}, stands_for


def pairs_of(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest codes of E2M1, the even column in the low half of a byte, and their numbers."""
    sizes = torch.tensor(E2M1, device=values.device)
    found = torch.bucketize(values.abs(), (sizes[1:] + sizes[:-1]) / 2)
    codes = (found + 8 * (values < 0)).to(torch.uint8)
    return codes[:, 0::2] | codes[:, 1::2] << 4, sizes[found] * torch.where(values < 0, -1.0, 1.0)


def mxfp4(values: torch.Tensor) -> tuple[Packed, torch.Tensor]:
    exponents = values.reshape(len(values), -1, 32).abs().amax(dim=2).log2().floor() - 2
    spread = exponents.exp2().repeat_interleave(32, dim=1)
    pairs, numbers = pairs_of(values / spread)
    return {"packed": pairs, "scale": (exponents + 127).to(torch.uint8)}, numbers * spread


def nvfp4(values: torch.Tensor) -> tuple[Packed, torch.Tensor]:
    divisor = 448 * 6 / values.abs().amax()
    scales = (values.reshape(len(values), -1, 16).abs().amax(dim=2) / 6 * divisor).to(torch.float8_e4m3fn)
    spread = (scales.float() / divisor).repeat_interleave(16, dim=1)
    pairs, numbers = pairs_of(values / spread)
    return {"packed": pairs, "scale": scales, "global_scale": divisor.reshape(1)}, numbers * spread


def after(part: str, dimension: int = 1) -> Change:
    """Each group, block or row has the scales of the one after."""

    def change(packed: Packed) -> Packed:
        scales = packed[part]
        bits = scales.view(torch.uint8) if scales.dtype == torch.float8_e4m3fn else scales
        return packed | {part: bits.roll(-1, dims=dimension).view(scales.dtype)}

    return change


def exchanged(packed: Packed) -> Packed:
    codes = packed["packed"]
    low = 0x0F0F0F0F if codes.dtype == torch.int32 else 0x0F
    return packed | {"packed": (codes & low) << 4 | (codes >> 4 & low)}


def one_too_high(packed: Packed) -> Packed:
    """Of zero points, but for those that are 15."""
    words, more = packed["qzeros"], torch.zeros_like(packed["qzeros"])
    for shift in range(0, 32, 4):
        more |= ((words >> shift & 15) < 15).to(torch.int32) << shift
    return packed | {"qzeros": words + more}


def one_too_low(packed: Packed) -> Packed:
    """Of zero points, but for those whose stored number is 0."""
    words, less = packed["qzeros"], torch.zeros_like(packed["qzeros"])
    for shift in range(0, 32, 4):
        less |= ((words >> shift & 15) > 0).to(torch.int32) << shift
    return packed | {"qzeros": words - less}


def groups(name: str, activations: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    """compressed-tensors' config."""
    group = {"targets": ["Linear"], "weights": {"symmetric": True} | weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
DYNAMIC = {"num_bits": 8, "dynamic": True, "strategy": "token", "symmetric": True}
OF_GROUP_AFTER, EXCHANGED = "scales of the group or block after", "pairs of codes exchanged"
FORMATS = {
    "int4": Format(
        groups("pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP),
        int4,
        {OF_GROUP_AFTER: after("scale"), EXCHANGED: exchanged},
    ),
    "int4_g32": Format(
        groups("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32),
        partial(int4, group=32),
        {OF_GROUP_AFTER: after("scale"), EXCHANGED: exchanged},
    ),
    "gptq": Format(GPTQ, gptq, {"zero points one too low": one_too_low, OF_GROUP_AFTER: after("scales", 0)}),
    "w8a16": Format(
        groups("pack-quantized", num_bits=8, type="int", strategy="channel"),
        w8a16,
        {"scales of the row after": after("scale", 0)},
    ),
    "fp8": Format(BLOCKS, fp8, {OF_GROUP_AFTER: after("scale_inv")}),
    "nvfp4": Format(
        groups("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        nvfp4,
        {OF_GROUP_AFTER: after("scale"), EXCHANGED: exchanged},
    ),
    "mxfp4": Format(
        groups("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
        mxfp4,
        {OF_GROUP_AFTER: after("scale"), EXCHANGED: exchanged},
    ),
    "awq": Format(AWQ, awq, {"zero points one too high": one_too_high, OF_GROUP_AFTER: after("scales", 0)}),
    "int8": Format(
        groups("int-quantized", DYNAMIC, num_bits=8, type="int", strategy="channel"),
        int8,
        {"scales of the row after": after("scale", 0)},
    ),
}


def is_quantised(name: str) -> bool:
    return "_proj." in name


def stored(weights: dict[str, torch.Tensor], made: Format, change: Change) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, by name, on the host."""
    found: dict[str, torch.Tensor] = {}
    for name, values in weights.items():
        if not is_quantised(name):
            found[name] = values.cpu()
            continue
        for part, tensor in change(made.quantise(values.float())[0]).items():
            alone = part.startswith(("q", "scales", "g_idx"))
            whole = name.removesuffix("weight") + part if alone else f"{name}_{part}"
            found[whole if part else name] = tensor.contiguous().cpu()
    return found


def answers_of(folder: Path, prompts: list[list[int]], decoded: int) -> list[Answer]:
    family = find_plugin("openinfer.models", "qwen3").load()()
    asked = EngineOptions(device=DeviceKind.CUDA, num_blocks=1024, max_num_seqs=8, prefix_cache=False)
    with closing(build_loop(resolve(family.definition, folder, asked))) as loop:
        return play(loop, ask(prompts, [decoded] * len(prompts), prompt_logprobs=TOP, logprobs=TOP))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=300)
    parser.add_argument("--decoded", type=int, default=48, help="tokens after each prompt")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--without-controls", action="store_true")
    parser.add_argument("--commit", help="where the checkout does not say")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    config = golden_reference.CONFIGS["qwen3-4b"] | {"num_hidden_layers": arguments.layers}
    made = AutoConfig.for_model(**config)
    weights = golden_reference.random_weights(made, logit_std=2.0)
    prompts = (
        np.random.default_rng(1)
        .integers(0, config["vocab_size"], (arguments.prompts, arguments.prompt_tokens))
        .tolist()
    )
    rows: list[dict[str, Any]] = []

    def run(name: str, model: Any, control: str = "") -> None:
        chosen = FORMATS[name]
        folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        try:
            change = chosen.controls[control] if control else lambda packed: packed
            save_file(stored(weights, chosen, change), folder / "model.safetensors", metadata={"format": "pt"})
            (folder / "config.json").write_text(json.dumps(config | {"quantization_config": chosen.config}))
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
        what = f"control, {control}" if control else "as stored"
        rows.append({"format": name, "run": what, **comparison.result(), "must_pass": not control})
        print(
            "  ".join(f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in rows[-1].items()), flush=True
        )
        write()

    def write() -> None:
        if not arguments.out:
            return
        report = msgspec.to_builtins(provenance(commit=arguments.commit)) | {
            "command": f"python3 tools/device/formats_gate.py --formats {' '.join(arguments.formats)}",
            "set_up": {
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

    for name in arguments.formats:
        stands_for = {
            key: FORMATS[name].quantise(values.float())[1] if is_quantised(key) else values.float()
            for key, values in weights.items()
        }
        model = golden_reference._model(made, stands_for, torch.float32, device="cuda")  # noqa: SLF001 - the gate's half
        del stands_for
        run(name, model)
        for control in () if arguments.without_controls else FORMATS[name].controls:
            run(name, model, control)
        del model
    return 0 if all(row["passes"] == row["must_pass"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

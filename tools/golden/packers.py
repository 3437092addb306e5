"""Records what the packers that people publish with make of one small matrix: compressed-tensors, AutoAWQ, AutoGPTQ.

Usage: python tools/golden/packers.py AUTOAWQ AUTO_GPTQ

AUTOAWQ and AUTO_GPTQ are folders with the unpacked source of autoawq and wheel of auto-gptq: their packers are loaded
file by file, as the packages themselves need CUDA. compressed-tensors is imported. The fixture has, of each scheme, the
tensors as they are published and `expected`, what they stand for in float32; beside it the configs and the versions.
"""

import importlib.util
import json
import sys
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import save_file

FIXTURES = Path(__file__).parents[2] / "packages/openinfer-engine/tests/fixtures"
ROWS, COLUMNS, GROUP = 32, 96, 32
Tensors = dict[str, torch.Tensor]

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "w4a16": ("pack-quantized", INT4),
    "w4a16_asymmetric": ("pack-quantized", INT4 | {"symmetric": False}),
    "w4a16_channel": ("pack-quantized", INT4 | {"strategy": "channel", "group_size": None}),
    "w8a16": ("pack-quantized", INT4 | {"num_bits": 8}),
    "w8a16_asymmetric": ("pack-quantized", INT4 | {"num_bits": 8, "symmetric": False}),
    "w8a8": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}),
    "fp8_channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}),
    "fp8_tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True,
         "scale_dtype": torch.uint8, "zp_dtype": torch.uint8},
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True,
         "scale_dtype": torch.float8_e4m3fn, "zp_dtype": torch.float8_e4m3fn},
    ),
}  # fmt: skip


def compressed(name: str, weight: torch.Tensor) -> tuple[Tensors, dict[str, Any]]:
    """By compressed-tensors: scales from the least and the largest values, then its compressor."""
    layout, given = SCHEMES[name]
    arguments = QuantizationArgs(**given)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    columns = {"tensor": weight.numel(), "channel": weight.shape[1]}.get(given["strategy"], given.get("group_size"))
    groups = weight.reshape(1 if given["strategy"] == "tensor" else len(weight), -1, columns)
    low, high = groups.amin(2), groups.amax(2)
    whole = generate_gparam(weight.min(), weight.max()).reshape(1) if name == "nvfp4" else None
    scales, zeros = calculate_qparams(low, high, arguments, global_scale=whole)
    if name not in {"mxfp4", "nvfp4"}:
        scales = scales.to(torch.bfloat16)
    state = {"weight": weight, "weight_scale": scales.reshape(-1) if given["strategy"] == "tensor" else scales}
    if not arguments.symmetric:
        state["weight_zero_point"] = zeros.round().to(torch.int8)
    if whole is not None:
        state["weight_global_scale"] = whole
    compressor = BaseCompressor.get_value_from_registry(layout)
    packed = compressor.compress(state, scheme)
    in_float32 = {key: value.float() if value.dtype is torch.bfloat16 else value for key, value in packed.items()}
    expected = compressor.decompress(in_float32, scheme)["weight"].float()
    error = (expected - weight).abs().max() / weight.std()
    assert 0 < error < 0.8, f"{name}: {error}"
    weights = json.loads(arguments.model_dump_json(exclude={"observer", "observer_kwargs"}))
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    config = {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}
    return packed | {"expected": expected}, config


def integers(bits: int, *, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes `[out, in]`, zero points and float16 scales `[out, groups]`, and what they stand for."""
    made = torch.Generator().manual_seed(bits + symmetric)
    most, grid = 2**bits - 1, (ROWS, COLUMNS // GROUP)
    codes = torch.randint(0, most + 1, (ROWS, COLUMNS), generator=made)
    zeros = torch.full(grid, (most + 1) // 2) if symmetric else torch.randint(1, most + 1, grid, generator=made)
    scales = ((0.5 + torch.rand(grid, generator=made)) / most).half()
    spread = [each.repeat_interleave(GROUP, 1) for each in (zeros, scales.float())]
    return zeros, scales, codes, (codes - spread[0]).float() * spread[1]


def awq(folder: Path) -> tuple[Tensors, dict[str, Any]]:
    """By AutoAWQ's `WQLinear_GEMM.from_linear`."""
    for package in ("awq", "awq.utils", "awq.modules"):
        module = types.ModuleType(package)
        module.__path__ = [str(folder / package.replace(".", "/"))]
        sys.modules[package] = module
    sys.modules.setdefault("accelerate", types.ModuleType("accelerate"))  # imported there, of no use to a packer
    packer = load(folder / "awq/modules/linear/gemm.py").WQLinear_GEMM
    zeros, scales, _, values = integers(4, symmetric=False)
    packed = packer.from_linear(linear_of(values), 4, GROUP, scales=scales.T.contiguous(), zeros=zeros.T.contiguous())
    tensors = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales")}
    return tensors | {"expected": values}, {
        "quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"
    }  # fmt: skip


def gptq(folder: Path, bits: int, *, symmetric: bool) -> tuple[Tensors, dict[str, Any]]:
    """By AutoGPTQ's `QuantLinear.pack`, which stores one less than a zero point."""
    module = load(folder / "auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py")
    zeros, scales, _, values = integers(bits, symmetric=symmetric)
    packed = module.QuantLinear(bits, GROUP, COLUMNS, ROWS, bias=False)
    packed.pack(linear_of(values), scales, zeros, None)
    tensors = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
    tensors["scales"] = tensors["scales"].half()
    return tensors | {"expected": values}, {
        "quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": symmetric, "desc_act": False
    }  # fmt: skip


def linear_of(values: torch.Tensor) -> torch.nn.Linear:
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    linear.weight.data = values
    return linear


def load(path: Path) -> Any:
    """A module by its file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    autoawq, auto_gptq = map(Path, sys.argv[1:])
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)) * 0.05
    found = {name: compressed(name, weight) for name in SCHEMES} | {
        "awq": awq(autoawq),
        "gptq": gptq(auto_gptq, 4, symmetric=True),
        "gptq_asymmetric": gptq(auto_gptq, 4, symmetric=False),
        "gptq_8_bits": gptq(auto_gptq, 8, symmetric=False),
    }
    tensors = {
        f"{name}.{part}": each.contiguous() for name, (parts, _) in found.items() for part, each in parts.items()
    }
    versions = {name: version(name) for name in ("torch", "compressed-tensors")}
    versions |= {"autoawq": "0.2.9", "auto-gptq": "0.7.1"}
    save_file(tensors, FIXTURES / "packers.safetensors")
    described = {
        "versions": versions,
        "shape": [ROWS, COLUMNS],
        "configs": {name: made for name, (_, made) in found.items()},
    }
    (FIXTURES / "packers.json").write_text(json.dumps(described, indent=1) + "\n")


if __name__ == "__main__":
    main()

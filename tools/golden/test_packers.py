"""compressed-tensors' own packer, as it runs now, is read as what it says it wrote: `python -m tools.unlocked packers`.

`packages/openinfer-engine/tests/weights/test_packers.py` has what it made once.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))
from packers import SCHEMES, compressed

from openinfer_core import find_plugin
from openinfer_engine.model import Shard
from openinfer_engine.testing.family import FamilyHarness
from openinfer_engine.testing.quantised_family import projections
from openinfer_engine.weights.checkpoint import Checkpoint
from openinfer_engine.weights.quantised import read_quantised
from openinfer_engine.weights.quantization_config import QuantisedConfig, as_stored
from openinfer_engine.weights.safetensors_file import SafetensorsFile
from openinfer_kernels.cpu import CpuOps

ALONE: Any = SimpleNamespace(rank=0, size=1)
SHAPES = ((32, 96), (48, 256), (16, 64))
TINY = Path(__file__).parents[2] / "packages/openinfer-qwen3/tests/fixtures/tied"


def random_weight(shape: tuple[int, int], seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.05


def values_of(folder: Path, name: str, weight: torch.Tensor, *, rolled: str = "") -> tuple[np.ndarray, np.ndarray]:
    """What our reader makes of the packed matrix, each entry of `rolled` its neighbour's; and what it stands for."""
    packed, config = compressed(name, weight)
    expected = packed.pop("expected").numpy()
    if rolled:
        stored = packed[rolled]
        packed[rolled] = stored.view(torch.uint8).roll(stored.element_size(), -1).view(stored.dtype)
    path = folder / "model.safetensors"
    save_file({f"it.{each}": tensor.contiguous() for each, tensor in packed.items()}, path)
    file = SafetensorsFile(path)
    matrix = as_stored(QuantisedConfig(quantization_config=config), file.tensors).matrix("it", *weight.shape)
    assert matrix.format is not None
    reader = SimpleNamespace(read_stored=lambda each, shard=Shard.WHOLE: file.read(each))
    part = read_quantised(reader, matrix, matrix.format, Shard.WHOLE, ALONE)
    return CpuOps().upload_dequantised(part), expected


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SCHEMES)
def test_what_it_packs_now_is_read_as_it_was_meant(tmp_path: Path, name: str, shape: tuple[int, int]) -> None:
    for seed in range(3):
        found, expected = values_of(tmp_path, name, random_weight(shape, seed))
        # it multiplies codes of NVFP4 and their scales in BF16
        np.testing.assert_allclose(found, expected, rtol=2.0**-8 if name == "nvfp4" else 0, atol=0)


@pytest.mark.parametrize(
    ("name", "rolled"), [("w4a16", "weight_scale"), ("w4a16_asymmetric", "weight_packed"), ("mxfp4", "weight_packed")]
)
def test_a_neighbours_entry_is_noticed(tmp_path: Path, name: str, rolled: str) -> None:
    found, expected = values_of(tmp_path, name, random_weight((32, 96), 0), rolled=rolled)
    assert (~np.isclose(found, expected, rtol=2.0**-8, atol=0)).mean() > 0.2


@pytest.mark.parametrize("name", ["w4a16", "w4a16_asymmetric", "w8a16", "w8a8", "fp8_channel"])
def test_a_checkpoint_that_it_packed_is_served_as_what_it_stands_for(tmp_path: Path, name: str) -> None:
    """All projections of a tiny Qwen3, by its packer; logits are those of float32 weights of equal values."""
    with Checkpoint.open(TINY) as checkpoint:
        tensors = {each: torch.from_numpy(np.array(checkpoint.read(each), np.float32)) for each in checkpoint.tensors}
    stored: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    found: dict[str, Any] = {}
    named = {f"{each}.weight" for each in projections(TINY)}
    for each, weight in tensors.items():
        if each not in named:
            stored[each] = plain[each] = weight
            continue
        packed, found = compressed(name, weight)
        plain[each] = packed.pop("expected").contiguous()
        stored |= {f"{each.removesuffix('weight')}{part}": tensor.contiguous() for part, tensor in packed.items()}
    given = json.loads((TINY / "config.json").read_bytes())
    definition = find_plugin("openinfer.models", "qwen3").load()().definition
    logits: list[np.ndarray] = []
    for folder, held, further in (("packed", stored, {"quantization_config": found}), ("plain", plain, {})):
        (tmp_path / folder).mkdir()
        save_file(held, tmp_path / folder / "model.safetensors")
        (tmp_path / folder / "config.json").write_text(json.dumps(given | further))
        logits.append(FamilyHarness(definition, tmp_path / folder).step({"a": list(range(3, 20))})["a"])
    np.testing.assert_array_equal(*logits)

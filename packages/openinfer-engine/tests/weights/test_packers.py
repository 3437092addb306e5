"""What published packers wrote is read as what they say it stands for: dumps of theirs, recorded once.

`tools/golden/packers.py` records them; the versions are in `fixtures/packers.json`.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from openinfer_engine.model import Shard
from openinfer_engine.weights.quantised import read_quantised
from openinfer_engine.weights.quantization_config import QuantisedConfig, as_stored
from openinfer_engine.weights.safetensors_file import SafetensorsFile
from openinfer_kernels.cpu import CpuOps

FIXTURES = Path(__file__).parents[1] / "fixtures"
RECORDED = json.loads((FIXTURES / "packers.json").read_text())
ALONE: Any = SimpleNamespace(rank=0, size=1)


def values_of(name: str, *, config: dict[str, Any] | None = None, changed: str | None = None) -> np.ndarray:
    """The values of a recorded matrix; of `changed` each entry is its neighbour's."""
    file = SafetensorsFile(FIXTURES / "packers.safetensors")
    stored = as_stored(QuantisedConfig(quantization_config=config or RECORDED["configs"][name]), file.tensors)
    matrix = stored.matrix(name, *RECORDED["shape"])
    assert matrix.format is not None
    for each, spec in matrix.tensors().items():
        assert file.tensors[each].array_shape in (spec.shape, *spec.other_shapes), each
        assert file.tensors[each].dtype in spec.dtypes, each

    def read_stored(each: str, shard: Shard = Shard.WHOLE) -> np.ndarray:
        found = file.read(each)
        return np.roll(found, 1, 0) if each == f"{name}.{changed}" else found

    part = read_quantised(SimpleNamespace(read_stored=read_stored), matrix, matrix.format, Shard.WHOLE, ALONE)
    return CpuOps().upload_dequantised(part)


def expected_of(name: str) -> np.ndarray:
    return SafetensorsFile(FIXTURES / "packers.safetensors").read(f"{name}.expected")


@pytest.mark.parametrize("name", RECORDED["configs"])
def test_dump_of_a_published_packer_is_read_as_it_was_meant(name: str) -> None:
    # compressed-tensors multiplies codes of NVFP4 and their scales in BF16
    rtol = 2.0**-8 if name == "nvfp4" else 0
    np.testing.assert_allclose(values_of(name), expected_of(name), rtol=rtol, atol=0)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("w4a16", "weight_scale"),
        ("w4a16_asymmetric", "weight_packed"),
        ("w8a8", "weight_scale"),
        ("fp8_channel", "weight_scale"),
        ("mxfp4", "weight_packed"),
        ("nvfp4", "weight_scale"),
        ("awq", "qzeros"),
        ("gptq", "scales"),
        ("gptq_asymmetric", "qzeros"),
    ],
)
def test_comparison_notices_a_neighbours_entry(name: str, changed: str) -> None:
    assert (~np.isclose(values_of(name, changed=changed), expected_of(name), rtol=2.0**-8, atol=0)).mean() > 0.2


def test_comparison_notices_the_other_version_of_gptq() -> None:
    config = RECORDED["configs"]["gptq_asymmetric"] | {"checkpoint_format": "gptq_v2"}
    assert (values_of("gptq_asymmetric", config=config) != expected_of("gptq_asymmetric")).mean() > 0.9

"""What is generated from the table of sampling parameters is committed as the table says."""

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np

from openinfer_core.sampling_parameters import PARAMETERS
from openinfer_kernels.ops.sampling_columns import COLUMN_DTYPES

ROOT = Path(__file__).resolve().parents[1]


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_sampling", ROOT / "tools/sampling/generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_files_are_not_behind_the_table() -> None:
    for name, text in load_generator().generated().items():
        assert (ROOT / name).read_text("utf-8") == text, f"{name} is behind: run python tools/sampling/generate.py"


def test_record_of_a_slot_is_aligned_as_a_compiler_aligns_it() -> None:
    """`cuda/sampling/slot_record.py` imports NumPy alone, and is read here without the CUDA packages."""
    namespace: dict[str, object] = {}
    path = ROOT / "packages/openinfer-kernels/src/openinfer_kernels/cuda/sampling/slot_record.py"
    exec(path.read_text("utf-8"), namespace)
    record = namespace["SLOT_RECORD"]
    assert isinstance(record, np.dtype)
    assert record.itemsize == np.dtype(record.descr, align=True).itemsize
    assert record.fields is not None
    assert record.fields["seed"][1] % 8 == 0
    assert namespace["PARAMS_BYTES"] == record.fields["seed"][1] + 8


def test_columns_are_the_parameters_of_a_batch() -> None:
    assert [*COLUMN_DTYPES] == [each.name for each in PARAMETERS if each.in_batch] + ["seeds", "positions"]

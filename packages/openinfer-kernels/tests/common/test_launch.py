"""What a kernel asks of the driver when it is loaded, with a driver that writes down what it is asked."""

import importlib
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest


@pytest.mark.parametrize(("may_overlap", "asked"), [(True, ["bytes", "carveout"]), (False, ["bytes"])])
def test_only_kernels_that_overlap_take_all_of_the_cache_as_shared_memory(
    monkeypatch: pytest.MonkeyPatch, may_overlap: bool, asked: list[str]
) -> None:
    """On GPUs before Hopper no kernels overlap, and attention reads through the L1 cache."""
    found: list[str] = []
    driver = MagicMock()
    driver.CUfunction_attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="bytes",
        CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT="carveout",
    )
    driver.cuFuncSetAttribute = lambda function, attribute, value: (
        found.append(attribute),
        (driver.CUresult.CUDA_SUCCESS,),
    )[1]
    before = set(sys.modules)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=np.ndarray))
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    launch = importlib.import_module("openinfer_kernels.cuda.common.launch")
    launch.Kernel(object(), shared_bytes=64 * 1024, may_overlap=may_overlap)
    assert found == asked
    for name in set(sys.modules) - before:
        if name.startswith("openinfer_kernels.cuda"):
            del sys.modules[name]

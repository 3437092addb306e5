import subprocess
import sys

import openinfer_kernels
import openinfer_kernels.cpu


def test_all_is_sorted_and_complete():
    for module in (openinfer_kernels, openinfer_kernels.cpu):
        assert list(module.__all__) == sorted(module.__all__)
        assert all(hasattr(module, name) for name in module.__all__)


def test_import_loads_no_implementation():
    code = "import sys, openinfer_kernels; print(*(m for m in sys.modules if m.startswith('openinfer_kernels.c')))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == []


def test_every_error_belongs_to_the_tree():
    errors = [getattr(openinfer_kernels, name) for name in openinfer_kernels.__all__ if name.endswith("Error")]
    assert len(errors) > 1
    assert all(issubclass(error, openinfer_kernels.KernelsError) for error in errors)

"""The package's surface."""

import subprocess
import sys

import openinfer_server


def _constants_classes_others(name: str) -> tuple[bool, bool, str]:
    """The order in which ruff's RUF022 sorts `__all__`: constants, classes, then everything else."""
    return (not name.isupper(), not name[0].isupper(), name)


def test_all_is_sorted_and_complete():
    assert openinfer_server.__all__ == sorted(openinfer_server.__all__, key=_constants_classes_others)
    assert all(hasattr(openinfer_server, name) for name in openinfer_server.__all__)
    assert {*openinfer_server.__all__, "__all__"} <= {*dir(openinfer_server)}


def test_import_loads_no_engine_and_no_numpy():
    code = "import sys, openinfer_server; print(sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for name in ("numpy", "cupy", "openinfer_engine", "openinfer_kernels", "openinfer_kv_cache", "torch", "uvloop"):
        assert f"'{name}'" not in loaded, name

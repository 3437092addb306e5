"""Puts cubins into the wheel when `OPENINFER_BUILD_CUBINS=1`; otherwise the wheel is built without a CUDA toolkit."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SWITCH = "OPENINFER_BUILD_CUBINS"


class CubinHook(BuildHookInterface):
    """Compiles every CUDA source for every architecture that a wheel carries, with nvcc or NVRTC."""

    def dependencies(self) -> list[str]:
        """What importing the package needs, when it has to be imported to compile."""
        return ["numpy>=2.0,<3"] if self._is_asked_for() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the cubins; nothing is done for an editable install, nor without the variable."""
        if version == "editable" or not self._is_asked_for():
            return
        sys.path.insert(0, str(Path(self.root, "src")))
        from openinfer_kernels.cubins import ARCHITECTURES, build_cubins, find_compiler, sources

        self._folder = tempfile.TemporaryDirectory(prefix="openinfer-cubins-")
        target, compiler = Path(self._folder.name), find_compiler()
        for architecture in ARCHITECTURES:
            build_cubins(sources(architecture), architecture, target=target, compiler=compiler)
        build_data["force_include"] |= {
            str(cubin): f"openinfer_kernels/cubins/prebuilt/{cubin.name}" for cubin in sorted(target.iterdir())
        }

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes the compiled files, now that the wheel has them."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()

    @staticmethod
    def _is_asked_for() -> bool:
        return os.environ.get(SWITCH) == "1"

"""Our CUDA sources: which there are, for which architectures each is, and the key of what is made from them."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

CSRC = Path(__file__).resolve().parents[1] / "csrc"
FLAGS = ("-std=c++17", "-lineinfo")
"""Of every compilation. No fast math: a kernel writes the fast intrinsic where it wants one."""
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
"""Those that a wheel carries."""
HOPPER = "sm_90a"


@dataclass(frozen=True, slots=True)
class Source:
    """One `.cu` file: the kernels of one operator family."""

    path: Path

    @property
    def stem(self) -> str:
        """Its name without suffix, as `Device.kernel` asks for it."""
        return self.path.stem

    def is_for(self, architecture: str) -> bool:
        """Whether it can be compiled for `architecture`: what includes `hopper.cuh` is for Hopper alone."""
        return architecture == HOPPER or b'#include "hopper.cuh"' not in self.path.read_bytes()

    def cubin_name(self, architecture: str) -> str:
        """`STEM.ARCHITECTURE.KEY.cubin`, with the digest of everything that the cubin depends on."""
        digest = hashlib.blake2b(digest_size=12)
        for path in (self.path, *headers()):
            text = path.read_bytes()
            digest.update(b"%s\0%d\0%s" % (path.name.encode(), len(text), text))
        digest.update("\0".join((*FLAGS, architecture)).encode())
        return f"{self.stem}.{architecture}.{digest.hexdigest()}.cubin"


def sources(architecture: str) -> list[Source]:
    """The sources that are compiled for `architecture`, by name."""
    return [source for path in sorted(CSRC.glob("*.cu")) if (source := Source(path)).is_for(architecture)]


def headers() -> list[Path]:
    """The headers of all sources, by name."""
    return sorted(CSRC.glob("*.cuh"))


def architecture_of(major: int, minor: int) -> str:
    """`sm_90a` for compute capability 9.0, as Hopper's own instructions need the `a`; else `sm_86` and the like."""
    return HOPPER if (major, minor) == (9, 0) else f"sm_{major}{minor}"

"""Our CUDA sources: which there are, for which architectures each is, and the key of what is made from them."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from openinfer_kernels.errors import KernelBuildError

CSRC = Path(__file__).resolve().parents[1] / "csrc"
FLAGS = ("-std=c++17", "-lineinfo")
"""Of every compilation. No fast math: a kernel writes the fast intrinsic where it wants one."""
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
"""Those that a wheel carries."""
HOPPER = "sm_90a"
DIGEST_BYTES = 12
_HOPPER_HEADER = "hopper.cuh"
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Source:
    """One `.cu` file: the kernels of one operator family. Includes in quotes are paths below `root`."""

    path: Path
    root: Path = CSRC

    @property
    def stem(self) -> str:
        """Its name without suffix, as `Device.kernel` asks for it."""
        return self.path.stem

    def headers(self) -> dict[str, Path]:
        """The headers of ours that a compiler reads for it, directly or through others, by the name in includes."""
        found: dict[str, Path] = {}
        unread = [self.path]
        while unread:
            including = unread.pop()
            for name in _INCLUDE.findall(including.read_text("utf-8")):
                if name in found:
                    continue
                found[name] = self.root / name
                if not found[name].is_file():
                    raise KernelBuildError(f"{including} includes {name}, which is not in {self.root}")
                unread.append(found[name])
        return dict(sorted(found.items()))

    def is_for(self, architecture: str) -> bool:
        """Whether it can be compiled for `architecture`: what reads `hopper.cuh` is for Hopper alone."""
        return architecture == HOPPER or all(path.name != _HOPPER_HEADER for path in self.headers().values())

    def cubin_key(self, architecture: str) -> str:
        """`STEM.ARCHITECTURE.KEY`, with the digest of everything that the cubin depends on."""
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for name, path in {self.path.name: self.path, **self.headers()}.items():
            text = path.read_bytes()
            digest.update(b"%s\0%d\0%s" % (name.encode(), len(text), text))
        digest.update("\0".join((*FLAGS, architecture)).encode())
        return f"{self.stem}.{architecture}.{digest.hexdigest()}"


def sources(architecture: str) -> list[Source]:
    """The sources that are compiled for `architecture`, by stem."""
    paths = sorted(CSRC.rglob("*.cu"), key=lambda path: path.stem)
    return [source for path in paths if (source := Source(path)).is_for(architecture)]


def architecture_of(major: int, minor: int) -> str:
    """`sm_90a` for compute capability 9.0, as Hopper's own instructions need the `a`; else `sm_86` and the like."""
    return HOPPER if (major, minor) == (9, 0) else f"sm_{major}{minor}"

"""A checkpoint's fingerprint: names the weights that compute KV, so that no store ever mixes two checkpoints.

Reading every byte would take as long as loading, so each file gives its size, its first pages (the header with
all names, shapes and offsets) and pages spread evenly over the rest.
"""

from hashlib import blake2b
from pathlib import Path

from openinfer_core.family import check_model_file

_HEAD_BYTES = 1 << 20
_PAGE_BYTES = 4096
_PAGES = 64


def fingerprint(model_dir: Path) -> str:
    """128 bits in hexadecimal over `config.json` and a sample of every file of weights, in order of name.

    Raises:
        InvalidCheckpoint: one is no regular file.
    """
    digest = blake2b(digest_size=16)
    digest.update((model_dir / "config.json").read_bytes())
    for path in sorted([*model_dir.glob("*.safetensors"), *model_dir.glob("model.gguf")]):
        check_model_file(path)
        size = path.stat().st_size
        digest.update(f"\0{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(_HEAD_BYTES))
            for page in range(_PAGES):
                file.seek(size * page // _PAGES)
                digest.update(file.read(_PAGE_BYTES))
    return digest.hexdigest()

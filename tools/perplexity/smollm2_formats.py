"""Perplexity of SmolLM2-135M quantised to each published format, against its weights in BF16, on this CPU.

    ./run python tools/perplexity/smollm2_formats.py FILE.gguf [--only NAME ...] [--json FILE]

FILE.gguf is what `openinfer pull smollm2` prints. Its matrices (Q4_1, groups of 32) are dequantised and rounded to
BF16, and quantised anew by `openinfer_engine.testing.quantised_checkpoints`, to the nearest and without calibration:
widths of 576 take groups of 64 and partial FP8 blocks. Each checkpoint is then read and served as a published one is.

The text is the prose of `tools/golden/smollm2.py`'s fixture, then two chapters of Python's reference as this Python has
them, of which the record has the digest. The limits in `FORMATS` were set before anything was measured. As controls
every zero point is one too high, which must cost more than the limit, and one alone is.
"""

import argparse
import hashlib
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import msgspec
import numpy as np
import tokenizers

from openinfer_core.provenance import provenance
from openinfer_engine.gguf.folder import model_folder
from openinfer_engine.testing import FamilyHarness
from openinfer_engine.testing.quantised_checkpoints import Scheme, schemes, write_safetensors
from openinfer_engine.testing.quantised_family import projections
from openinfer_engine.weights.checkpoint import Checkpoint
from openinfer_llama.family import LlamaDefinition

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ROOT / "packages/openinfer/tests/fixtures/smollm2/texts.json"
GROUP = 64
MOST_TOKENS = 1536
FORMATS: Mapping[str, float] = {
    "fp8 blocks F32": 1.01,
    "fp8 blocks BF16": 1.01,
    "fp8 per channel": 1.01,
    "fp8 per tensor static": 1.01,
    "w8a8": 1.01,
    "w8a16": 1.01,
    "w8a16 asymmetric": 1.01,
    "gptq v1 8 bits": 1.01,
    "ggml Q8_0": 1.01,
    "awq": 1.25,
    "gptq v1 asymmetric": 1.25,
    "w4a16 asymmetric": 1.25,
    "gptq v1": 1.5,
    "w4a16": 1.5,
    "ggml Q4_0": 1.5,
    "mxfp4": 1.5,
    "nvfp4": 1.5,
}
"""Format -> the most that perplexity may be of BF16's. Four bits without calibration cost a small model much; without
zero points one of sixteen values is wasted, and E2M1 has few of large size."""
CONTROLS = ("awq", "gptq v1 asymmetric", "w4a16 asymmetric")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = model_folder(options.file)
    token_ids = ids_of(folder)
    with tempfile.TemporaryDirectory() as scratch:
        plain = Path(scratch) / "plain"
        write_plain(folder, plain)
        bf16 = perplexity(plain, token_ids)
        print(f"{'bf16':32} {bf16:9.4f}", flush=True)
        rows: list[dict[str, Any]] = []
        for name in options.only:
            rows.append(measured(name, plain, token_ids, bf16))
            if options.json is not None:  # after each, as all of them take long
                options.json.write_text(json.dumps(report(token_ids, bf16, rows), indent=1) + "\n")
    return 0 if all(row["is_right"] for row in rows) else 1


def report(token_ids: list[int], bf16: float, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return msgspec.to_builtins(provenance()) | {
        "what": __doc__,
        "tokens": len(token_ids),
        "text_sha256": hashlib.sha256(text().encode()).hexdigest(),
        "group": GROUP,
        "bf16_perplexity": bf16,
        "is_right": all(row["is_right"] for row in rows),
        "formats": rows,
    }


def text() -> str:
    return "\n\n".join([json.loads(TEXTS.read_text())["prose"], *(topics[name] for name in ("objects", "execmodel"))])


def ids_of(folder: Path) -> list[int]:
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return tokenizer.encode(text(), add_special_tokens=False).ids[:MOST_TOKENS]


def write_plain(folder: Path, target: Path) -> None:
    """The file's weights in BF16, rounded to the nearest, ties to even."""
    target.mkdir()
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    (target / "config.json").write_text(json.dumps(config))
    tensors = {}
    with Checkpoint.open(folder) as checkpoint:
        for name in checkpoint.tensors:
            bits = np.ascontiguousarray(checkpoint.read(name), np.float32).view(np.uint32)
            tensors[name] = "BF16", ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    write_safetensors(target / "model.safetensors", tensors)


def measured(name: str, plain: Path, token_ids: list[int], bf16: float) -> dict[str, Any]:
    """A format, and its controls."""
    begin, limit = time.time(), FORMATS[name]
    row: dict[str, Any] = {"format": name, "most": limit, "rise": quantised(name, plain, token_ids) / bf16}
    row["is_right"] = row["rise"] <= limit
    if name in CONTROLS:
        row["rise_with_zero_points_one_higher"] = quantised(name, plain, token_ids, change=one_higher) / bf16
        row["rise_with_one_zero_point_one_higher"] = quantised(name, plain, token_ids, change=first_one_higher()) / bf16
        row["is_right"] &= row["rise_with_zero_points_one_higher"] > limit
    print(f"{name:32} {row['rise']:9.4f} {'' if row['is_right'] else 'BAD'} {time.time() - begin:.0f} s", flush=True)
    return row


Change = Callable[[np.ndarray], np.ndarray]


def quantised(name: str, plain: Path, token_ids: list[int], *, change: Change | None = None) -> float:
    """The perplexity of a quantised copy, whose words of zero points may be changed."""
    scheme: Scheme = schemes(GROUP)[name]
    matrices = set(projections(plain))
    with tempfile.TemporaryDirectory() as scratch, Checkpoint.open(plain) as checkpoint:
        tensors = {}
        for tensor, info in checkpoint.tensors.items():
            array, matrix = checkpoint.read(tensor), tensor.removesuffix(".weight")
            if matrix not in matrices:
                tensors[tensor] = info.dtype, array
                continue
            found, _ = scheme.pack((array.astype(np.uint32) << 16).view(np.float32))
            for part, (dtype, packed) in found.items():
                is_changed = change is not None and part in ("qzeros", "weight_zero_point")
                tensors[f"{matrix}.{part}"] = dtype, change(packed) if is_changed else packed
        folder = Path(scratch)
        config = json.loads((plain / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": dict(scheme.config)}))
        write_safetensors(folder / "model.safetensors", tensors)
        return perplexity(folder, token_ids)


def one_higher(words: np.ndarray) -> np.ndarray:
    """Each of the eight zero points of a word, 15 staying what it is."""
    found = words.view(np.uint32)
    nibbles = (found[..., None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 15
    raised = np.minimum(nibbles + 1, 14 if nibbles.max() < 15 else 15)
    return (raised.astype(np.uint32) << np.arange(0, 32, 4, dtype=np.uint32)).sum(-1).astype(np.uint32).view(np.int32)


def first_one_higher() -> Change:
    """The first zero point of the first matrix alone."""
    is_done = False

    def change(words: np.ndarray) -> np.ndarray:
        nonlocal is_done
        if is_done:
            return words
        is_done, found = True, words.copy()
        found.flat[:1] = one_higher(words.flat[:1] & np.int32(15)) | (words.flat[:1] & np.int32(~15))
        return found

    return change


def perplexity(folder: Path, token_ids: list[int]) -> float:
    """Over all positions that have a next token."""
    harness = FamilyHarness(LlamaDefinition(), folder, block_tokens=16, num_blocks=200)
    logits = harness.step({"text": token_ids})["text"][:-1]
    highest = logits.max(1)
    sums = np.log(np.exp(logits - highest[:, None]).sum(1, dtype=np.float64)) + highest
    return math.exp(float(np.mean(sums - logits[np.arange(len(logits)), token_ids[1:]])))


if __name__ == "__main__":
    sys.exit(main())

"""What the scripts of this folder share: where and how they record, what a `logits.npz` holds, how large it may be."""

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch


def begin(fixtures: Path) -> Path:
    """Settles what a record could depend on; the folder to write to: the command line's, else `fixtures`."""
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    return Path(sys.argv[1]) if len(sys.argv) > 1 else fixtures


def begin_model(target: Path, *, seed: int) -> None:
    """Removes what an earlier run left at `target`."""
    shutil.rmtree(target, ignore_errors=True)
    torch.manual_seed(seed)


def record(
    model: Any, sequence_tokens: tuple[int, ...], *, vocab_size: int, every: int = 3, **arguments: Any
) -> dict[str, np.ndarray]:
    """Random sequences and their logits at every so many positions, and at the last eight.

    Further arguments are those of the model's call.
    """
    recorded: dict[str, np.ndarray] = {}
    for index, tokens in enumerate(sequence_tokens):
        token_ids = torch.randint(0, vocab_size, (tokens,))
        logits = model(input_ids=token_ids[None], **arguments).logits[0]
        positions = sorted({*range(0, tokens, every), *range(tokens - 8, tokens)} & set(range(tokens)))
        recorded[f"token_ids_{index}"] = token_ids.to(torch.int32).numpy()
        recorded[f"positions_{index}"] = np.array(positions, np.int32)
        recorded[f"logits_{index}"] = logits[positions].numpy()
    return recorded


def record_whole(model: Any, num_tokens: int, *, vocab_size: int | None = None) -> dict[str, np.ndarray]:
    """One random sequence, of all ids or those below `vocab_size`, and all its logits."""
    token_ids = torch.randint(0, vocab_size or model.config.vocab_size, (num_tokens,))
    logits = model(input_ids=token_ids[None]).logits[0]
    return {"token_ids": token_ids.to(torch.int32).numpy(), "logits": logits.numpy()}


def write(target: Path, recorded: dict[str, np.ndarray], *, most_bytes: int) -> None:
    """Puts `logits.npz` beside the weights in `target`, and says what is there.

    Raises:
        SystemExit: the folder takes more bytes than it may.
    """
    np.savez_compressed(target / "logits.npz", **recorded)
    for path in target.iterdir():
        path.chmod(0o644)
    num_bytes = sum(path.stat().st_size for path in target.iterdir())
    logits = [array for name, array in recorded.items() if name.startswith("logits")]
    largest, spread = max(float(np.abs(each).max()) for each in logits), max(float(each.std()) for each in logits)
    files = sorted(path.name for path in target.iterdir())
    print(f"{target.name}: {num_bytes} bytes, largest logit {largest:.1f}, spread {spread:.2f}, {files}")
    if num_bytes > most_bytes:
        raise SystemExit(f"{target.name} is larger than {most_bytes} bytes")

"""Train the toy checkpoint and write it in the Hugging Face layout.

PYTHONPATH=tools python -m tiny_model.train_tokenizer FOLDER
PYTHONPATH=tools python -m tiny_model.train FOLDER --minutes 4.5 --processes 16
PYTHONPATH=tools python -m tiny_model.evaluate FOLDER
"""

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from . import packing
from .model import Qwen3, Shape, additive

WARM_UP = 0.02


def main() -> None:
    """Read the command line, train, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=6.5)
    parser.add_argument("--peak-learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", default="openinfer-tiny-1", help="of the text; another one for a further stage")
    parser.add_argument("--continue", action="store_true", dest="continues", help="start from FOLDER's weights")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--documents-per-shard", type=int, default=50_000)
    parser.add_argument("--rows-per-step", type=int, default=64)
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    started = time.monotonic()
    rows = packing.pack_training(
        options.folder / "tokenizer.json",
        options.seed,
        num_shards=options.shards,
        documents_per_shard=options.documents_per_shard,
        processes=options.processes,
    )
    print(f"{rows.ids.size:,} tokens, {rows.is_target.sum():,} targets, {time.monotonic() - started:.0f} s", flush=True)
    model = (load(options.folder) if options.continues else Qwen3(Shape())).to(device)
    stages = json.loads((options.folder / "training.json").read_text())["stages"] if options.continues else []
    stage = train(
        model,
        rows,
        minutes=options.minutes,
        rows_per_step=options.rows_per_step,
        peak_learning_rate=options.peak_learning_rate,
    )
    stage |= {
        "seed": options.seed,
        "documents": options.shards * options.documents_per_shard,
        "documents_too_long": rows.num_too_long,
        "corpus_tokens": int(rows.ids.size),
        "corpus_target_tokens": int(rows.is_target.sum()),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
    }
    write(model, {"stages": [*stages, stage]}, options.folder)


def train(
    model: Qwen3, rows: packing.Rows, *, minutes: float, rows_per_step: int, peak_learning_rate: float
) -> dict[str, Any]:
    """Run AdamW for a time, with the learning rate falling to zero at its end; return what was done."""
    optimizer = _optimizer(model)
    started = time.monotonic()
    steps, progress, loss = 0, 0.0, torch.tensor(0.0)
    batches = _batches(rows, rows_per_step, next(model.parameters()).device)
    while progress < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = peak_learning_rate * _schedule(progress)
        loss = batch_loss(model, *next(batches))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps += 1
        if steps % 20 == 0:
            reading = loss.item()  # waits for the device, so that the clock is right
            if steps % 100 == 0:
                rate = steps * rows_per_step * packing.ROW_TOKENS / (time.monotonic() - started)
                print(f"step {steps} progress {progress:.3f} loss {reading:.4f} {rate:,.0f} tokens/s", flush=True)
        progress = (time.monotonic() - started) / (60 * minutes)
    return {
        "steps": steps,
        "tokens_per_step": rows_per_step * packing.ROW_TOKENS,
        "minutes": minutes,
        "optimizer": "AdamW, betas 0.9 and 0.95, weight decay 0.1 on matrices, gradient norm at most 1",
        "peak_learning_rate": peak_learning_rate,
        "last_training_loss": round(loss.item(), 4),
    }


def batch_loss(model: Qwen3, ids: Tensor, positions: Tensor, is_target: Tensor) -> Tensor:
    """Return the mean cross-entropy over the targets of packed rows, in nats."""
    hidden = packed_hidden(model, ids, positions)
    wanted = is_target[:, 1:]
    with mixed_precision(ids.device):
        logits = model.logits(hidden[:, :-1][wanted])
    return functional.cross_entropy(logits.float(), ids[:, 1:][wanted])


def packed_hidden(model: Qwen3, ids: Tensor, positions: Tensor) -> Tensor:
    """Run packed rows, every document seeing only itself."""
    document = (positions == 0).cumsum(dim=1)
    causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
    allowed = (document[:, :, None] == document[:, None, :]) & causal
    mask = additive(allowed[:, None])
    with mixed_precision(ids.device):
        return model.hidden(ids, positions, mask.to(torch.bfloat16) if ids.is_cuda else mask)


def mixed_precision(device: torch.device) -> torch.autocast:
    """Compute matrix products in bfloat16 on a GPU; a CPU is faster in float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def load(folder: Path) -> Qwen3:
    """Return the checkpoint's model in float32."""
    model = Qwen3(Shape())
    model.load_state_dict({name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()})
    return model


def write(model: Qwen3, record: dict[str, Any], folder: Path) -> None:
    """Write config, generation config, weights in BF16 and the record of the training."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end_of_text, end_of_turn = (tokenizer.token_to_id(name) for name in ("<|endoftext|>", "<|im_end|>"))
    shape = dataclasses.asdict(model.shape)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_turn,
        **shape,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_window_layers": model.shape.num_hidden_layers,
        "model_type": "qwen3",
        "rope_scaling": None,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
    }
    generation = {
        "bos_token_id": end_of_text,
        "do_sample": False,
        "eos_token_id": [end_of_turn, end_of_text],
        "pad_token_id": end_of_text,
    }
    for name, value in (("config", config), ("generation_config", generation), ("training", record)):
        text = json.dumps(dict(sorted(value.items())), indent=2)
        (folder / f"{name}.json").write_text(text + "\n")
    tensors = {name: tensor.detach().cpu().to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _optimizer(model: Qwen3) -> torch.optim.AdamW:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def _schedule(progress: float) -> float:
    """Return the fraction of the peak learning rate: a short rise, then a cosine to zero."""
    if progress < WARM_UP:
        return max(progress / WARM_UP, 0.01)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - WARM_UP) / (1 - WARM_UP))))


def _batches(rows: packing.Rows, rows_per_step: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield shuffled batches for ever from tensors that lie on the device."""
    ids, positions, is_target = (
        torch.from_numpy(part).to(device) for part in (rows.ids, rows.positions, rows.is_target)
    )
    while True:
        order = torch.randperm(len(ids), device=device)
        for start in range(0, len(ids) - rows_per_step + 1, rows_per_step):
            chosen = order[start : start + rows_per_step]
            yield ids[chosen].long(), positions[chosen].long(), is_target[chosen]


if __name__ == "__main__":
    main()

"""The golden gate on a GPU: our engine against transformers in float32, teacher-forced, real widths, random weights.

    python3 tools/device/golden_gate.py [--layers 6] [--sequences 4] [--positions 256]

Prints, for transformers in BF16 and for our engine (whole prompts, chunks), the regret of the argmax and |dlogprob|
over the top 8 against float32; then the regret of what our engine generates in graphs, eager, preempted. The gate of
DESIGN.md: regret at most 0.20 nat, |dlogprob| 0.06 in the mean and 0.20 at the 99th percentile.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np


def make_reference(folder: Path, layers: int, ids: np.ndarray) -> tuple:
    """Writes a random BF16 checkpoint.

    Returns transformers' log-probabilities `[sequences, positions, vocabulary]` in float32 and in BF16, and the
    float32 model.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32768, hidden_size=2560, intermediate_size=9728, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=4096, tie_word_embeddings=True, rope_theta=1e6,
    )  # fmt: skip
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = 1 + 0.2 * torch.randn_like(parameter)
        else:
            parameter.data = torch.randn_like(parameter) * (parameter.shape[-1] ** -0.5)
    model.model.embed_tokens.weight.data *= 2.5
    model = model.to(torch.bfloat16)
    model.save_pretrained(folder)
    baseline = score(model, ids)
    model = model.float()
    return score(model, ids), baseline, model


def score(model, ids: np.ndarray) -> np.ndarray:
    import torch

    rows = []
    with torch.no_grad():
        for row in ids:
            logits = model(torch.tensor(row[None].astype(np.int64), device="cuda")).logits[0].float()
            rows.append(torch.log_softmax(logits, -1).cpu().numpy())
    return np.stack(rows)


def run_engine(folder: Path, requests, **options):
    """Events' log-probabilities and tokens per request."""
    from openinfer_core import Tokens, find_plugin
    from openinfer_engine import EngineOptions, build_loop, resolve

    family = find_plugin("openinfer.models", "qwen3").load()()
    loop = build_loop(resolve(family.definition, folder, EngineOptions(device="cuda", **options)))
    prompt_logprobs = {request.request_id: [] for request in requests}
    tokens = {request.request_id: [] for request in requests}
    for request in requests:
        assert not loop.submit(request)
    while loop.busy:
        for event in loop.step():
            if isinstance(event, Tokens):
                prompt_logprobs[event.request_id] += event.prompt_logprobs or ()
                tokens[event.request_id] += event.token_ids
            elif type(event).__name__ == "Failed":
                raise SystemExit(event.message)
    stats = loop.stats()
    loop.close()
    return prompt_logprobs, tokens, stats


def gate(label: str, reference: np.ndarray, logprobs, report: dict) -> None:
    """Compares the top 8 of each position; `reference[i]` are the log-probabilities after position i."""
    regrets, deltas = [], []
    for row, scored in enumerate(logprobs.values()):
        for position, one in enumerate(scored):
            truth = reference[row, position]
            regrets.append(truth.max() - truth[one.top_ids[0]])
            deltas += [abs(truth[i] - value) for i, value in zip(one.top_ids[:8], one.top_logprobs[:8], strict=True)]
    result = {
        "positions": len(regrets),
        "regret_p99": float(np.percentile(regrets, 99)),
        "regret_max": float(np.max(regrets)),
        "delta_mean": float(np.mean(deltas)),
        "delta_p99": float(np.percentile(deltas, 99)),
    }
    result["passes"] = result["regret_max"] <= 0.20 and result["delta_mean"] <= 0.06 and result["delta_p99"] <= 0.20
    report[label] = result
    shown = (f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}" for name, value in result.items())
    print(f"{label:>22}: " + "  ".join(shown))


def _scored(top_ids, logprobs):
    return SimpleNamespace(top_ids=tuple(top_ids.tolist()), top_logprobs=tuple(logprobs[top_ids].tolist()))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--positions", type=int, default=256)
    arguments = parser.parse_args()
    from openinfer_core import GenerateRequest, RequestId, SamplingParams

    rng = np.random.default_rng(1)
    ids = rng.integers(0, 32768, (arguments.sequences, arguments.positions))
    folder = Path(tempfile.mkdtemp())
    reference, baseline, model = make_reference(folder, arguments.layers, ids)
    report: dict = {}

    def requests(**sampling):
        params = SamplingParams(temperature=0.0, **sampling)
        return [
            GenerateRequest(request_id=RequestId(i), prompt_token_ids=tuple(row.tolist()), sampling=params)
            for i, row in enumerate(ids)
        ]

    spread = float(np.mean([row.max() for row in reference.reshape(-1, reference.shape[-1])]))
    print(f"mean largest logprob of the reference {spread:.2f} (flat would be {-np.log(32768):.2f})")
    top = np.argsort(-baseline, -1, kind="stable")[..., :8]
    as_ours = {
        row: [_scored(top[row, at], baseline[row, at]) for at in range(ids.shape[1] - 1)] for row in range(len(ids))
    }
    gate("transformers in BF16", reference, as_ours, report)
    for label, options in (("whole prompts", {}), ("chunks of 48", {"max_step_tokens": 48, "max_num_seqs": 8})):
        asked = requests(max_tokens=1, prompt_logprobs=8)
        scored, _, _ = run_engine(folder, asked, num_blocks=512, **{"max_num_seqs": 16, **options})
        gate(label, reference, scored, report)
    generated = {}
    for label, options in (
        ("graphs", {"max_num_seqs": 16}),
        ("graphs again", {"max_num_seqs": 16}),
        ("eager", {"cuda_graph": False, "max_num_seqs": 16}),
        ("preempted", {"num_blocks": 4 * 17 + 10, "max_num_seqs": 16, "max_step_tokens": 96}),
        ("sampled with logprobs", {"max_num_seqs": 16}),
    ):
        extra = {"logprobs": 2} if "logprobs" in label else {}
        _, tokens, stats = run_engine(folder, requests(max_tokens=64, **extra), **{"num_blocks": 512, **options})
        generated[label] = tokens
        whole = np.concatenate([ids, np.array(list(tokens.values()))], 1)
        truth = score(model, whole)[:, ids.shape[1] - 1 : -1]
        chosen = np.take_along_axis(truth, whole[:, ids.shape[1] :, None], 2)[..., 0]
        regret = truth.max(-1) - chosen
        report[label] = {"regret_max": float(regret.max()), "regret_mean": float(regret.mean())}
        report[label]["preemptions"] = stats.preemptions
        print(
            f"{label:>22}: decode regret max {regret.max():.4f} mean {regret.mean():.5f}, {stats.preemptions} preempted"
        )
    same = generated["graphs"] == generated["graphs again"]
    print("two runs give the same tokens:", same)
    report["bit_identical_tokens"] = same
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "golden_gate.json").write_text(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())

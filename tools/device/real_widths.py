"""Models too large for one GPU, at their real widths with few layers and experts: a GPU's logits against the CPU's.

    python3 tools/device/real_widths.py kimi-k2-int4 kimi-k2-fp8 [--json FILE] [--commit COMMIT]

Both have the same random weights, in the formats of the published checkpoints. Each sequence is computed whole, in
pieces, and token by token; what is printed, and what passes, is `logit_errors.py`'s.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from logit_errors import MAX_RATIO, LogitErrors
from published_configs import PUBLISHED
from source_packages import folders

sys.path[:0] = folders()

import msgspec  # noqa: E402
import numpy as np  # noqa: E402

from openinfer_core.provenance import provenance  # noqa: E402
from openinfer_engine.testing import FamilyHarness, RoundedOps  # noqa: E402
from openinfer_kernels.cuda import CudaOps  # noqa: E402
from openinfer_kimi_k2 import KimiK2  # noqa: E402

TOKENS = 300
FEW = {"vocab_size": 4096, "num_hidden_layers": 2, "n_routed_experts": 12}
"""For the CPU's sake."""
MODELS = {name: {**PUBLISHED[name], **FEW} for name in ("kimi-k2-int4", "kimi-k2-fp8")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("models", nargs="+", choices=MODELS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit")
    options = parser.parse_args()
    ops = CudaOps()
    rows = [row for name in options.models for row in compare(name, ops)]
    if options.json:
        facts = {"tokens": TOKENS, "max_ratio": MAX_RATIO, "models": MODELS}
        written = msgspec.structs.asdict(provenance(commit=options.commit)) | {"set_up": facts, "rows": rows}
        options.json.write_text(json.dumps(written, indent=1) + "\n")
    return 0 if all(row["passes"] for row in rows) else 1


def compare(name: str, ops: CudaOps) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[name]))
        there = {"dummy": True, "num_blocks": 400, "max_model_tokens": 1024, "block_tokens": 16}
        made = [FamilyHarness(KimiK2.definition, Path(folder), ops=each, **there) for each in (None, RoundedOps(), ops)]
    cpu, rounding, gpu = made
    ids = np.random.default_rng(7).integers(0, 4096, TOKENS).tolist()
    truth = cpu.step({"all": ids})["all"]
    rounded = LogitErrors.between(rounding.step({"all": ids})["all"], truth)
    print(f"{name}: spread of the logits {truth.std():.2f}")
    rounded.show("CPU, results rounded")
    cuts = {
        "whole": [TOKENS],
        "pieces": [120, 121, 250, TOKENS],
        "token by token behind 270": [270, *range(271, TOKENS + 1)],
    }
    rows = []
    for run, ends in cuts.items():
        pieces = [gpu.step({run: ids[a:b]})[run] for a, b in zip([0, *ends], ends, strict=False)]
        found = LogitErrors.between(np.concatenate(pieces), truth)
        found.show(run)
        facts = found._asdict() | {"cpu_rounded": rounded._asdict(), "passes": found.pass_beside(rounded)}
        rows.append({"model": name, "run": run, **facts})
    return rows


if __name__ == "__main__":
    sys.exit(main())

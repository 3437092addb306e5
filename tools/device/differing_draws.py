"""How many draws drafts change where steps of other rows round differently: against what a change of batch changes.

    python3 tools/device/differing_draws.py [--requests N] [--json FILE] [--speculative SETTING ...]
        [--model DIR] [--option NAME=VALUE ...]

Without `--batch-invariant`, temperature 1, the tiny trained model or `--model` (with `--option load_format=dummy` a
folder needs no weights: heads of other sizes have other kernels of attention). Two runs of the same requests draw with
the same random numbers, so that they differ only where logits were rounded otherwise; from a request's first differing
draw on its contexts are others and nothing of it is compared any more. So each draw that is compared has the same
context in both runs, as if the tokens were given:

    share = requests that differ somewhere / draws up to the first that differs, itself counted

    batch 1, batch 8    without a drafter: what a batch of eight changes
    batch 8, batch 40   without: of as many tokens a step as eight rows of five
    batch N, drafts     with a drafter, against the run without at the same batch; at most 1.2 times the share above

Prints a table with intervals of 95 % (Wilson's) and ends with 1 if a share is above 1.2 times by more than these say.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from source_packages import folders

sys.path[:0] = folders()

import msgspec  # noqa: E402
from drafts import MAX_DRAFTS, Answer, Model, make_requests, serve  # noqa: E402

import openinfer_tiny_model  # noqa: E402
from openinfer_core.provenance import provenance  # noqa: E402
from openinfer_engine.testing.drafters import DraftKind  # noqa: E402

GOAL = 1.2


@dataclass(slots=True)
class Row:
    """Two runs of the same requests."""

    runs: str
    draws: int
    differing: int
    share: float
    low: float
    high: float
    accepted: int
    drafted: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--speculative", nargs="+", default=["right", "random", "ngram,k=4"], metavar="SETTING")
    parser.add_argument("--model", type=Path, default=Path(openinfer_tiny_model.model_dir()), metavar="DIR")
    parser.add_argument("--option", nargs="*", default=[], metavar="NAME=VALUE", help="engine options")
    parser.add_argument("--drafts", type=int, default=MAX_DRAFTS, help="of a row, of `right` and `random`")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    options = dict(each.split("=", 1) for each in given.option)
    requests = [
        msgspec.structs.replace(each, sampling=msgspec.structs.replace(each.sampling, temperature=1.0))
        for each in make_requests(given.requests, 900, is_greedy=False)
    ]
    models = {
        batch: Model(
            given.model,
            given.device,
            {"max_num_seqs": str(batch), "num_blocks": str(max(200, 16 * batch)), **options},
        )
        for batch in (1, 8, 40)
    }
    plain = {batch: serve(requests, model, is_invariant=False)[0] for batch, model in models.items()}
    rows = [compared(f"batch {some}, batch {others}", plain[some], plain[others]) for some, others in ((1, 8), (8, 40))]
    print(*rows, sep="\n", flush=True)
    for setting in given.speculative:
        drafter = DraftKind(setting) if setting in list(DraftKind) else setting
        for batch, model in [*models.items()][:2]:
            outputs = {request_id: answer.token_ids for request_id, answer in plain[batch].items()}
            found, stats = serve(
                requests, model, is_invariant=False, drafter=drafter, outputs=outputs, max_drafts=given.drafts
            )
            rows.append(
                compared(
                    f"batch {batch}, {setting.split(',')[0]}",
                    plain[batch],
                    found,
                    accepted=stats.spec_decode_num_accepted_tokens,
                    drafted=stats.spec_decode_num_draft_tokens,
                )
            )
            assert stats.drafter_faults == 0
            print(rows[-1], flush=True)
    if given.json is not None:
        report = {
            **msgspec.to_builtins(provenance()),
            "max_drafts": given.drafts,
            "rows": [asdict(row) for row in rows],
        }
        given.json.write_text(json.dumps(report, indent=1) + "\n")
    print("runs                  draws  differing  share %      95 %       x of a batch's  accepted of drafted")
    for row in rows:
        ratio = row.share / rows[0].share if rows[0].share else math.nan
        print(
            f"{row.runs:20}  {row.draws:5}  {row.differing:9}  {row.share * 100:6.3f}  {row.low * 100:6.3f}-"
            f"{row.high * 100:6.3f}  {ratio:8.2f}        {row.accepted:6} of {row.drafted}"
        )
    return int(any(row.low > GOAL * rows[0].high for row in rows[2:]))


def compared(
    runs: str, some: dict[int, Answer], others: dict[int, Answer], *, accepted: int = 0, drafted: int = 0
) -> Row:
    draws = differing = 0
    for request_id, answer in some.items():
        count, is_other = first_difference(answer.token_ids, others[request_id].token_ids)
        # Of two that end differently one has drawn a stop token, which is not among its ids.
        is_other = is_other or answer.reason != others[request_id].reason
        draws += count + int(is_other)
        differing += int(is_other)
    low, high = wilson(differing, draws)
    return Row(runs, draws, differing, differing / max(draws, 1), low, high, accepted, drafted)


def first_difference(some: Sequence[int], others: Sequence[int]) -> tuple[int, bool]:
    """Equal draws at the beginning, and whether one follows that differs."""
    for place, (one, other) in enumerate(zip(some, others, strict=False)):
        if one != other:
            return place, True
    return min(len(some), len(others)), False


def wilson(hits: int, count: int, z: float = 1.96) -> tuple[float, float]:
    if count == 0:
        return 0.0, 1.0
    share, square = hits / count, z * z
    middle = (share + square / (2 * count)) / (1 + square / count)
    half = z / (1 + square / count) * math.sqrt(share * (1 - share) / count + square / (4 * count * count))
    return max(middle - half, 0.0), middle + half


if __name__ == "__main__":
    sys.exit(main())

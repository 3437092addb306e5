"""Turns of sessions with drafts and cached prefixes against the same turns computed whole, without drafts or a cache.

    python3 tools/device/drafted_turns.py qwen3.5-4b [--speculative mtp,k=3,vocabulary=16] [--json FILE]
    python3 tools/device/drafted_turns.py packages/openinfer-qwen35/tests/fixtures_mtp --first 40 --new 12 --output 10

With `--batch-invariant`; each turn's prompt is all that came before, and some new tokens. What is asked with random
weights is restricted to the first 16 token ids, which drafts are among as well, so that some are accepted.

    cached      drafts, the prefix cache, a pool of about a half of what the sessions hold, a host tier for the rest
    uncached    drafts, no cache: what is accepted there is what must be accepted after cached prefixes
    plain       no drafts, no cache: what every token is compared with

Ends with 1 if a token differs, if no prefix was cached or no draft accepted, or if the share of accepted drafts after
cached prefixes is not within 2 % of the other, nor within two standard errors.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import drafted_speed as speed
import msgspec
import numpy as np

from openinfer.models import find_family
from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.provenance import provenance
from openinfer_engine import StepLoop, build_loop, resolve
from openinfer_engine.testing.answers import run_at_once

ALLOWED = 16
BLOCK_TOKENS = 16
MOST_ROWS = 8
MOST_APART = 0.02


@dataclass(slots=True)
class Arm:
    """What one engine did with all turns."""

    name: str
    turns: int
    tokens: int
    cached_tokens: int
    tier_tokens: int
    preemptions: int
    accepted: int
    drafted: int
    faults: int
    seconds: float


def main() -> int:
    given = arguments()
    with tempfile.TemporaryDirectory() as made:
        folder, is_random = Path(given.model), given.model in speed.CONFIGS
        if is_random:
            folder = Path(made)
            (folder / "config.json").write_text(json.dumps(speed.CONFIGS[given.model] | json.loads(given.config)))
        given.options = {"load_format": "dummy"} if is_random else {}
        given.allowed = tuple(range(ALLOWED)) if is_random else ()
        cached, turns, answers = play_cached(given, folder)
        uncached, same = repeat(
            given, folder, turns, {"speculative": f"{given.speculative},adaptive=false"}, "uncached"
        )
        plain, right = repeat(given, folder, turns, {}, "plain")
    differing = [of for of, ids in right.items() if answers[of] != ids]
    differing_drafted = [of for of, ids in right.items() if same[of] != ids]
    shares = [arm.accepted / max(arm.drafted, 1) for arm in (cached, uncached)]
    for arm in (cached, uncached, plain):
        print(arm)
    print(
        f"{len(right)} turns: {len(differing)} differ with drafts and cache, {len(differing_drafted)} with drafts "
        f"alone; accepted after cached prefixes {shares[0]:.4f}, after computed ones {shares[1]:.4f}"
    )
    if given.json is not None:
        report = {
            **msgspec.to_builtins(provenance(commit=given.commit)),
            "set_up": {name: str(value) for name, value in vars(given).items()},
            "differing": differing,
            "differing_without_a_cache": differing_drafted,
            "accepted_shares": shares,
            "arms": [asdict(arm) for arm in (cached, uncached, plain)],
        }
        given.json.write_text(json.dumps(report, indent=1) + "\n")
    apart = max(MOST_APART * shares[1], 2 * (shares[1] / max(uncached.drafted, 1)) ** 0.5)
    is_met = cached.cached_tokens > 0 and cached.accepted > 0 and abs(shares[0] - shares[1]) <= apart
    return int(bool(differing or differing_drafted) or not is_met)


def open_loop(given: argparse.Namespace, folder: Path, options: Mapping[str, Any]) -> StepLoop:
    family: Any = find_family(folder)[0]
    fields = {"device": given.device, "batch_invariant": True, "grammar_compiler": "none", "max_num_seqs": MOST_ROWS}
    fields |= {"max_model_tokens": longest(given), **given.options, **options}
    plan = resolve(family.definition, folder, msgspec.convert(fields, family.options_type, strict=False))
    return build_loop(plan)


def longest(given: argparse.Namespace) -> int:
    return int(given.first + given.turns * (given.new + given.output) + BLOCK_TOKENS)


def play_cached(given: argparse.Namespace, folder: Path) -> tuple[Arm, list[GenerateRequest], dict[int, list[int]]]:
    """The arm, and all its turns with their answers, by request id."""
    blocks = -(-longest(given) // BLOCK_TOKENS) * given.sessions
    options = {"num_blocks": max(blocks // 2, blocks // given.sessions + 4), "kv_tier": ["host=4GiB"]}
    loop = open_loop(given, folder, {**options, "speculative": f"{given.speculative},adaptive=false"})
    rng = np.random.default_rng(3)
    num_ids = loop.info.num_token_ids
    history = [rng.integers(0, num_ids, given.first).tolist() for _ in range(given.sessions)]
    asked: list[GenerateRequest] = []
    found: dict[int, list[int]] = {}
    began = time.perf_counter()
    for _ in range(given.turns):
        for each in history:
            each.extend(rng.integers(0, num_ids, given.new).tolist())
        turn = [ask(given, len(asked) + place, ids, rng) for place, ids in enumerate(history)]
        answers = run_at_once(loop, turn)
        for request, ids in zip(turn, history, strict=True):
            found[request.request_id] = answers[request.request_id].token_ids
            ids.extend(found[request.request_id])
        asked += turn
    return arm_of("cached", loop, found, time.perf_counter() - began), asked, found


def repeat(
    given: argparse.Namespace, folder: Path, turns: Sequence[GenerateRequest], options: Mapping[str, Any], name: str
) -> tuple[Arm, dict[int, list[int]]]:
    blocks = (-(-longest(given) // BLOCK_TOKENS) + 1) * MOST_ROWS
    loop = open_loop(given, folder, {"prefix_cache": False, "num_blocks": blocks, **options})
    began = time.perf_counter()
    answers = {of: answer.token_ids for of, answer in run_at_once(loop, turns).items()}
    return arm_of(name, loop, answers, time.perf_counter() - began), answers


def arm_of(name: str, loop: StepLoop, answers: Mapping[int, list[int]], seconds: float) -> Arm:
    stats = loop.stats()
    loop.close()
    return Arm(
        name=name,
        turns=len(answers),
        tokens=sum(map(len, answers.values())),
        cached_tokens=stats.cached_tokens,
        tier_tokens=stats.tier_tokens,
        preemptions=stats.preemptions,
        accepted=stats.spec_decode_num_accepted_tokens,
        drafted=stats.spec_decode_num_draft_tokens,
        faults=stats.drafter_faults,
        seconds=round(seconds, 1),
    )


def ask(given: argparse.Namespace, request_id: int, ids: Sequence[int], rng: np.random.Generator) -> GenerateRequest:
    sampling = SamplingParams(
        max_tokens=given.output,
        temperature=float(rng.choice((0.0, 0.7, 1.0))),
        seed=int(rng.integers(2**31)),
        allowed_token_ids=given.allowed or None,
        repetition_penalty=float(rng.choice((1.0, 1.1))),
    )
    return GenerateRequest(request_id=RequestId(request_id), prompt_token_ids=tuple(ids), sampling=sampling)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=f"a folder, or one of {', '.join(speed.CONFIGS)}")
    parser.add_argument("--speculative", default="mtp,k=3")
    parser.add_argument("--sessions", type=int, default=6)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--first", type=int, default=600)
    parser.add_argument("--new", type=int, default=150)
    parser.add_argument("--output", type=int, default=40)
    parser.add_argument("--config", default="{}", help="JSON of keys of config.json that are different")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""Drafts change no token: an engine with scripted drafters against one without, through the scheduler, on a GPU.

    python3 tools/device/drafts.py [--requests N] [--json FILE]
    python3 tools/device/drafts.py --speculative ngram,k=4 [--model DIR]

The tiny trained model on this GPU, with random requests (prompts that share prefixes, sampling of all kinds, stop
tokens, a pool so small that sequences are preempted), for drafters that are right, wrong, random and hostile, or for
those that are named:

    --batch-invariant   every token is the one without drafts, at any temperature
    otherwise           greedy; a step of other rows rounds differently, so the first token that differs must be a tie:
                        the two candidates' log-probabilities lie within the golden gate's bound for its 99th percentile

Prints a table; ends with 1 if a token differs that is no tie, or if no draft was ever accepted where some are right.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from source_packages import folders

sys.path[:0] = folders()

import msgspec  # noqa: E402
import numpy as np  # noqa: E402

import openinfer_tiny_model  # noqa: E402
from openinfer.models import find_family  # noqa: E402
from openinfer_core import (  # noqa: E402
    Finished,
    GenerateRequest,
    RequestId,
    SamplingParams,
    Tokens,
    read_config,
)
from openinfer_engine import build_loop, resolve  # noqa: E402
from openinfer_engine.testing.drafters import DraftKind, scripted_drafter, with_drafter  # noqa: E402

TIE_NATS = 0.20
TOP = 20
MAX_DRAFTS = 4


@dataclass(slots=True)
class Row:
    """One engine with a drafter against one without."""

    batch_invariant: bool
    drafter: str
    requests: int
    tokens: int
    accepted: int
    drafted: int
    preemptions: int
    faults: int
    ties: int
    wrong: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Model:
    """What is served."""

    folder: Path
    device: str
    options: dict[str, str]

    @property
    def vocab_size(self) -> int:
        return int(read_config(self.folder)["vocab_size"])


@dataclass(slots=True)
class Answer:
    """What one request got."""

    token_ids: list[int]
    logprobs: list[Any]
    reason: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda", help="cpu tries the script without a GPU")
    parser.add_argument(
        "--speculative",
        nargs="+",
        metavar="SETTING",
        default=list(DraftKind),
        help="drafters by name, and kinds of scripted ones, which are the default",
    )
    parser.add_argument("--model", type=Path, default=Path(openinfer_tiny_model.model_dir()), metavar="DIR")
    parser.add_argument("--only", choices=("invariant", "default"), help="one of the two ways")
    parser.add_argument("--option", nargs="*", default=[], metavar="NAME=VALUE", help="engine options")
    given = parser.parse_args()
    drafters = [DraftKind(each) if each in list(DraftKind) else each for each in given.speculative]
    model = Model(given.model, given.device, dict(each.split("=", 1) for each in given.option))
    rows = [
        row
        for is_invariant in (True, False)
        if given.only != ("default" if is_invariant else "invariant")
        for row in compare(given.requests, model, drafters, is_invariant=is_invariant)
    ]
    print("batch-invariant  drafter   requests  tokens  drafted  accepted  preempted  faults  ties  wrong")
    for row in rows:
        print(
            f"{row.batch_invariant!s:15}  {row.drafter[:8]:8}  {row.requests:8}  {row.tokens:6}  {row.drafted:7}  "
            f"{row.accepted:8}  {row.preemptions:9}  {row.faults:6}  {row.ties:4}  {row.wrong:5}"
        )
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    is_accepting = all(row.accepted for row in rows if row.drafter != DraftKind.WRONG)
    return 0 if is_accepting and not any(row.wrong or row.faults for row in rows) else 1


def compare(num_requests: int, model: Model, drafters: Sequence[str], *, is_invariant: bool) -> list[Row]:
    requests = make_requests(num_requests, min(900, model.vocab_size), is_greedy=not is_invariant)
    plain, _ = serve(requests, model, is_invariant=is_invariant)
    outputs = {request_id: answer.token_ids for request_id, answer in plain.items()}
    found: list[Row] = []
    for kind in drafters:
        began = time.perf_counter()
        drafted, stats = serve(requests, model, is_invariant=is_invariant, drafter=kind, outputs=outputs)
        verdicts = [judge(plain[each], drafted[each], is_exact=is_invariant) for each in plain]
        found.append(
            Row(
                batch_invariant=is_invariant,
                drafter=str(kind),
                requests=len(requests),
                tokens=sum(len(answer.token_ids) for answer in drafted.values()),
                accepted=stats.spec_decode_num_accepted_tokens,
                drafted=stats.spec_decode_num_draft_tokens,
                preemptions=stats.preemptions,
                faults=stats.drafter_faults,
                ties=verdicts.count("tie"),
                wrong=verdicts.count("wrong"),
                seconds=time.perf_counter() - began,
            )
        )
    return found


def make_requests(count: int, end: int, *, is_greedy: bool) -> list[GenerateRequest]:
    rng = np.random.default_rng(7)
    shared = rng.integers(5, end, 48).tolist()
    return [make_request(index, shared, rng, end, is_greedy=is_greedy) for index in range(count)]


def make_request(
    index: int, shared: list[int], rng: np.random.Generator, end: int, *, is_greedy: bool
) -> GenerateRequest:
    prompt = [*shared[: int(rng.choice((0, 16, 48)))], *rng.integers(5, end, int(rng.integers(1, 40))).tolist()]
    prompt += prompt[-20:]  # what stands there twice may be drafted
    penalised = bool(rng.random() < 0.3)
    sampling = SamplingParams(
        max_tokens=int(rng.integers(1, 80)),
        temperature=0.0 if is_greedy else float(rng.choice((0.0, 0.7, 1.0))),
        top_p=float(rng.choice((1.0, 0.9))),
        top_k=int(rng.choice((0, 20))),
        seed=int(rng.integers(2**40)),
        stop_token_ids=tuple(rng.integers(5, end, int(rng.choice((0, 3)))).tolist()),
        min_tokens=1 if rng.random() < 0.3 else 0,
        presence_penalty=0.5 if penalised else 0.0,
        repetition_penalty=1.2 if penalised else 1.0,
        logprobs=TOP if is_greedy else None,
    )
    return GenerateRequest(request_id=RequestId(index + 1), prompt_token_ids=tuple(prompt), sampling=sampling)


def serve(
    requests: Sequence[GenerateRequest],
    model: Model,
    *,
    is_invariant: bool,
    drafter: str | None = None,
    outputs: dict[int, list[int]] | None = None,
    max_drafts: int = MAX_DRAFTS,
) -> tuple[dict[int, Answer], Any]:
    """Answers by request id, and the engine's counters; a drafter that is no `DraftKind` is one by name, which says
    itself how many drafts a row may have.
    """
    family: Any = find_family(model.folder)[0]
    given = {"num_blocks": 36, "max_num_seqs": 16, "max_model_tokens": 256, **model.options}
    given |= {"device": model.device, "batch_invariant": is_invariant}
    if drafter is not None and not isinstance(drafter, DraftKind):
        given["speculative"] = drafter if ",adaptive=" in drafter else f"{drafter},adaptive=false"
    engine_plan = resolve(family.definition, model.folder, msgspec.convert(given, family.options_type, strict=False))
    if isinstance(drafter, DraftKind):
        factory = scripted_drafter(drafter, outputs or {}, is_exact=is_invariant)
        engine_plan = with_drafter(engine_plan, factory, max_drafts=max_drafts)
    loop = build_loop(engine_plan)
    answers = {int(request.request_id): Answer([], []) for request in requests}
    for request in requests:
        take(answers, loop.submit(request))
    while loop.busy:
        take(answers, loop.step())
    stats = loop.stats()
    loop.close()
    return answers, stats


def take(answers: dict[int, Answer], events: Sequence[Any]) -> None:
    for event in events:
        answer = answers[event.request_id]
        if isinstance(event, Tokens):
            answer.token_ids += event.token_ids
            answer.logprobs += event.logprobs or ()
        elif isinstance(event, Finished):
            answer.reason = f"{event.reason} {event.stop_token_id}"
        elif type(event).__name__ == "Failed":
            answer.reason = str(event)


def judge(plain: Answer, drafted: Answer, *, is_exact: bool) -> str:
    if (plain.token_ids, plain.reason) == (drafted.token_ids, drafted.reason):
        return "equal"
    if is_exact:
        return "wrong"
    pairs = zip(plain.token_ids, drafted.token_ids, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is None:  # one ends where the other goes on: a stop token was the tie, whose log-probability is not told
        at = min(len(plain.token_ids), len(drafted.token_ids))
        longer = plain if len(plain.token_ids) > at else drafted
        top = longer.logprobs[at].top_logprobs if at < len(longer.logprobs) else ()
        return "tie" if len(top) > 1 and top[0] - top[1] <= TIE_NATS else "wrong"
    scores = dict(zip(plain.logprobs[at].top_ids, plain.logprobs[at].top_logprobs, strict=True))
    other = scores.get(drafted.token_ids[at])
    return "tie" if other is not None and abs(plain.logprobs[at].logprob - other) <= TIE_NATS else "wrong"


if __name__ == "__main__":
    sys.exit(main())

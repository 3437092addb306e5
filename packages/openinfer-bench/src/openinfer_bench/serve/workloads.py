"""Workloads: from `qps=16` to the requests it sends; one seed sends the same requests to every server.

    bs1              8 requests one after the other, after 2 that are thrown away
    qps=R            Poisson arrivals at R requests/s for --seconds
    conc=N           N requests in flight, max(2 N, 64) in all
    prefill=L        5 prompts of L tokens that no cache knows, 1 output token, one at a time, after 1 thrown away
    warm=L1,L2,…     per length a new prompt (a row of its own, `cold=L`), then the same 10 times, after 1 thrown away

`:64x512` after a workload gives it prompts of 64 tokens and 512 output tokens. Prompts are random token ids, so that
no tokenizer is needed here and none is measured there. All workloads begin with the same random numbers: two of them in
one run may share prompts, which a prefix cache finds (`cached_tokens` of a row); other seeds share none.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from openinfer_bench.serve.messages import Job
from openinfer_core import InvalidRequest

_LEAST_TOKEN_ID = 200
_WARM_UP_TOKENS = 8
KINDS = ("bs1", "qps", "conc", "prefill", "warm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What workloads have in common."""

    prompt_tokens: int
    output_tokens: int
    seconds: float
    num_token_ids: int
    """Prompts hold ids below it."""
    seed: int
    abort_share: float = 0.0
    """Of the requests of `qps` and `conc`: clients leave after a random number of events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Requests that are summed up in one row."""

    name: str
    jobs: Sequence[Job]
    places: int
    """In flight at most."""
    thrown_away: int = 0
    """Of the first requests, which warm something up."""

    @property
    def sizes(self) -> dict[str, int]:
        """Of its requests, for the row of the result."""
        last = self.jobs[-1]
        return {"prompt_tokens": len(last.prompt_ids), "output_tokens": last.output_tokens}


def phases(workload: str, sizes: Sizes) -> Iterator[Phase]:
    """The phases of a workload, in order.

    Raises:
        InvalidRequest: there is no such workload.
    """
    name, _, own = workload.partition(":")
    kind, _, value = name.partition("=")
    rng = np.random.default_rng(sizes.seed)
    try:
        sizes = _with_own(sizes, own)
        if kind == "bs1" and not value:
            yield _one_by_one(name, rng, sizes)
        elif kind == "qps":
            yield _poisson(name, rng, sizes, rate=float(value))
        elif kind == "conc":
            yield _closed(name, rng, sizes, places=int(value))
        elif kind == "prefill":
            prompts = _prompts(rng, 6, int(value), sizes)
            yield Phase(name=name, jobs=_jobs(prompts, 1), places=1, thrown_away=1)
        elif kind == "warm":
            for length in map(int, value.split(",")):
                (prompt,) = _prompts(rng, 1, length, sizes)
                yield Phase(name=f"cold={length}", jobs=_jobs([prompt], 1), places=1)
                yield Phase(name=f"warm={length}", jobs=_jobs([prompt] * 11, 1), places=1, thrown_away=1)
        else:
            raise ValueError(kind)
    except ValueError as error:
        raise InvalidRequest(
            f"--workload {workload!r} is none of bs1, qps=R, conc=N, prefill=L, warm=L1,L2, with :PROMPTxOUTPUT",
            field="workload",
        ) from error


def _with_own(sizes: Sizes, own: str) -> Sizes:
    """Sizes with those of a workload's own, `64x512`; nothing changes nothing."""
    if not own:
        return sizes
    prompt, output = map(int, own.split("x"))
    return replace(sizes, prompt_tokens=prompt, output_tokens=output)


def _one_by_one(name: str, rng: np.random.Generator, sizes: Sizes) -> Phase:
    warm_up = _jobs(_prompts(rng, 2, sizes.prompt_tokens, sizes), _WARM_UP_TOKENS)
    timed = _jobs(_prompts(rng, 8, sizes.prompt_tokens, sizes), sizes.output_tokens)
    return Phase(name=name, jobs=[*warm_up, *timed], places=1, thrown_away=len(warm_up))


def _poisson(name: str, rng: np.random.Generator, sizes: Sizes, *, rate: float) -> Phase:
    if not rate > 0:
        raise ValueError(rate)
    count = max(8, int(rate * sizes.seconds))
    at_s = np.cumsum(rng.exponential(1 / rate, count)).tolist()
    prompts = _prompts(rng, count, sizes.prompt_tokens, sizes)
    return Phase(name=name, jobs=_jobs(prompts, sizes.output_tokens, at_s=at_s, aborts=sizes), places=count)


def _closed(name: str, rng: np.random.Generator, sizes: Sizes, *, places: int) -> Phase:
    if places < 1:
        raise ValueError(places)
    prompts = _prompts(rng, max(2 * places, 64), sizes.prompt_tokens, sizes)
    return Phase(name=name, jobs=_jobs(prompts, sizes.output_tokens, aborts=sizes), places=places)


def _prompts(rng: np.random.Generator, count: int, length: int, sizes: Sizes) -> list[bytes]:
    if length < 1:
        raise ValueError(length)
    low = min(_LEAST_TOKEN_ID, sizes.num_token_ids // 2)
    return [rng.integers(low, sizes.num_token_ids, length).astype(np.int32).tobytes() for _ in range(count)]


def _jobs(
    prompts: Sequence[bytes], output_tokens: int, *, at_s: Sequence[float] | None = None, aborts: Sizes | None = None
) -> list[Job]:
    share = 0.0 if aborts is None else aborts.abort_share
    rng = np.random.default_rng([0 if aborts is None else aborts.seed, 1])  # of its own: prompts stay the same
    leaves = rng.random(len(prompts)) < share
    after = rng.integers(1, max(2, output_tokens), len(prompts))
    return [
        Job(
            prompt=prompt,
            output_tokens=output_tokens,
            at_s=None if at_s is None else at_s[index],
            abort_after=int(after[index]) if leaves[index] else None,
        )
        for index, prompt in enumerate(prompts)
    ]

"""Workloads: the same requests for a seed, in the stream that other clients of this definition send."""

import dataclasses

import numpy as np
import pytest

from openinfer_bench.serve.workloads import Phase, Sizes, phases
from openinfer_core import InvalidRequest

SIZES = Sizes(prompt_tokens=16, output_tokens=8, seconds=2.0, num_token_ids=1000, seed=42)


def only(workload: str, sizes: Sizes = SIZES) -> Phase:
    (phase,) = phases(workload, sizes)
    return phase


def test_poisson_draws_gaps_first_and_prompts_then() -> None:
    rng = np.random.default_rng(42)
    at_s = np.cumsum(rng.exponential(1 / 10, 20))
    first = rng.integers(200, 1000, 16)
    phase = only("qps=10")
    assert [job.at_s for job in phase.jobs] == at_s.tolist()
    assert phase.jobs[0].prompt_ids == first.tolist()
    assert {job.output_tokens for job in phase.jobs} == {8}
    assert phase.places == 20


def test_one_by_one_throws_its_warm_up_away() -> None:
    phase = only("bs1")
    assert (len(phase.jobs), phase.thrown_away, phase.places) == (10, 2, 1)
    assert len({job.prompt for job in phase.jobs}) == 10


@pytest.mark.parametrize(("workload", "jobs"), [("conc=4", 64), ("conc=40", 80)])
def test_closed_loop_has_its_places_and_enough_requests(workload: str, jobs: int) -> None:
    phase = only(workload)
    assert (len(phase.jobs), phase.places) == (jobs, int(workload[5:]))


def test_warm_prompts_are_the_cold_one() -> None:
    cold, warm, *further = phases("warm=5,7", SIZES)
    assert [phase.name for phase in (cold, warm, *further)] == ["cold=5", "warm=5", "cold=7", "warm=7"]
    assert {job.prompt for job in warm.jobs} == {job.prompt for job in cold.jobs}
    assert (len(warm.jobs), warm.thrown_away) == (11, 1)


def test_aborts_leave_the_prompts_as_they_are() -> None:
    kept = only("conc=200")
    left = only("conc=200", dataclasses.replace(SIZES, abort_share=0.25))
    assert [job.prompt for job in left.jobs] == [job.prompt for job in kept.jobs]
    assert not any(job.abort_after for job in kept.jobs)
    after = [job.abort_after for job in left.jobs if job.abort_after is not None]
    assert 60 < len(after) < 140
    assert all(1 <= each < 8 for each in after)


def test_workload_may_have_sizes_of_its_own() -> None:
    phase = only("conc=4:5x9")
    assert (phase.name, phase.sizes) == ("conc=4", {"prompt_tokens": 5, "output_tokens": 9})
    assert only("conc=4").sizes == {"prompt_tokens": 16, "output_tokens": 8}


@pytest.mark.parametrize(
    "workload", ["conc=4:5", "conc=4:0x3", "bs2", "qps=0", "qps=x", "conc=0", "warm=", "prefill=0", "bs1=3"]
)
def test_what_is_no_workload_is_refused(workload: str) -> None:
    with pytest.raises(InvalidRequest, match="is none of bs1"):
        list(phases(workload, SIZES))

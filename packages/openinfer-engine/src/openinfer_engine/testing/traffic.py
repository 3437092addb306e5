"""Requests through the real scheduler, step loop and runner: whatever the circumstances, each gets the same answer.

`Traffic` answers random requests to a model each alone, its prompt in one step, without a prefix cache, on one rank.
`Traffic.serve` has the same requests arrive together under other circumstances, and holds their answers against those:
the same greedy tokens, and log-probabilities within a tolerance.

Products of matrices of different sizes may differ in their last bits, so where two tokens are likely to within the
tolerance either is right; what follows such a token is not compared. That is counted, and must stay the exception.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from openinfer_core import EngineStats, GenerateRequest, RequestId, SamplingParams, TokenLogprobs
from openinfer_core.process.host import EngineLoop
from openinfer_engine.engine_plan import resolve
from openinfer_engine.launch import build_engine_loop
from openinfer_engine.model import ModelDefinition
from openinfer_engine.options import EngineOptions
from openinfer_engine.testing.answers import Answer, run_alone, run_together

_NUM_REQUESTS = 16
_UNDECIDED = 1
"""How many requests of all may meet two tokens that are equally likely."""


class Traffic:
    """Random requests to a model, and what each of them is answered alone.

    Args:
        definition: of the family.
        model_dir: `config.json` and safetensors.
        tolerance: largest difference of a log-probability.

    Attributes:
        requests: two kinds in turn: prompts of 41 to 110 tokens that begin alike, and short ones with long completions.
        alone: the answers by request id.

    Raises:
        Refused: the family does not compute this model.
        InvalidCheckpoint: config or tensors are not the family's.
    """

    def __init__(self, definition: ModelDefinition[Any], model_dir: Path, *, tolerance: float) -> None:
        self._definition = definition
        self._model_dir = model_dir
        self._tolerance = tolerance
        loop = self.make_loop(prefix_cache=False)
        self.requests = _make_requests(loop.info.num_token_ids)
        self.alone = run_alone(loop, self.requests)
        assert loop.stats().preemptions == 0, "a request alone was preempted"
        loop.close()

    def make_loop(self, **options: Any) -> EngineLoop:
        """An engine of the model, by fields of `EngineOptions`; 8 sequences, 256 tokens a step, 400 blocks of 8.

        Raises:
            Refused: these options are impossible for the model.
        """
        sizes: dict[str, Any] = {"max_num_seqs": 8, "max_step_tokens": 256, "block_size_tokens": 8, "num_blocks": 400}
        return build_engine_loop(resolve(self._definition, self._model_dir, EngineOptions(**sizes | options)))

    def serve(self, *, seed: int = 0, **options: Any) -> tuple[dict[int, Answer], EngineStats]:
        """Answers when all come together under other circumstances, as `make_loop` makes them, and the engine's counts.

        Args:
            seed: of the order in which requests come, and of what else comes.
            options: fields of `EngineOptions`.

        Raises:
            AssertionError: an answer is another than alone, or the engine kept something of a request.
        """
        loop = self.make_loop(**options)
        try:
            answers = run_together(loop, self.requests, seed=seed)
            stats = loop.stats()
        finally:
            loop.close()
        assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0), stats
        undecided = [i for i, alone in self.alone.items() if not _is_equal(answers[i], alone, self._tolerance)]
        assert len(undecided) <= _UNDECIDED, f"requests {undecided} all met two tokens that are equally likely"
        return answers, stats

    def check_varied(self) -> None:
        """The answers alone are long, differ, and none came from a cache: they are worth being compared with.

        Raises:
            AssertionError: they are not.
        """
        answers = self.alone.values()
        tokens = [token for answer in answers for token in answer.token_ids]
        assert len(tokens) > 200, len(tokens)
        assert len(set(tokens)) > 40, set(tokens)
        assert sum(len(answer.prompt_logprobs) for answer in answers) > 50, "log-probabilities of few prompts"
        assert max(len(request.prompt_token_ids) for request in self.requests) > 80, "short prompts"
        assert all(answer.cached_tokens == 0 for answer in answers), "a prefix was cached"

    def check_batch_invariant(self, *, num_blocks: int = 18) -> None:
        """Batch-invariant operators give some of the requests the same bits alone and together, in pieces, preempted.

        Args:
            num_blocks: of the pool when they are together, of 8 tokens: fewer than they hold.

        Raises:
            AssertionError: they do not, or nothing was preempted.
        """
        some = self.requests[:6]
        alone = self.make_loop(batch_invariant=True)
        together = self.make_loop(batch_invariant=True, max_step_tokens=24, num_blocks=num_blocks)
        expected, found = run_alone(alone, some), run_together(together, some, seed=2)
        assert together.stats().preemptions >= 1, "nothing was preempted"
        for request_id, answer in expected.items():
            assert found[request_id].token_ids == answer.token_ids, request_id
            assert found[request_id].logprobs == answer.logprobs, request_id
        alone.close()
        together.close()


def random_requests(
    count: int, *, vocab_size: int, max_prompt_tokens: int, shared_tokens: int = 0, **sampling: Any
) -> list[GenerateRequest]:
    """Requests of 24 tokens each, greedy, with prompts of any length.

    Args:
        count: how many; their ids are 0, 1 and so on.
        vocab_size: of the model.
        max_prompt_tokens: the longest a prompt may be, without what is shared.
        shared_tokens: with how many all prompts begin alike.
        sampling: fields of `SamplingParams`.
    """
    rng = np.random.default_rng(5)
    shared = rng.integers(0, vocab_size, shared_tokens).tolist()
    greedy: dict[str, Any] = {"max_tokens": 24, "temperature": 0.0}
    params = SamplingParams(**(greedy | sampling))
    requests: list[GenerateRequest] = []
    for index in range(count):
        prompt = rng.integers(0, vocab_size, int(rng.integers(1, max_prompt_tokens + 1))).tolist()
        requests.append(
            GenerateRequest(request_id=RequestId(index), prompt_token_ids=(*shared, *prompt), sampling=params)
        )
    return requests


def _make_requests(vocab_size: int) -> list[GenerateRequest]:
    rng = np.random.default_rng(0)
    shared = rng.integers(0, vocab_size, 80).tolist()
    requests: list[GenerateRequest] = []
    for index in range(_NUM_REQUESTS):
        prompt = rng.integers(0, vocab_size, rng.integers(1, 31)).tolist()
        max_tokens = int(rng.integers(30, 41))
        if index % 2:
            prompt = [*shared[: rng.integers(40, 81)], *prompt]
            max_tokens = int(rng.integers(1, 11))
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=0,
            logprobs=2,
            prompt_logprobs=0 if index % 4 == 1 and index > 4 else None,
            stop_token_ids=tuple(rng.integers(0, vocab_size, 3).tolist()) if index % 3 == 0 else (),
        )
        requests.append(GenerateRequest(request_id=RequestId(index), prompt_token_ids=tuple(prompt), sampling=sampling))
    return requests


def _is_equal(answer: Answer, expected: Answer, tolerance: float) -> bool:
    """Asserts equality up to the first token at which two were equally likely; False if there was one."""
    assert answer.finished is not None, "a request has not ended"
    assert expected.finished is not None, "a request has not ended alone"
    _check_logprobs(answer.prompt_logprobs, expected.prompt_logprobs, tolerance)
    for index, (found, right) in enumerate(zip(answer.logprobs, expected.logprobs, strict=False)):
        if found.top_ids[0] != right.top_ids[0]:
            assert right.top_logprobs[0] - right.top_logprobs[1] < tolerance, f"token {index} differs"
            return False
        _check_logprobs([found], [right], tolerance)
    assert answer.token_ids == expected.token_ids, f"{answer.token_ids}, alone {expected.token_ids}"
    ends = [(end.reason, end.completion_tokens) for end in (answer.finished, expected.finished)]
    assert ends[0] == ends[1], f"ended with {ends[0]}, alone with {ends[1]}"
    return True


def _check_logprobs(found: Sequence[TokenLogprobs], expected: Sequence[TokenLogprobs], tolerance: float) -> None:
    assert len(found) == len(expected), f"{len(found)} log-probabilities, alone {len(expected)}"
    for ours, theirs in zip(found, expected, strict=True):
        difference = abs(ours.logprob - theirs.logprob)
        assert difference < tolerance, f"a log-probability differs by {difference:.2e}, allowed {tolerance:.2e}"

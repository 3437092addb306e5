"""The tiny model on a GPU: token for token what it says on a CPU. Skipped, with the reason, where there is no GPU."""

import pytest

from openinfer import LLM
from openinfer_core import Refused

NEAR_TIE_NATS = 0.05
"""Where the CPU itself is as undecided as this, BF16 may choose the other token."""
PROMPTS = [
    *(
        f"The capital of {land} is"
        for land in ("France", "Italy", "Japan", "Norway", "Chile", "Egypt", "Peru", "Kenya")
    ),
    *(f"The opposite of {word} is" for word in ("hot", "tall", "early", "sad", "dark", "open")),
    *(f"Question: What is {a} + {b}?\nAnswer:" for a, b in ((2, 3), (7, 5), (10, 20), (9, 9))),
    "Once upon a time there was a",
    "One day, a little girl",
]


@pytest.fixture
def gpu_llm() -> LLM:
    try:
        return LLM("tiny", device="cuda", num_blocks=512, max_num_seqs=32)
    except Refused as reason:
        pytest.skip(str(reason))


@pytest.mark.gpu
def test_tiny_model_says_on_a_gpu_what_it_says_on_a_cpu(llm: LLM, gpu_llm: LLM) -> None:
    with gpu_llm:
        plain = gpu_llm.generate(PROMPTS, max_tokens=48, temperature=0)
        scored = gpu_llm.generate(PROMPTS, max_tokens=48, temperature=0, logprobs=2)
    assert [one.token_ids for one in plain] == [one.token_ids for one in scored]
    same = 0
    for ours, theirs in zip(plain, llm.generate(PROMPTS, max_tokens=48, temperature=0, logprobs=2), strict=True):
        pairs = list(zip(ours.token_ids, theirs.token_ids, strict=False))
        split = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
        if split is None:
            assert ours.token_ids == theirs.token_ids
            same += 1
        else:
            first, second = theirs.logprobs[split].top_logprobs
            assert first - second < NEAR_TIE_NATS, f"{theirs.text!r} is sure of its token {split}, and ours is another"
    assert same >= 16

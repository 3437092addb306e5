"""An adapter that PEFT made of the tiny model, of every projection of both kinds of layers: what it changes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_engine.engine_plan import resolve
from openinfer_engine.launch import build_loop
from openinfer_engine.options import EngineOptions
from openinfer_engine.testing.answers import run_at_once
from openinfer_qwen35.family import Qwen35Definition

HERE = Path(__file__).parent
ADAPTER = HERE / "adapters/all"


@pytest.mark.parametrize(
    "options", [{}, {"tensor_parallel_size": 2}, {"max_step_tokens": 9}], ids=["one rank", "two ranks", "chunks"]
)
def test_adapter_and_none_in_one_batch_are_what_peft_computes(options: dict[str, Any]) -> None:
    with np.load(ADAPTER / "logits.npz") as found:
        prompt, logits = found["token_ids"].tolist(), found["logits"].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    expected = logprobs[np.arange(len(prompt) - 1), prompt[1:]]
    given = EngineOptions(lora=[f"tuned={ADAPTER}"], num_blocks=32, max_num_seqs=4, max_model_tokens=64, **options)
    loop = build_loop(resolve(Qwen35Definition(), HERE / "fixtures/text_tied", given))
    try:
        requests = [
            GenerateRequest(
                request_id=RequestId(number),
                prompt_token_ids=tuple(prompt),
                lora=lora,
                sampling=SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0),
            )
            for number, lora in enumerate(("tuned", None))
        ]
        answers = run_at_once(loop, requests)
    finally:
        loop.close()
    adapted, plain = (np.array([each.logprob for each in answers[number].prompt_logprobs]) for number in range(2))
    assert np.abs(adapted - expected).max() < 1e-4
    assert np.abs(adapted - plain).mean() > 0.05

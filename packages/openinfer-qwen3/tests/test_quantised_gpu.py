"""Quantised models on a GPU, in every layout that people publish: as close to the CPU's answers as BF16 models are.

The CPU computes in float32 with exactly what the codes stand for. Skipped, with the reason, where there is no GPU.
"""

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from gpu_model import CONFIG
from safetensors.numpy import save_file

from openinfer_core.errors import Refused
from openinfer_engine import EngineOptions, build_loop, resolve
from openinfer_engine.options import DeviceKind
from openinfer_engine.testing import Answer, prompt_differences, random_requests, random_weights, run_at_once
from openinfer_engine.testing.quantised_checkpoints import SCHEMES, write_quantised
from openinfer_engine.testing.quantised_family import projections
from openinfer_qwen3.family import Qwen3Definition

pytestmark = pytest.mark.gpu
BF16_LOGPROB = 0.15


@pytest.fixture(scope="module")
def plain_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(random_weights(Qwen3Definition(), CONFIG), folder / "model.safetensors")
    return folder


def answers_of(model_dir: Path, device: DeviceKind, *, num_requests: int, max_prompt_tokens: int) -> dict[int, Answer]:
    asked = random_requests(
        num_requests, vocab_size=1024, max_prompt_tokens=max_prompt_tokens, max_tokens=1, prompt_logprobs=0
    )
    options = EngineOptions(num_blocks=256, max_num_seqs=16, device=device)
    try:
        loop = build_loop(resolve(Qwen3Definition(), model_dir, options))
    except Refused as reason:
        pytest.skip(str(reason))
    with closing(loop):
        return run_at_once(loop, asked)


@pytest.mark.parametrize("num_requests", [1, 12], ids=["few tokens", "many tokens"])
@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_log_probabilities_are_close_to_the_cpus(
    plain_dir: Path, tmp_path: Path, scheme: str, num_requests: int
) -> None:
    folder = tmp_path / "model"
    write_quantised(plain_dir, folder, SCHEMES[scheme], projections(plain_dir))
    max_prompt_tokens = 40 if num_requests == 1 else 89
    cpu, gpu, unlike = (
        answers_of(model, device, num_requests=num_requests, max_prompt_tokens=max_prompt_tokens)
        for model, device in ((folder, DeviceKind.CPU), (folder, DeviceKind.CUDA), (plain_dir, DeviceKind.CPU))
    )
    differences = prompt_differences(gpu, cpu)
    assert max(differences) < BF16_LOGPROB
    assert np.mean(differences) < BF16_LOGPROB / 5
    assert np.mean(differences) < np.mean(prompt_differences(unlike, cpu)), "the model that it was made of is nearer"

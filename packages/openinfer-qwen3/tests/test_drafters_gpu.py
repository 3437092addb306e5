"""Drafters that are models on a GPU: drafts change no token, and are what the CPU's are about as often right.

Skipped, with the reason, where there is no GPU.
"""

import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from dspark_bigrams import make_bigram_folder
from safetensors.numpy import save_file

from openinfer_core import EngineStats
from openinfer_core.control import Sleep, UpdateWeights, Wake
from openinfer_core.errors import Refused
from openinfer_engine import Checkpoint, EngineOptions, build_loop, resolve
from openinfer_engine.options import DeviceKind
from openinfer_engine.testing import random_requests, run_at_once
from openinfer_kernels.cpu import CpuOps
from openinfer_qwen3.family import Qwen3Definition

pytestmark = pytest.mark.gpu
FIXTURES = Path(__file__).parent / "fixtures_eagle3"
SIZES: dict[str, Any] = {"num_blocks": 64, "max_num_seqs": 6, "max_model_tokens": 160, "batch_invariant": True}


def served(device: DeviceKind, *, capture: bool = True, **options: Any) -> tuple[Any, Any]:
    """Answers, and the engine's counters."""
    given = EngineOptions(device=device, cuda_graph=capture, **SIZES, **options)
    try:
        made = build_loop(resolve(Qwen3Definition(), FIXTURES / "model", given))
    except Refused as reason:
        pytest.skip(str(reason))
    with closing(made) as loop:
        answers = run_at_once(loop, random_requests(24, vocab_size=128, max_prompt_tokens=60))
        return answers, loop.stats()


def check_drafter(speculative: str, *, capture: bool) -> None:
    """Answers are those without it, and as much of its drafts is accepted as on a CPU."""
    plain, _ = served(DeviceKind.CUDA, capture=capture)
    drafted, stats = served(DeviceKind.CUDA, capture=capture, speculative=speculative)
    _, right = served(DeviceKind.CPU, speculative=speculative)

    assert drafted == plain
    assert stats.drafter_faults == 0
    share, wanted = (
        each.spec_decode_num_accepted_tokens / each.spec_decode_num_draft_tokens for each in (stats, right)
    )
    assert wanted > 0.05
    assert abs(share - wanted) < 0.3 * wanted


@pytest.mark.parametrize("capture", [True, False])
def test_a_trained_drafter_is_right_as_often_as_on_a_cpu(capture: bool) -> None:
    check_drafter(f"eagle3,k=3,adaptive=false,model={FIXTURES / 'drafter'}", capture=capture)


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("name", ["eagle3", "ngram", "dspark"])
def test_a_drafter_that_slept_is_right_as_often_as_before(name: str, capture: bool, tmp_path: Path) -> None:
    """Sleeps that keep the weights and that read them again, and an update."""
    folders = {"eagle3": FIXTURES / "drafter", "dspark": tmp_path}
    if name == "dspark":
        make_bigram_folder(tmp_path)
    of_folder = f",model={folders[name]}" if name in folders else ""
    asked = random_requests(24, vocab_size=128, max_prompt_tokens=60)
    given = EngineOptions(
        device=DeviceKind.CUDA,
        cuda_graph=capture,
        speculative=f"{name},k=3,adaptive=false{of_folder}",
        enable_sleep=True,
        weights_root=str(FIXTURES),
        **SIZES,
    )
    try:
        made = build_loop(resolve(Qwen3Definition(), FIXTURES / "model", given))
    except Refused as reason:
        pytest.skip(str(reason))
    commands = (
        (Sleep(), Wake()),
        (Sleep(keeps_weights=False), Wake()),
        (UpdateWeights(path="model"),),
        (Sleep(), Wake()),
    )
    with closing(made) as loop:
        before = run_at_once(loop, asked)
        counted = counts = loop.stats()
        for several in commands:
            for command in several:
                loop.control(command)
            assert run_at_once(loop, asked) == before
            found = loop.stats()
            shares = [
                after.spec_decode_num_accepted_tokens / after.spec_decode_num_draft_tokens
                for after in (counts, _difference(found, counted))
            ]
            counted = found
            assert shares[0] > 0.05
            assert abs(shares[1] - shares[0]) < 0.1 * shares[0]
        assert loop.stats().drafter_faults == 0


@pytest.mark.parametrize("capture", [True, False])
def test_an_update_brings_a_drafter_weights_of_its_own(capture: bool, tmp_path: Path) -> None:
    for name in ("model", "drafter"):
        shutil.copytree(FIXTURES / name, tmp_path / name)
    rng = np.random.default_rng(0)
    worse = tmp_path / "worse"
    shutil.copytree(FIXTURES / "drafter", worse)
    mixed: dict[str, Any] = {}
    with Checkpoint.open(tmp_path / "drafter") as checkpoint:
        for name, info in checkpoint.tensors.items():
            stored = checkpoint.read(name)
            each = CpuOps().upload_weight(stored) if info.dtype == "BF16" else stored
            mixed[name] = rng.permutation(each) if each.ndim > 1 else each
    save_file(mixed, worse / "model.safetensors")
    asked = random_requests(24, vocab_size=128, max_prompt_tokens=60)
    given = EngineOptions(
        device=DeviceKind.CUDA,
        cuda_graph=capture,
        speculative=f"eagle3,k=3,adaptive=false,model={tmp_path / 'drafter'}",
        enable_sleep=True,
        weights_root=str(tmp_path),
        **SIZES,
    )
    try:
        made = build_loop(resolve(Qwen3Definition(), tmp_path / "model", given))
    except Refused as reason:
        pytest.skip(str(reason))
    update, to_worse = UpdateWeights(path="model"), UpdateWeights(path="model", drafter_path="worse")
    commands = [[update], [to_worse], [Sleep(), Wake()], [Sleep(keeps_weights=False), Wake()], [update]]
    commands.append([UpdateWeights(path="model", drafter_path="drafter")])
    shares: list[float] = []
    answers: list[Any] = []
    with closing(made) as loop:
        counts = loop.stats()
        for several in ([], *commands):
            for command in several:
                loop.control(command)
            answers.append(run_at_once(loop, asked))
            found = loop.stats()
            change = _difference(found, counts)
            shares.append(change.spec_decode_num_accepted_tokens / change.spec_decode_num_draft_tokens)
            counts = found
        assert all(each == answers[0] for each in answers)
        assert loop.stats().drafter_faults == 0
    good, updated, *of_worse, again = shares
    assert good > 0.05
    assert all(abs(each - good) < 0.1 * good for each in (updated, again))
    assert len(of_worse) == 4
    assert all(each < 0.25 * good for each in of_worse)


def _difference(after: EngineStats, before: EngineStats) -> EngineStats:
    """Of what drafts came to between the two."""
    return msgspec.structs.replace(
        after,
        spec_decode_num_accepted_tokens=after.spec_decode_num_accepted_tokens - before.spec_decode_num_accepted_tokens,
        spec_decode_num_draft_tokens=after.spec_decode_num_draft_tokens - before.spec_decode_num_draft_tokens,
    )


@pytest.mark.parametrize("capture", [True, False])
def test_blocks_whose_drafts_depend_on_each_other_are_right_as_often_as_on_a_cpu(capture: bool, tmp_path: Path) -> None:
    check_drafter(f"dspark,k=4,adaptive=false,model={make_bigram_folder(tmp_path)}", capture=capture)

"""New weights by CUDA IPC handles of another process, on a GPU. Skipped, with the reason, where there is no GPU."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from gpu_model import CONFIG
from safetensors.numpy import load_file, save_file

from openinfer_core import InvalidCheckpoint
from openinfer_core.control import IPC_HANDLE_BYTES, DeviceTensor, Sleep, UpdateWeights, Wake
from openinfer_core.engine import EngineState
from openinfer_core.errors import Refused
from openinfer_engine import EngineOptions, StepLoop, build_loop, resolve
from openinfer_engine.options import DeviceKind
from openinfer_engine.testing import random_requests, random_weights, run_at_once
from openinfer_qwen3.family import Qwen3Definition

pytestmark = pytest.mark.gpu
TRAINER = Path(__file__).parent / "gpu_trainer.py"
MakeLoop = Callable[..., StepLoop]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two models of one config, `old` and `new`."""
    weights = random_weights(Qwen3Definition(), CONFIG)
    rng = np.random.default_rng(1)
    other = {name: each * rng.uniform(0.7, 1.3, each.shape).astype(np.float32) for name, each in weights.items()}
    for name, tensors in (("old", weights), ("new", other)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(CONFIG))
        save_file(tensors, tmp_path / name / "model.safetensors")
    return tmp_path


@pytest.fixture
def make_loop(folder: Path) -> Iterator[MakeLoop]:
    with ExitStack() as closing_all:

        def make(model: str, **options: Any) -> StepLoop:
            fields: dict[str, Any] = {"num_blocks": 256, "max_num_seqs": 16, "device": DeviceKind.CUDA}
            fields |= {"enable_sleep": True, "batch_invariant": True} | options
            try:
                loop = build_loop(resolve(Qwen3Definition(), folder / model, EngineOptions(**fields)))
            except Refused as reason:
                pytest.skip(str(reason))
            closing_all.callback(loop.close)
            return loop

        yield make


@contextmanager
def trainer(weights: Path) -> Iterator[tuple[tuple[DeviceTensor, ...], subprocess.Popen[str]]]:
    """Another process that has a file's weights on the GPU, and what it says of them."""
    command = [sys.executable, str(TRAINER), str(weights)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            told = json.loads(process.stdout.readline())
            yield (
                tuple(
                    DeviceTensor(name, dtype, tuple(shape), bytes.fromhex(handle), offset)
                    for name, dtype, shape, handle, offset in told
                ),
                process,
            )
        finally:
            process.kill()


def said(loop: StepLoop) -> dict[int, Any]:
    answers = run_at_once(loop, random_requests(12, vocab_size=1024, max_prompt_tokens=89, logprobs=1))
    return {key: (each.token_ids, [one.logprob for one in each.logprobs]) for key, each in answers.items()}


def test_answers_after_an_update_by_handles_are_those_of_a_fresh_engine(make_loop: MakeLoop, folder: Path) -> None:
    fresh = said(make_loop("new"))
    loop = make_loop("old")
    before = said(loop)
    with trainer(folder / "new/model.safetensors") as (tensors, _):
        for _ in range(2):
            loop.control(UpdateWeights(tensors=tensors, content_hash="a" * 64))
            assert said(loop) == fresh != before
    assert loop.stats().weights_version == f"content {'a' * 64}"
    loop.control(Sleep())
    loop.control(Wake())
    assert said(loop) == fresh, "level 1 keeps them in host memory"
    loop.control(Sleep(keeps_weights=False))
    loop.control(Wake())
    assert loop.stats().state is EngineState.WITHOUT_WEIGHTS


def test_weights_come_from_gpu_to_gpu(make_loop: MakeLoop, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = make_loop("old")
    with trainer(folder / "new/model.safetensors") as (tensors, _), caplog.at_level("INFO"):
        loop.control(UpdateWeights(tensors=tensors))
    num_bytes = sum(each.nbytes for each in load_file(folder / "new/model.safetensors").values())
    assert f"{num_bytes / 1e9:.3f} GB copied from GPU to GPU, 0.000 GB by way of the host" in caplog.text


def test_two_ranks_get_their_pieces(make_loop: MakeLoop, folder: Path) -> None:
    pytest.importorskip("cupy", reason="ranks on GPUs need CuPy")
    from openinfer_kernels import DeviceUnavailableError
    from openinfer_kernels.cuda.common.device import gpu_count

    try:
        count = gpu_count()
    except DeviceUnavailableError as reason:
        pytest.skip(str(reason))
    if count < 2:
        pytest.skip(f"two GPUs are needed, and there is {count}")
    fresh = said(make_loop("new", tensor_parallel_size=2))
    loop = make_loop("old", tensor_parallel_size=2)
    with trainer(folder / "new/model.safetensors") as (tensors, _):
        loop.control(UpdateWeights(tensors=tensors))
    assert said(loop) == fresh


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16], ids=lambda dtype: str(np.dtype(dtype)))
def test_pieces_of_memory_of_another_process_are_those_of_the_host(tmp_path: Path, dtype: Any) -> None:
    cupy = pytest.importorskip("cupy", reason="this needs CuPy and a GPU")
    from openinfer_kernels import DeviceUnavailableError, ForeignWeight
    from openinfer_kernels.cuda.common.device import Device
    from openinfer_kernels.cuda.common.ipc import IpcMemory
    from openinfer_kernels.cuda.ops import CudaOps

    try:
        device = Device.open()
    except DeviceUnavailableError as reason:
        pytest.skip(str(reason))
    ops = CudaOps(device)
    values = np.random.default_rng(0).uniform(-2, 2, (2, 300, 514)).astype(np.float32)
    stored = (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == np.uint16 else values.astype(dtype)
    save_file({"padding": np.zeros(3, dtype), "x": stored}, tmp_path / "x.safetensors")
    with trainer(tmp_path / "x.safetensors") as (tensors, _):
        (told,) = (each for each in tensors if each.name == "x")
        memory = IpcMemory(device, told.handle)
        whole = ForeignWeight.whole(memory, told.offset_bytes, np.dtype(dtype), stored.shape)
        flat, rows = whole.flattened(), stored.reshape(600, 514)
        for part, expected in (
            ((whole,), stored),
            ((flat,), rows),
            ((flat.rows(7, 300),), rows[7:300]),
            ((flat.columns(3, 260),), rows[:, 3:260]),
            ((flat.rows(1, 5).columns(500, 514), flat.rows(0, 1).columns(0, 14)), [*rows[1:5, 500:], rows[0, :14]]),
        ):
            for context in (nullcontext, ops.loading):
                with context():
                    got = ops.upload_weight(*part)
                np.testing.assert_array_equal(ops.download(got), ops.download(ops.upload_weight(np.array(expected))))
            np.testing.assert_array_equal(
                ops.download(ops.upload_float32(*part)), ops.download(ops.upload_float32(np.array(expected)))
            )
        assert memory.device_bytes > memory.host_bytes > 0
        for wrong in (flat.rows(10**8, 10**8 + 1), flat.rows(-(10**8), 1 - 10**8)):
            with pytest.raises(ValueError, match="none of an open allocation"):
                ops.upload_weight(wrong)
        memory.close()
        with pytest.raises(ValueError, match="none of an open allocation"):
            whole.on_host()
    cupy.cuda.get_current_stream().synchronize()


def test_what_does_not_fit_changes_nothing(make_loop: MakeLoop, folder: Path) -> None:
    loop = make_loop("old")
    before = said(loop)
    with trainer(folder / "new/model.safetensors") as (tensors, process):
        first, last = tensors[0], tensors[-1]
        for wrong in (
            tensors[:-1],
            (*tensors[:-1], msgspec.structs.replace(last, shape=(*last.shape, 2))),
            (*tensors[:-1], msgspec.structs.replace(last, offset_bytes=2**40)),
            (*tensors[:-1], msgspec.structs.replace(last, handle=b"x" * IPC_HANDLE_BYTES)),
            (*tensors, msgspec.structs.replace(first, name="more")),
        ):
            with pytest.raises((InvalidCheckpoint, Refused)):
                loop.control(UpdateWeights(tensors=wrong))
        assert said(loop) == before
        process.kill()
        process.wait()
        with pytest.raises(Refused, match="cannot be opened"):
            loop.control(UpdateWeights(tensors=tensors))
    assert said(loop) == before


def test_update_by_handles_needs_memory_that_can_change(make_loop: MakeLoop) -> None:
    loop = make_loop("old", enable_sleep=False)
    with pytest.raises(Refused, match="cannot do update_weights"):
        loop.control(UpdateWeights(tensors=(DeviceTensor("x", "F32", (1,), b"x" * IPC_HANDLE_BYTES),)))

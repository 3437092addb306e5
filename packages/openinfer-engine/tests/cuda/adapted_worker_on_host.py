"""Adapters in an engine whose `CudaWorker` runs in host memory: the script that `test_adapted_worker.py` runs."""

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import emulated_cuda
import numpy as np
from drafted_worker_on_host import CONFIGS, PLUGINS, VOCAB, PaddedModel

from openinfer_core import GenerateRequest, RequestId, SamplingParams, find_plugin
from openinfer_core.control import FlushCache, LoadAdapter, UnloadAdapter
from openinfer_engine.cpu.backend import CpuBackend
from openinfer_engine.cpu.worker import make_states
from openinfer_engine.cuda.worker import CudaWorker
from openinfer_engine.engine_plan import resolve
from openinfer_engine.launch import build_loop
from openinfer_engine.loop import StepLoop
from openinfer_engine.model import KvLayers, Model
from openinfer_engine.options import EngineOptions, LoadFormat
from openinfer_engine.testing.adapters import write_adapter
from openinfer_engine.testing.answers import Answer, run_alone, run_at_once
from openinfer_engine.worker.paged_tensors import make_pool
from openinfer_kernels import Array, AttentionBatch, Ops
from openinfer_kernels.cpu import BatchInvariantCpuOps
from openinfer_kernels.cuda.common import graphs

RANKS = {"a": 4, "b": 8, "c": 11}
ADAPTED_TOKENS = (640, 768)
"""Of mixed batches that are captured with adapters alone."""
LEAST_EFFECT = 0.01
"""Mean difference of log-probabilities below which an adapter might be ignored unseen."""


class WatchedModel(PaddedModel):
    """Counts forward passes with and without adapters, and their tokens; a graph's replay is one, too."""

    def __init__(self, model: Model, passes: list[bool], num_tokens: list[int]) -> None:
        super().__init__(model, num_token_ids=VOCAB)
        self._passes, self._num_tokens = passes, num_tokens

    def forward(self, token_ids: Array, *, batch: AttentionBatch, kv_cache: KvLayers) -> Array:
        self._passes.append(batch.adapter_slots is not None)
        self._num_tokens.append(len(token_ids))
        return super().forward(token_ids, batch=batch, kv_cache=kv_cache)


class SleepingMemory:
    """In the place of `MappedMemory`: what a sleep leaves of KV and adapter slots."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._arrays = arrays

    def scratch_pool(self) -> None:
        return None

    def give_back(self) -> None:
        for array in self._arrays:
            array.fill(np.nan)

    def take_back(self) -> None:
        for array in self._arrays:
            array.fill(0)

    def close(self) -> None:
        pass


class EmulatedBackend(CpuBackend):
    """A CPU's, but for the worker."""

    def __init__(self, options: EngineOptions, kernels: emulated_cuda.Kernels, *, capture: bool, sleeps: bool) -> None:
        super().__init__(options)
        self._sleeps = sleeps
        self.passes: list[bool] = []
        self.num_tokens: list[int] = []
        self.worker: Any = None
        self._kernels, self._capture = kernels, capture

    def make_ops(self) -> Ops:
        return emulated_cuda.emulated_ops(BatchInvariantCpuOps(), self._kernels)

    def make_worker(self, model: Model, **given: Any) -> Any:
        ops, layout, limits = given["ops"], given["layout"], given["limits"]
        pool = make_pool(layout, num_blocks=given["num_blocks"], ops=ops)
        memory: Any = SleepingMemory([pool.blocks, *given["adapters"].slot_arrays])
        self.worker = worker = CudaWorker(
            WatchedModel(model, self.passes, self.num_tokens),
            kv_pool=pool,
            ops=ops,
            communicator=given["communicator"],
            limits=limits,
            states=make_states(layout, limits, ops=ops),
            drafter=given["drafter"],
            adapters=given["adapters"],
            adapted_tokens=ADAPTED_TOKENS,
            sleeping_memory=memory if self._sleeps else None,
        )
        if self._capture:
            worker.warm_up(capture=True, mark=lambda _: None)
        self.passes.clear()
        self.num_tokens.clear()
        return worker


class Bench:
    """A family's tiny model and adapters in a folder."""

    def __init__(self, family: str, folder: Path, kernels: emulated_cuda.Kernels) -> None:
        self.definition: Any = find_plugin("openinfer.models", PLUGINS[family]).load()().definition
        self.folder, self._kernels = folder, kernels
        (folder / "model").mkdir()
        (folder / "model/config.json").write_text(json.dumps(CONFIGS[family]))
        for name, rank in RANKS.items():
            write_adapter(folder / name, self.definition, CONFIGS[family], rank=rank, seed=rank)

    @contextlib.contextmanager
    def serving(
        self, *, capture: bool | None, sleeps: bool = False, **options: Any
    ) -> Iterator[tuple[StepLoop, EmulatedBackend]]:
        """An engine, and the backend of its worker; `capture` None: a CPU's."""
        given = {"max_num_seqs": 5, "max_model_tokens": 112, "num_blocks": 64, "block_size_tokens": 4, **options}
        lora = [f"{name}={self.folder / name}" for name in RANKS]
        chosen = EngineOptions(
            load_format=LoadFormat.DUMMY,
            batch_invariant=True,
            max_lora_rank=16,
            max_loras=2,
            lora=lora,
            lora_root=str(self.folder),
            **given,
        )
        emulated = EmulatedBackend(chosen, self._kernels, capture=bool(capture), sleeps=sleeps)
        backend = CpuBackend(chosen) if capture is None else emulated
        loop = build_loop(resolve(self.definition, self.folder / "model", chosen, backend=backend))
        try:
            yield loop, emulated
        finally:
            loop.close()


def requests_for(
    names: Sequence[str | None], *, first: int = 0, prompt_tokens: int | None = None
) -> list[GenerateRequest]:
    rng = np.random.default_rng(first)
    return [
        GenerateRequest(
            request_id=RequestId(first + i),
            prompt_token_ids=tuple(rng.integers(0, VOCAB, prompt_tokens or 3 + 9 * (i % 3)).tolist()),
            lora=name,
            sampling=SamplingParams(max_tokens=7, temperature=0.0, logprobs=1, prompt_logprobs=0 if i % 2 else None),
        )
        for i, name in enumerate(names)
    ]


def told(answers: Mapping[int, Answer]) -> dict[int, Any]:
    return {number: (each.token_ids, each.logprobs, each.prompt_logprobs) for number, each in answers.items()}


def effect(answers: Mapping[int, Answer], others: Mapping[int, Answer]) -> float:
    pairs = [
        (one.logprob, other.logprob)
        for number, answer in answers.items()
        for one, other in zip(answer.prompt_logprobs, others[number].prompt_logprobs, strict=True)
    ]
    return float(np.abs(np.diff(pairs, axis=1)).mean())


def check_answers(bench: Bench, *, capture: bool, **options: Any) -> None:
    """Three adapters and none in one batch of two slots, as on a CPU, each as it is alone."""
    requests = requests_for(["a", None, "b", "c", None, "a", "c", "b"])
    with bench.serving(capture=None, **options) as (loop, _):
        expected = told(run_at_once(loop, requests))
    with bench.serving(capture=capture, **options) as (loop, backend):
        passes = backend.passes
        found = run_at_once(loop, requests)
        assert told(found) == expected
        assert any(passes)
        assert told(run_alone(loop, requests_for(["b"], first=50))) == told(
            run_at_once(loop, requests_for(["b"], first=50))
        )
        passes.clear()
        plain = run_at_once(loop, requests_for([None] * 4, first=100))
        assert passes, "no pass was counted"
        assert not any(passes), "a batch without adapters ran with them"
        adapted = run_at_once(loop, requests_for(["c"] * 4, first=100))
        assert all(passes[-3:])
        assert effect(adapted, plain) > LEAST_EFFECT


def check_loads(bench: Bench) -> None:
    """What was loaded while the engine runs, and other content under a name that was used before."""
    with bench.serving(capture=True) as (loop, _):
        requests = requests_for(["late"] * 3)
        for content in ("b", "c"):
            answers: list[str | None] = []
            assert loop.begin_control(LoadAdapter("late", content), answers.append)
            while not answers:
                loop.step()
            assert answers == [None]
            found = run_at_once(loop, requests)
            loop.control(UnloadAdapter("late"))
            with bench.serving(capture=None) as (other, _):
                assert told(run_at_once(other, requests_for([content] * 3))) == told(found)


def check_large_steps(bench: Bench) -> None:
    """Steps of more tokens than others are captured for are replayed, padded, if a row has an adapter."""
    sizes = {"max_num_seqs": 7, "num_blocks": 256}
    for names, most in (("abaaa", 640), ("abababa", 768), ([None] * 7, 7 * 105)):
        requests = requests_for(list(names), prompt_tokens=105)
        with bench.serving(capture=None, **sizes) as (loop, _):
            expected = told(run_at_once(loop, requests))
        with bench.serving(capture=True, **sizes) as (loop, backend):
            assert told(run_at_once(loop, requests)) == expected
            assert max(backend.num_tokens) == most


def check_sleep(bench: Bench) -> None:
    """Slots whose memory was away, of an adapter that host memory has no more, too."""
    requests = requests_for(["a", "b", None])
    with bench.serving(capture=None) as (loop, _):
        expected = told(run_at_once(loop, requests))
    with bench.serving(capture=True, sleeps=True) as (loop, backend):
        assert told(run_at_once(loop, requests)) == expected
        events = [event for request in requests for event in loop.submit(request)]
        for _ in range(3):
            events += loop.step()
        events += loop.control(UnloadAdapter("a"))
        events += loop.control(FlushCache())  # takes the step in flight, and nothing is found of what is lost
        assert loop.park(), "requests have no KV that the sleep could lose"
        for _ in range(2):  # twice gives back nothing more
            backend.worker.give_back()
        backend.worker.take_back()
        loop.renew_cache("")
        while loop.busy:
            events += loop.step()
        found: dict[int, Answer] = {}
        for event in events:
            found.setdefault(event.request_id, Answer()).take(event)
        assert told(found) == expected


def main(family: str) -> None:
    graphs.Stream.capture = emulated_cuda.capture
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bench = Bench(family, folder, emulated_cuda.Kernels(folder))
        check_answers(bench, capture=True)
        check_answers(bench, capture=False, max_step_tokens=11)
        if family == "qwen3":
            check_loads(bench)
            check_large_steps(bench)
            check_sleep(bench)
    sys.stdout.write("equal\n")


if __name__ == "__main__":
    main(sys.argv[1])

"""`CudaWorker` with drafters that are models, in host memory: the script that `test_model_drafters.py` runs for one.

What the drafter drafts of each length of each request is held against what the worker of the CPU has it draft; then the
drafts are replaced by scripted ones, so that rows have any number of accepted drafts.
"""

import contextlib
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import drafted_worker_on_host as on_host
import emulated_cuda
import msgspec
import numpy as np

from openinfer_core import find_plugin
from openinfer_core.scheduling import SlotStart, StateCopy, StepPlan, StepResult
from openinfer_engine import EngineOptions, SoloCommunicator
from openinfer_engine.cpu.worker import CpuWorker, make_states
from openinfer_engine.cuda import late_steps
from openinfer_engine.cuda.step_buckets import ROW_BUCKETS, bucket_of
from openinfer_engine.cuda.worker import CudaWorker
from openinfer_engine.drafters.contract import LATE_STEPS
from openinfer_engine.drafters.draft_model import DraftModel
from openinfer_engine.drafters.requirements import AskedDrafter, ask_drafter
from openinfer_engine.drafting import DrafterContext, DrafterFaults, SharedDrafter
from openinfer_engine.options import LoadFormat
from openinfer_engine.testing.drafters import DraftKind, ScriptedDrafter
from openinfer_engine.testing.drafts import drafted_requests
from openinfer_engine.weights.dummy import DummyWeights
from openinfer_engine.worker.paged_tensors import make_pool
from openinfer_engine.worker.runner import PendingStep, ThreadRunner
from openinfer_engine.worker.state_slots import padded_slot_bytes
from openinfer_kernels import Array
from openinfer_kernels.cpu import BatchInvariantCpuOps
from openinfer_kernels.cuda.common import graphs
from openinfer_kernels.cuda.sampling.late_rows import LateRows
from openinfer_kv_cache import KvDtype, KvLayout

MAX_DRAFTS = 3
FAMILIES = {
    "eagle3": "qwen3",
    "dflash": "qwen3",
    "dspark": "qwen3",
    "mtp": "qwen3_5",
    "draft-model": "qwen3",
    "deepseek-mtp": "deepseek_v3",
    "deepseek-v4-mtp": "deepseek_v4",
}
_LAYER = {
    name: on_host.CONFIGS["qwen3"][name] for name in ("hidden_size", "intermediate_size", "vocab_size", "head_dim")
}
FOLDERS: dict[str, dict[str, Any]] = {
    "eagle3": {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": 60,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    },
    "dflash": {
        "architectures": ["DFlashDraftModel"],
        "block_size": 8,
        "num_hidden_layers": 2,
        "dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": 90},
    },
    "dspark": {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "block_size": 8,
        "num_hidden_layers": 2,
        "target_layer_ids": [0, 1],
        "mask_token_id": 90,
        "markov_rank": 16,
    },
    "draft-model": {"hidden_size": 48, "num_attention_heads": 2},
}


@dataclass
class Record:
    """(request, known tokens) -> what the drafter drafted; and the tokens of a row in steps that it was shown late."""

    drafts: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    late: list[int] = field(default_factory=list)
    num_settled: int = 0
    num_copies: int = 0


class NotedRows(LateRows):
    """Notes what is put there, by rows, and that something was taken: the drafter is shown that next."""

    hidden: ClassVar[dict[int, Array]] = {}
    is_taken: ClassVar[bool] = False

    def put(self, inputs: Any, parts: Sequence[Array]) -> None:
        if parts:
            NotedRows.hidden[inputs.rows.shape[1]] = parts[0]
        super().put(inputs, parts)

    def take(self, inputs: Any) -> Any:
        NotedRows.is_taken = True
        return super().take(inputs)


@dataclass
class CopyingRunner:
    """Asks for a copy of a row's states after every third step of a token a row; it has the step's hidden state."""

    runner: ThreadRunner
    states: Any
    record: Record
    count: int = 0

    def launch(self, plan: StepPlan) -> PendingStep:
        is_quiet = plan.num_rows and plan.num_tokens == plan.num_rows and not len(plan.token_ids)
        is_quiet = is_quiet and not plan.wants_drafts.any()
        self.count += bool(is_quiet)
        if not is_quiet or self.count % 3:
            return self.runner.launch(plan)
        copy = StateCopy(source=int(plan.slots[-1]), target=on_host.NUM_SLOTS)
        result = self.runner.launch(replace(plan, state_snapshots=(copy,))).result()
        bucket = bucket_of(ROW_BUCKETS, plan.num_rows)
        expected = np.asarray(NotedRows.hidden[bucket or 0])[plan.num_rows - 1]
        found = np.asarray(self.states.tensors["mtp_hidden.hidden"])[on_host.NUM_SLOTS, 0]
        assert np.array_equal(found, expected), "a copy of states has not the last hidden state"
        self.record.num_copies += 1
        return Done(result)

    def close(self) -> None:
        self.runner.close()


@dataclass
class SleepingMemory:
    """In the place of `MappedMemory`: KV and recurrent states hold nothing of use after a sleep."""

    arrays: Sequence[Array] = ()

    def of_kv(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def scratch_pool(self) -> None:
        return None

    def drop_weights(self) -> None:
        pass

    def check_weights(self) -> None:
        pass

    def give_back(self) -> None:
        for array in self.arrays:
            array.fill(np.nan)

    def take_back(self) -> None:
        for array in self.arrays:
            array.fill(0)

    def close(self) -> None:
        pass


@dataclass
class Awake:
    """A runner that outlasts its steps."""

    worker: CudaWorker

    def launch(self, plan: StepPlan) -> PendingStep:
        return self.worker.launch(plan)

    def close(self) -> None:
        pass


@dataclass
class Done:
    """A step that was waited for."""

    found: StepResult

    def result(self) -> StepResult:
        return self.found


class Recorded(ScriptedDrafter):
    """Hands out scripted drafts, and notes those of a drafter."""

    def __init__(
        self, inner: Any, record: Record, outputs: Mapping[int, Sequence[int]], context: DrafterContext
    ) -> None:
        super().__init__(DraftKind.RANDOM, outputs, context)
        self._inner, self._record = inner, record

    def attach(self, memory: Any) -> None:
        self._inner.attach(memory)

    def observe(self, step: Any) -> None:
        if NotedRows.is_taken:
            NotedRows.is_taken = False
            self._record.late.append(step.batch.max_query_tokens)
        self._inner.observe(step)

    def settle(self, *given: Any) -> None:
        self._record.num_settled += 1
        self._inner.settle(*given)

    def start(self, starts: Sequence[SlotStart]) -> None:
        super().start(starts)
        self._inner.start(starts)

    def draft(self, slots: Array, last_ids: Array, hidden: Array, lengths: Array) -> Array:
        found = np.asarray(self._inner.draft(slots, last_ids, hidden, lengths))
        if not self._requests:  # the worker is about to capture
            return np.asarray(found).view(type(slots))
        for slot, length, drafts in zip(slots.tolist(), lengths.tolist(), found.tolist(), strict=True):
            self._record.drafts[int(self._requests[slot].request_id), length] = drafts
        return super().draft(slots, last_ids, hidden, lengths)


class TappedModel(on_host.PaddedModel):
    """Padded rows for taps of `tap_size` numbers, too."""

    def __init__(self, model: Any, *, tap_size: int) -> None:
        super().__init__(model)
        self._tap_size = tap_size

    def forward_tapped(self, token_ids: Array, *, batch: Any, kv_cache: Any, taps: Sequence[int]) -> Any:
        found: list[Any] = []
        count = 0

        class Inner:
            def forward(_, ids: Array, **given: Any) -> Array:  # noqa: N805 - of a model inside a model
                nonlocal count
                count = len(ids)
                hidden, tapped = self._model.forward_tapped(ids, taps=taps, **given)
                found.extend(tapped)
                return hidden

        outer = on_host.PaddedModel(Inner())
        hidden = outer.forward(token_ids, batch=batch, kv_cache=kv_cache)
        padding = np.nan if found else 0.0  # all of a step may be padding
        padded = [np.full((len(hidden), self._tap_size), padding, np.float32) for _ in taps]
        for whole, part in zip(padded, found, strict=False):
            whole[:count] = part
        return hidden, tuple(map(emulated_cuda.array, padded))


class LastTokenTappedModel(TappedModel):
    """One with last-token selection."""

    def forward_tapped_last_tokens(self, token_ids: Array, **given: Any) -> Any:
        """No captured step asks for it, so that there are no padded rows."""
        on_host.LastTokenPaddedModel.num_selected += 1
        hidden, tapped = self._model.forward_tapped_last_tokens(token_ids, **given)
        return emulated_cuda.array(hidden), tuple(map(emulated_cuda.array, tapped))


class PaddedDefinition:
    """Loads a draft model that is told of rows that are none: captured steps have them."""

    def __init__(self, found: DraftModel) -> None:
        self._found = found

    def load(self, config: Any, weights: Any, **given: Any) -> Any:
        model = self._found.definition.load(config, weights, **given)
        sizes = {"num_token_ids": config.vocab_size, "hidden_size": config.hidden_size}
        return on_host.PaddedModel(model, **sizes)


class DrafterBench(on_host.Bench):
    """One drafter, on one rank."""

    def __init__(self, name: str, kernels: emulated_cuda.Kernels, folder: Path) -> None:
        super().__init__(FAMILIES[name], 1, kernels)
        self.name, self.folder = name, folder
        if name in FOLDERS:
            common = on_host.CONFIGS["qwen3"]
            (folder / "config.json").write_text(json.dumps({**common, "num_hidden_layers": 1, **FOLDERS[name]}))

    def asked(self) -> AskedDrafter:
        asked = ask_drafter(
            find_plugin("openinfer.drafters", self.name).load(),
            name=self.name,
            drafter_dir=self.folder if self.name in FOLDERS else None,
            definition=self.definition,
            model_config=self.config,
            model_dir=self.folder,
            options=EngineOptions(load_format=LoadFormat.DUMMY, block_size_tokens=on_host.BLOCK),
            max_drafts=MAX_DRAFTS,
            kv_dtype=KvDtype.FLOAT32,
            state_dtype=KvDtype.FLOAT32,
        )
        assert asked is not None
        return asked

    def worker(
        self,
        *,
        cuda: bool,
        capture: bool,
        outputs: Mapping[int, Sequence[int]],
        record: Record,
        memory: SleepingMemory | None = None,
    ) -> ThreadRunner | CopyingRunner | Awake:
        asked, solo = self.asked(), SoloCommunicator()
        needed = asked.requirements(1)
        if cuda and self.name == "draft-model":
            needed = replace(needed, made_from=replace(needed.made_from, definition=PaddedDefinition(needed.made_from)))
        model, _, limits = self.model(solo)
        spec = self.definition.kv_spec(
            self.config,
            model_tag="test",
            kv_dtype=KvDtype.FLOAT32,
            state_dtype=KvDtype.FLOAT32,
            num_ranks=1,
            rank_index=0,
        )
        spec = replace_groups(spec, needed)
        layout = KvLayout.from_spec(spec, block_size_tokens=on_host.BLOCK)
        if layout.slot_bytes:
            limits = replace(limits, slot_bytes=padded_slot_bytes(layout, in_blocks=False), num_snapshots=1)
        ops = emulated_cuda.emulated_ops(BatchInvariantCpuOps(), self.kernels) if cuda else BatchInvariantCpuOps()
        context = DrafterContext(
            model_dir=self.folder,
            config={},
            model=model,
            ops=ops,
            communicator=solo,
            max_num_seqs=on_host.NUM_SLOTS,
            max_model_tokens=on_host.MAX_MODEL_TOKENS,
            num_token_ids=on_host.NUM_TOKEN_IDS,
            max_drafts=MAX_DRAFTS,
            model_config=self.config,
            drafter_dir=asked.drafter_dir,
            requirements=needed,
            weights=DummyWeights(needed.tensors, rank=0, size=1),
        )
        inner = asked.factory(context)
        shared = SharedDrafter(
            Recorded(inner, record, outputs, replace(context, max_drafts=inner.max_drafts)),
            name=self.name,
            communicator=solo,
            num_token_ids=on_host.NUM_TOKEN_IDS,
            faults=(faults := DrafterFaults()),
            requirements=needed,
        )
        self.faults = faults
        pool = make_pool(layout, num_blocks=on_host.NUM_BLOCKS + asked.span_blocks(1), ops=ops)
        given: dict[str, Any] = {
            "kv_pool": pool,
            "ops": ops,
            "communicator": solo,
            "limits": limits,
            "states": make_states(layout, limits, ops=ops),
            "drafter": shared,
            "first_span_block": on_host.NUM_BLOCKS,
        }
        if capture and memory is None:
            given["shows_late"] = True
        if not cuda:
            return ThreadRunner([CpuWorker(model, **given)])
        tap_size = self.config.hidden_size * getattr(self.config, "hc_mult", 1)
        tapped = LastTokenTappedModel if hasattr(model, "forward_tapped_last_tokens") else TappedModel
        self.served = tapped(model, tap_size=tap_size) if needed.taps else on_host.padded(model)
        if memory is not None:
            states = given["states"]
            memory.arrays = [pool.blocks, *([] if states is None else states.tensors.values())]
            given["sleeping_memory"] = memory
        worker = CudaWorker(self.served, **given)
        if memory is not None:
            worker.warm_up(capture=capture, mark=lambda _: None)
            return Awake(worker)
        runner = ThreadRunner([worker])
        if not capture:
            return runner
        worker.warm_up(capture=True, mark=lambda _: None)
        return CopyingRunner(runner, given["states"], record) if self.name == "mtp" else runner


def replace_groups(spec: Any, needed: Any) -> Any:
    return msgspec.structs.replace(spec, paged=(*spec.paged, *needed.paged), slots=(*spec.slots, *needed.slots))


def check(bench: DrafterBench) -> None:
    requests = drafted_requests(on_host.NUM_TOKEN_IDS, count=10)
    records = served(bench, requests, ((False, False), (True, False), (True, True)))
    records += served(bench, requests, ((True, False), (True, True)), are_measured=True)
    right = records[0].drafts
    assert len(right) > 50, len(right)
    assert len({tuple(each) for each in right.values()}) > 10, "the drafter drafts the same whatever it is told"
    for record in records[1:]:
        # A GPU's worker does not ask where no step takes the drafts. Where it replays states it takes none after a
        # chunk of a prompt, and so asks after tokens that a CPU had accepted at once.
        assert bench.name == "mtp" or record.drafts.keys() <= right.keys()
        compare(record, right, at_least=len(right) // 2)


def check_quiet(bench: DrafterBench) -> None:
    """With more steps in a row without drafts than are shown at once."""
    requests = [
        msgspec.structs.replace(each, sampling=msgspec.structs.replace(each.sampling, max_tokens=52))
        for each in drafted_requests(on_host.NUM_TOKEN_IDS, count=10)
    ]
    of_cpu, of_gpu = served(bench, requests, ((False, False), (True, True)), quiet_share=0.3)
    late = of_gpu.late
    assert not of_cpu.late
    # Where a copy of states has the drafter's, steps are shown before it.
    most = 3 if bench.name == "mtp" else LATE_STEPS
    assert max(late) == most, late
    assert min(late) < most, late
    assert (of_gpu.num_copies > 20) == (bench.name == "mtp")
    assert of_gpu.num_settled > 0, of_gpu.num_settled
    compare(of_gpu, of_cpu.drafts, at_least=30)


def check_replayed(bench: DrafterBench) -> None:
    """Requests that ask for tokens alone, whose steps with drafts are replayed."""
    requests = [
        msgspec.structs.replace(
            each, sampling=msgspec.structs.replace(each.sampling, logprobs=None, prompt_logprobs=None)
        )
        for each in drafted_requests(on_host.NUM_TOKEN_IDS, count=6)
    ]
    emulated_cuda.Replay.launched.clear()
    of_cpu, of_gpu = served(bench, requests, ((False, False), (True, True)))
    assert emulated_cuda.Replay.launched["MixedForward.leave_hidden_by_token"], emulated_cuda.Replay.launched
    compare(of_gpu, of_cpu.drafts, at_least=30)


def check_sleep(bench: DrafterBench) -> None:
    """A drafter that stays drafts the same after sleeps that keep the model, and after those that read it again."""
    requests = drafted_requests(on_host.NUM_TOKEN_IDS, count=6)
    plain, _ = on_host.serve(bench.cpu(), requests, seed=1)
    outputs = {request_id: answer.token_ids for request_id, answer in plain.items()}
    drafts = on_host.Drafts(DraftKind.RANDOM, MAX_DRAFTS, outputs)
    (right,) = served(bench, requests, ((False, False),))
    memory, record = SleepingMemory(), Record()
    runner = bench.worker(cuda=True, capture=True, outputs=outputs, record=record, memory=memory)
    assert isinstance(runner, Awake)
    for is_dropped in (False, True, False):
        record.drafts.clear()
        found, steps = on_host.serve(runner, requests, seed=5, drafts=drafts)
        assert (found, bench.faults.count) == (plain, 0)
        assert steps.num_accepted > 20, steps.num_accepted
        compare(record, right.drafts, at_least=30)
        if is_dropped:
            runner.worker.drop_model()
        runner.worker.give_back()
        runner.worker.take_back()
        if is_dropped:
            runner.worker.put_model(bench.served, None)


def served(
    bench: DrafterBench,
    requests: list[Any],
    ways: Sequence[tuple[bool, bool]],
    *,
    quiet_share: float = 0.0,
    are_measured: bool = False,
) -> list[Record]:
    """What is drafted by each way, on CUDA or not and captured or not; all answer as without drafts."""
    plain, _ = on_host.serve(bench.cpu(), requests, seed=1)
    outputs = {request_id: answer.token_ids for request_id, answer in plain.items()}
    drafts = on_host.Drafts(DraftKind.RANDOM, MAX_DRAFTS, outputs)
    records: list[Record] = []
    for cuda, capture in ways:
        records.append(record := Record())
        runner = bench.worker(cuda=cuda, capture=capture, outputs=outputs, record=record)
        if are_measured:  # of which the drafter keeps nothing
            on_host.measure(runner)
            assert record.drafts
            record.drafts.clear()
            record.late.clear()
        found, steps = on_host.serve(runner, requests, seed=5, drafts=drafts, quiet_share=quiet_share)
        assert bench.faults.count == 0
        assert steps.num_accepted > 20, steps.num_accepted
        assert steps.num_preemptions > 0
        for request_id, answer in plain.items():
            assert found[request_id] == answer, f"request {request_id}, {cuda}, {capture}"
    return records


def compare(record: Record, right: Mapping[tuple[int, int], list[int]], *, at_least: int) -> None:
    common = record.drafts.keys() & right.keys()
    assert len(common) > at_least, (len(common), len(right))
    differing = [key for key in common if record.drafts[key] != right[key]]
    assert not differing, f"{len(differing)} of {len(common)}: {differing[:5]}"


if __name__ == "__main__":
    graphs.Stream.capture = emulated_cuda.capture
    late_steps.LateRows = NotedRows  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as made:
        made_bench = DrafterBench(sys.argv[1], emulated_cuda.Kernels(Path(made)), Path(made))
        check(made_bench)
        # Which are shown hidden states, or streams of every token.
        selects = made_bench.name not in ("mtp", "deepseek-mtp", "deepseek-v4-mtp")
        assert selects == (on_host.LastTokenPaddedModel.num_selected > 0), on_host.LastTokenPaddedModel.num_selected
        if made_bench.name != "deepseek-v4-mtp":  # the host waits for its steps with drafts, and shows none late
            check_quiet(made_bench)
            check_replayed(made_bench)
        check_sleep(made_bench)
    sys.stdout.write("equal\n")

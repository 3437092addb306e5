"""`CudaWorker` with drafts in host memory: the script that `test_drafted_worker.py` runs, for one family and ranks."""

import contextlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, cast

import emulated_cuda
import numpy as np
import pytest

emulated_cuda.install()

# ruff: noqa: E402 - CuPy's stand-in first
from openinfer_core import GenerateRequest, RequestId, SamplingParams, TokenLogprobs, find_plugin
from openinfer_core.errors import ContractViolation
from openinfer_core.grammars import MaskWords, mask_words
from openinfer_core.scheduling import SchedulerConfig, SlotStart, StepPlan, StepResult
from openinfer_engine import LocalGroup, SoloCommunicator
from openinfer_engine.cpu.worker import CpuWorker, WorkerLimits, make_states
from openinfer_engine.cuda.worker import CudaWorker
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.drafting import DrafterContext, DrafterFaults, SharedDrafter
from openinfer_engine.model import KvLayers, LastTokenModel, LogitsIndices, Model, ReplayedModel
from openinfer_engine.speculation.step_times import measure_step_times
from openinfer_engine.testing.drafted_steps import DraftedAnswer, DraftedSizes, DraftedSteps
from openinfer_engine.testing.drafters import DraftKind, ScriptedDrafter
from openinfer_engine.testing.drafts import drafted_requests, every_third_token_masked
from openinfer_engine.weights.dummy import DummyWeights
from openinfer_engine.worker.paged_tensors import make_pool
from openinfer_engine.worker.runner import ThreadRunner
from openinfer_engine.worker.state_slots import padded_slot_bytes
from openinfer_kernels import Array, AttentionBatch, KeptInputs
from openinfer_kernels.cpu import BatchInvariantCpuOps
from openinfer_kernels.cuda.common import graphs
from openinfer_kv_cache import KvDtype, KvLayout

VOCAB, NUM_TOKEN_IDS, BLOCK, NUM_SLOTS, NUM_BLOCKS, MAX_MODEL_TOKENS = 96, 93, 4, 5, 200, 112
_QWEN = {
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "vocab_size": VOCAB,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": _QWEN
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "hidden_act": "silu",
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "rope_theta": 1e6,
    },
    "qwen3_5": _QWEN
    | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 8,
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    },
    "deepseek_v3": _QWEN
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "kv_lora_rank": 12,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 32,
        "n_group": 2,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 1,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "rope_theta": 1e4,
        "routed_scaling_factor": 2.5,
        "topk_group": 1,
        "v_head_dim": 8,
    },
    "deepseek_v4": {
        "architectures": ["DeepseekV4ForCausalLM"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "compress_rope_theta": 160000,
        "hc_eps": 1e-6,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 4,
        "head_dim": 16,
        "hidden_size": 64,
        "index_head_dim": 16,
        "index_n_heads": 4,
        "index_topk": 5,
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
        "max_position_embeddings": 512,
        "mlp_layer_types": ["hash_moe", "moe"],
        "model_type": "deepseek_v4",
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 1,
        "o_groups": 2,
        "o_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "routed_scaling_factor": 1.5,
        "sliding_window": 12,
        "swiglu_limit": 10.0,
        "vocab_size": VOCAB,
    },
}
PLUGINS = {"qwen3": "qwen3", "qwen3_5": "qwen35", "deepseek_v3": "deepseek_v3", "deepseek_v4": "deepseek_v4"}


class PaddedModel:
    """A model of the CPU, told of the rows that are none: captured steps have them."""

    def __init__(
        self, model: Model, *, num_token_ids: int = NUM_TOKEN_IDS, hidden_size: int = _QWEN["hidden_size"]
    ) -> None:
        self._model = model
        self._num_token_ids = num_token_ids
        self._hidden_size = hidden_size

    def forward(self, token_ids: Array, *, batch: AttentionBatch, kv_cache: KvLayers) -> Array:
        assert ((token_ids >= 0) & (token_ids < self._num_token_ids)).all(), "an id that the embedding does not have"
        hidden = np.full((len(token_ids), self._hidden_size), np.nan, np.float32)
        counts = np.diff(batch.query_starts)
        rows = np.flatnonzero((counts > 0) & (batch.context_lens > 0))
        if not len(rows):
            return emulated_cuda.array(np.zeros_like(hidden))
        count = int(batch.query_starts[rows[-1] + 1])
        used = batch.context_lens[rows].astype(np.int64)
        assert (used <= MAX_MODEL_TOKENS).all()
        batch = replace(
            batch,
            positions=batch.positions[:count],
            cache_slots=tuple(slots[:count] for slots in batch.cache_slots),
            query_starts=np.concatenate([[0], batch.query_starts[rows + 1]]).astype(np.int32),
            context_lens=batch.context_lens[rows],
            block_tables=tuple(tables[rows] for tables in batch.block_tables),
            max_query_tokens=int(counts.max()),
            max_context_tokens=int(used.max()),
            adapter_slots=None if batch.adapter_slots is None else batch.adapter_slots[:count],
            state_slots=None if batch.state_slots is None else batch.state_slots[rows],
            kept_rows=None if batch.kept_rows is None else batch.kept_rows[rows],
        )
        hidden[:count] = self._model.forward(np.asarray(token_ids)[:count], batch=batch, kv_cache=kv_cache)
        return emulated_cuda.array(hidden)

    def logits(self, hidden: Array) -> Array:
        return emulated_cuda.array(self._model.logits(np.asarray(hidden)))


class LastTokenPaddedModel(PaddedModel):
    """One with last-token selection, which no captured step asks for."""

    num_selected = 0

    def forward_last_tokens(
        self, token_ids: Array, *, batch: AttentionBatch, kv_cache: KvLayers, last: LogitsIndices
    ) -> Array:
        LastTokenPaddedModel.num_selected += 1
        model = cast("LastTokenModel", self._model)
        return emulated_cuda.array(model.forward_last_tokens(token_ids, batch=batch, kv_cache=kv_cache, last=last))


class ReplayedPaddedModel(PaddedModel):
    """A model that replays states, too."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._replayed = model

    def keep_inputs(self, states: Any, *, most_tokens: int) -> KeptInputs | None:
        return self._replayed.keep_inputs(states, most_tokens=most_tokens)

    def replay(self, states: Any, kept: KeptInputs, *, slots: Array, counts: Array) -> None:
        assert (counts <= kept.most_tokens).all()
        self._replayed.replay(states, kept, slots=slots, counts=counts)


def padded(model: Model, *, replays: bool = True) -> PaddedModel:
    if replays and isinstance(model, ReplayedModel):
        return ReplayedPaddedModel(model)
    return LastTokenPaddedModel(model) if isinstance(model, LastTokenModel) else PaddedModel(model)


class Bench:
    """One family on some ranks; `replays`: whether states that can be replayed are."""

    replays = True

    def __init__(self, family: str, ranks: int, kernels: emulated_cuda.Kernels) -> None:
        self.definition: Any = find_plugin("openinfer.models", PLUGINS[family]).load()().definition
        self.config = self.definition.parse(CONFIGS[family])
        self.ranks, self.kernels = ranks, kernels

    def model(self, communicator: Communicator) -> tuple[Model, KvLayout, WorkerLimits]:
        share = {"rank": communicator.rank, "size": communicator.size}
        weights = DummyWeights(self.definition.tensors(self.config), **share)
        given = {"ops": BatchInvariantCpuOps(), "communicator": communicator, "max_model_tokens": MAX_MODEL_TOKENS}
        model = self.definition.load(self.config, weights, **given)
        spec = self.definition.kv_spec(
            self.config,
            model_tag="test",
            kv_dtype=KvDtype.FLOAT32,
            state_dtype=KvDtype.FLOAT32,
            num_ranks=communicator.size,
            rank_index=communicator.rank,
        )
        layout = KvLayout.from_spec(spec, block_size_tokens=BLOCK)
        limits = WorkerLimits(
            max_num_seqs=NUM_SLOTS,
            max_model_tokens=MAX_MODEL_TOKENS,
            block_size_tokens=BLOCK,
            num_token_ids=NUM_TOKEN_IDS,
            vocab_size=VOCAB,
            slot_bytes=padded_slot_bytes(layout, in_blocks=False) if layout.slot_bytes else 0,
        )
        return model, layout, limits

    def communicators(self) -> list[Communicator]:
        return [SoloCommunicator()] if self.ranks == 1 else list(LocalGroup(self.ranks).communicators)

    def cpu(self, drafter: SharedDrafter | None = None) -> ThreadRunner:
        """On one rank: what is right."""
        model, layout, limits = self.model(SoloCommunicator())
        ops = BatchInvariantCpuOps()
        pool = make_pool(layout, num_blocks=NUM_BLOCKS, ops=ops)
        given = {
            "kv_pool": pool,
            "states": make_states(layout, limits, ops=ops),
        }
        given |= {"limits": limits, "drafter": drafter}
        return ThreadRunner([CpuWorker(model, ops=ops, communicator=SoloCommunicator(), **given)])

    def cuda(self, *, capture: bool, drafts: "Drafts | SetDrafts | None" = None) -> ThreadRunner:
        """Ranks of emulated GPUs."""
        workers: list[CudaWorker] = []
        for communicator in self.communicators():
            model, layout, limits = self.model(communicator)
            ops = emulated_cuda.emulated_ops(BatchInvariantCpuOps(), self.kernels)
            pool = make_pool(layout, num_blocks=NUM_BLOCKS, ops=ops)
            worker = CudaWorker(
                padded(model, replays=self.replays),
                kv_pool=pool,
                ops=ops,
                communicator=communicator,
                limits=limits,
                states=make_states(layout, limits, ops=ops),
                drafter=None if drafts is None else drafts.make(model, ops, communicator),
            )
            if capture:
                worker.warm_up(capture=True, mark=lambda _: None)
            workers.append(worker)
        return ThreadRunner(workers)


class AttentiveDrafter(ScriptedDrafter):
    """Also holds hidden states against the log-probabilities of what requests were answered."""

    def __init__(self, kind: DraftKind, outputs: Any, context: DrafterContext, logprobs: Any) -> None:
        super().__init__(kind, outputs, context)
        self._model, self._logprobs = PaddedModel(context.model), logprobs

    def draft(self, slots: Array, last_ids: Array, hidden: Array, lengths: Array) -> Array:
        drafts = super().draft(slots, last_ids, hidden, lengths)
        chosen = self._ops.logprobs(self._model.logits(hidden), last_ids, top=1).chosen
        for slot, length, logprob in zip(slots.tolist(), lengths.tolist(), chosen.tolist(), strict=True):
            request = self._requests[slot]
            answered = self._logprobs.get(request.request_id, ())
            index = length - len(request.prompt_token_ids) - 1
            assert index >= len(answered) or answered[index].logprob == logprob, f"request {request.request_id}"
        return drafts


@dataclass(frozen=True)
class Drafts:
    """Which drafter."""

    kind: DraftKind
    max_drafts: int
    outputs: Mapping[int, Sequence[int]]
    logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)
    faults: DrafterFaults = field(default_factory=DrafterFaults)

    def make(self, model: Model, ops: Any, communicator: Communicator) -> SharedDrafter:
        context = DrafterContext(
            model_dir=Path(),
            config={},
            model=model,
            ops=ops,
            communicator=communicator,
            max_num_seqs=NUM_SLOTS,
            max_model_tokens=MAX_MODEL_TOKENS,
            num_token_ids=NUM_TOKEN_IDS,
            max_drafts=self.max_drafts,
        )
        drafter = AttentiveDrafter(self.kind, self.outputs, context, self.logprobs)
        given = {"communicator": communicator, "num_token_ids": NUM_TOKEN_IDS, "faults": self.faults}
        return SharedDrafter(drafter, name="scripted", **given)


def serve(
    runner: ThreadRunner,
    requests: list[GenerateRequest],
    *,
    seed: int,
    drafts: Drafts | None = None,
    quiet_share: float = 0.0,
) -> tuple[dict[int, DraftedAnswer], DraftedSteps]:
    sizes = DraftedSizes(
        num_blocks=NUM_BLOCKS,
        block_size_tokens=BLOCK,
        max_num_seqs=NUM_SLOTS,
        max_model_tokens=MAX_MODEL_TOKENS,
        num_token_ids=NUM_TOKEN_IDS,
    )
    steps = DraftedSteps(
        runner,
        sizes,
        seed=seed,
        max_drafts=0 if drafts is None else drafts.max_drafts,
        outputs=None if drafts is None else drafts.outputs,
        allowed=lambda request, output: every_third_token_masked(request, output, num_token_ids=NUM_TOKEN_IDS),
        quiet_share=quiet_share,
    )
    with contextlib.closing(runner):
        return steps.run(requests), steps


def check(bench: Bench, *, capture: bool, max_drafts: int, kinds: Sequence[DraftKind] = tuple(DraftKind)) -> None:
    # Where states are replayed, rows with other tokens have no drafts: it takes more requests for as many.
    requests = drafted_requests(NUM_TOKEN_IDS, count=30 if bench.replays and sys.argv[1] == "qwen3_5" else 12)
    plain, _ = serve(bench.cuda(capture=False), requests, seed=1)
    if bench.ranks == 1:  # sums over ranks round elsewhere
        assert serve(bench.cpu(), requests, seed=0)[0] == plain
        assert serve(bench.cuda(capture=True), requests, seed=2)[0] == plain
    outputs = {request_id: answer.token_ids for request_id, answer in plain.items()}
    logprobs = {request_id: answer.logprobs for request_id, answer in plain.items()}
    for seed, kind in enumerate(kinds):
        drafts = Drafts(kind, max_drafts, outputs, logprobs)
        found, steps = serve(bench.cuda(capture=capture, drafts=drafts), requests, seed=3 + seed, drafts=drafts)
        assert drafts.faults.count == 0, f"drafter {kind} was told something wrong"
        for request_id, answer in plain.items():
            assert found[request_id] == answer, f"request {request_id}, drafter {kind}, {max_drafts} drafts"
        assert steps.num_compared > 50, steps.num_compared
        assert steps.num_preemptions > 0
        assert kind is not DraftKind.RIGHT or steps.num_accepted > 0.5 * steps.num_compared


class SetDrafter:
    """The same drafts for a slot whatever its sequence."""

    max_drafts = 4

    def __init__(self, ops: Any) -> None:
        self._ops = ops

    def start(self, starts: Sequence[SlotStart]) -> None:
        pass

    def draft(self, slots: Array, last_ids: Array, hidden: Array, lengths: Array) -> Array:
        return self._ops.upload(np.array([SET_DRAFTS[slot % 4] for slot in slots.tolist()], np.int32))


SET_DRAFTS = [5, 6, 7, 8], [5, -1, 7, 8], [5, 6, NUM_TOKEN_IDS, 8], [-1, 5, 6, 7]


def only(*token_ids: int) -> MaskWords:
    words = np.zeros(mask_words(NUM_TOKEN_IDS), np.uint32)
    for token_id in token_ids:
        words[token_id // 32] |= np.uint32(1 << token_id % 32)
    return words


def two_steps(runner: ThreadRunner) -> StepResult:
    """Prompts in four slots, then rows with three drafts each, planned before the first step's result was read."""
    requests = [
        GenerateRequest(
            request_id=RequestId(i), prompt_token_ids=(1, 2, 3, 4, i), sampling=SamplingParams(max_tokens=9)
        )
        for i in range(4)
    ]
    starts = tuple(SlotStart(slot=i, request=request, seed=i) for i, request in enumerate(requests))
    slots, ones = np.arange(4, dtype=np.int32), np.ones(4, np.int32)
    first = StepPlan(
        step=0,
        slots=slots,
        starts=0 * ones,
        counts=5 * ones,
        num_host_tokens=5 * ones,
        max_new=ones,
        token_ids=np.concatenate([request.prompt_token_ids for request in requests]).astype(np.int32),
        new_block_counts=3 * ones,
        new_blocks=np.arange(12, dtype=np.int32),
        started=starts,
    )
    nothing = only()
    masks = [[only(5), nothing], [only(5), only(6)], [only(5), only(6), only(7)], [nothing]]
    second = StepPlan(
        step=1,
        slots=slots,
        starts=5 * ones,
        counts=4 * ones,
        num_host_tokens=0 * ones,
        max_new=4 * ones,
        draft_counts=3 * ones,
        token_ids=slots[:0],
        new_block_counts=0 * ones,
        new_blocks=slots[:0],
        token_masks={(row, place): mask for row, of_row in enumerate(masks) for place, mask in enumerate(of_row)},
        wants_drafts=np.array([True, True, False, True]),
    )
    with contextlib.closing(runner):
        pending = [runner.launch(first), runner.launch(second)]
        assert pending[0].result().new_counts.tolist() == [1] * 4
        return pending[1].result()


def check_results(bench: Bench) -> None:
    """Rows that fail at their first position or a later one, slots with fewer drafts than planned, and next drafts."""
    shared = {"name": "set", "communicator": SoloCommunicator(), "num_token_ids": NUM_TOKEN_IDS}
    drafter = SharedDrafter(SetDrafter(BatchInvariantCpuOps()), faults=DrafterFaults(), **shared)
    found = [bench.cuda(capture=capture, drafts=SetDrafts()) for capture in (False, True, False, True)]
    for runner in found[2:]:
        measure(runner)
    for result in (two_steps(bench.cpu(drafter)), *map(two_steps, found)):
        assert result.new_counts.tolist() == [0, 2, 3, 0]
        assert result.token_ids.tolist() == [5, 6, 5, 6, 7]
        assert result.draft_counts.tolist() == [3, 1, 2, 0]
        assert sorted(result.failed_rows) == [0, 3]
        assert result.next_drafts == {1: (5,)}


def measure(runner: ThreadRunner) -> None:
    """What an engine does before its first request; its clock ticks once a question, so that time suffices."""
    config = SchedulerConfig(
        num_blocks=NUM_BLOCKS,
        block_size_tokens=BLOCK,
        max_num_seqs=NUM_SLOTS,
        max_step_tokens=64,
        max_model_tokens=MAX_MODEL_TOKENS,
        max_drafts=4,
        adapts_drafts=True,
    )
    ticks = count()
    times = measure_step_times(runner, config, num_token_ids=NUM_TOKEN_IDS, clock=lambda: next(ticks), most_s=1e6)
    sizes = {(each.num_rows, each.num_drafts) for each in times}
    assert sizes >= {(1, 0), (1, 1), (1, 3), (1, 4), (4, 0), (4, 16), (5, 20)}, sizes


class SetDrafts:
    def make(self, model: Model, ops: Any, communicator: Communicator) -> SharedDrafter:
        given = {"communicator": communicator, "num_token_ids": NUM_TOKEN_IDS, "faults": DrafterFaults()}
        return SharedDrafter(SetDrafter(ops), name="set", **given)


def check_refusal(bench: Bench) -> None:
    drafts = Drafts(DraftKind.RIGHT, 2, {})
    with pytest.raises(ContractViolation, match="no drafter"):
        serve(bench.cuda(capture=False), drafted_requests(NUM_TOKEN_IDS), seed=0, drafts=drafts)


if __name__ == "__main__":
    graphs.Stream.capture = emulated_cuda.capture
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(sys.argv[1], int(sys.argv[2]), emulated_cuda.Kernels(Path(folder)))
    check_refusal(bench)
    if bench.ranks == 1:
        check_results(bench)
    check(bench, capture=False, max_drafts=4)
    if sys.argv[1] == "qwen3_5":  # whose states are not replayed where they have another shape: the host waits then
        bench.replays = False
        check(bench, capture=True, max_drafts=3, kinds=[DraftKind.RANDOM])
        bench.replays = True
    assert (sys.argv[1] == "qwen3") == (LastTokenPaddedModel.num_selected > 0), LastTokenPaddedModel.num_selected
    if bench.ranks == 1:  # several would have to be captured side by side
        check(bench, capture=True, max_drafts=1, kinds=[DraftKind.RIGHT, DraftKind.HOSTILE])
    sys.stdout.write("equal\n")

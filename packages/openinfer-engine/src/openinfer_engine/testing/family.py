"""A model family under test: its model on all its ranks, with batches made by hand, and what must hold of every one.

`FamilyHarness` runs a model of a folder; a test says which tokens of which sequences each step computes.
`check_family` runs a sequence whole, in pieces, token by token, next to others, after a shared prefix, from its
beginning again, and cut into ranks: a model's logits never depend on how its tokens were cut into steps.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from openinfer_core import read_config
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.distributed.local_group import LocalGroup
from openinfer_engine.kernel_providers import choose_providers, with_providers
from openinfer_engine.model import (
    LastTokenModel,
    LogitsIndices,
    Model,
    ModelDefinition,
    WeightSource,
    checked_hidden,
    checked_logits,
)
from openinfer_engine.weights.checkpoint import Checkpoint, RankWeights
from openinfer_engine.weights.dummy import DummyWeights
from openinfer_engine.weights.stored_config import check_stored
from openinfer_engine.worker.paged_tensors import make_pool
from openinfer_kernels import Array, AttentionBatch, HostArray, Ops
from openinfer_kernels.cpu import CpuOps
from openinfer_kv_cache import KvDtype, KvLayout, KvSpec

Logits: TypeAlias = NDArray[np.float32]
"""`[tokens, V]`"""

_NUM_SLOTS = 6
_VARIANTS = 3
"""Ways to cut a sequence at random that `check_steps` tries."""


class FamilyHarness:
    """A model on all its ranks, with a KV cache and states each.

    Blocks and slots are handed out in shuffled order, and all begins full of NaN: nothing may depend on either. Nor on
    what lies behind the window of a block table: its entries name a block that stays full of NaN.

    Args:
        definition: of the family.
        model_dir: `config.json` and safetensors.
        ops: of the device, which has one rank unless it is the CPU; None for the CPU's.
        dummy: random weights, the same on every device, in the place of safetensors.
        ranks: how many the model is cut into; they run as threads.
        block_tokens: `B`.
        num_blocks: of the KV cache, for all sequences of the test, in each block table.
        windows: layers with a window have block tables of their own; else all KV is in one.
        max_model_tokens: longest context; None for the model's limit.
        change: keys of the config to replace.
        kv_dtype: what KV is kept in; None for the compute dtype.

    Raises:
        Refused: the family does not compute this model, or not on so many ranks.
        InvalidCheckpoint: config or tensors are not the family's.
    """

    def __init__(
        self,
        definition: ModelDefinition[Any],
        model_dir: Path,
        *,
        ops: Ops | None = None,
        dummy: bool = False,
        ranks: int = 1,
        block_tokens: int = 8,
        num_blocks: int = 80,
        windows: bool = True,
        max_model_tokens: int | None = None,
        change: Mapping[str, Any] | None = None,
        kv_dtype: KvDtype | None = None,
    ) -> None:
        parsed = definition.parse(read_config(model_dir) | dict(change or {}))
        definition.check_ranks(parsed, ranks)
        self.block_tokens = block_tokens
        self._group = LocalGroup(ranks)
        self._free_slots: list[int] = np.random.default_rng(1).permutation(_NUM_SLOTS).tolist()
        self._tables: dict[str, list[list[int]]] = {}
        self._slots: dict[str, int] = {}
        self._lengths: dict[str, int] = {}
        self._ranks: list[_Rank] = []
        self._ops: Ops = _with_extra_operators(definition, CpuOps() if ops is None else ops)
        with ExitStack() as stack:
            checkpoint = None if dummy else stack.enter_context(Checkpoint.open(model_dir))
            self.config = parsed if checkpoint is None else check_stored(definition, parsed, checkpoint)
            limit = definition.limits(parsed).max_model_tokens if max_model_tokens is None else max_model_tokens
            for communicator in self._group.communicators:
                shares = {"rank": communicator.rank, "size": ranks}
                weights: WeightSource = (
                    DummyWeights(definition.tensors(parsed), **shares)
                    if checkpoint is None
                    else RankWeights(checkpoint, **shares)
                )
                model = definition.load(
                    self.config, weights, ops=self._ops, communicator=communicator, max_model_tokens=limit
                )
                spec = definition.kv_spec(
                    self.config,
                    model_tag="test",
                    kv_dtype=_compute_dtype(self._ops) if kv_dtype is None else kv_dtype,
                    state_dtype=_compute_dtype(self._ops),
                    num_ranks=ranks,
                    rank_index=communicator.rank,
                )
                spec = spec if windows else spec.without_windows()
                rank = _Rank(
                    model,
                    spec,
                    ops=self._ops,
                    vocab_size=definition.limits(parsed).vocab_size,
                    block_tokens=block_tokens,
                    num_blocks=num_blocks,
                )
                self._ranks.append(rank)
        self._windows = self._ranks[0].table_windows
        self._free: list[int] = np.random.default_rng(0).permutation(num_blocks * len(self._windows)).tolist()
        self._never_written = len(self._free)

    @property
    def has_states(self) -> bool:
        """Whether the family keeps recurrent states, which cannot be set back."""
        return bool(self._ranks[0].states)

    @property
    def selects_last_tokens(self) -> bool:
        """Whether `step_last_tokens` is possible."""
        return len(self._ranks) == 1 and isinstance(self._ranks[0].model, LastTokenModel)

    def step(self, rows: Mapping[str, Sequence[int]]) -> dict[str, Logits]:
        """Computes the next tokens of some sequences: the logits `[tokens, V]` at each of them.

        Raises:
            AssertionError: the ranks do not agree bit for bit.
        """
        batch = self._batch(rows)
        token_ids = np.asarray([token for tokens in rows.values() for token in tokens], np.int32)

        there, ids = self._uploaded(batch), self._ops.upload(token_ids)

        def work(communicator: Communicator) -> Logits:
            return self._ops.download(self._ranks[communicator.rank].logits(ids, there))

        results = self._group.run(work) if len(self._ranks) > 1 else [work(self._group.communicators[0])]
        for rank, other in enumerate(results[1:], 1):
            assert np.array_equal(results[0], other), f"logits of rank {rank} are not those of rank 0"
        pieces = np.split(results[0], batch.query_starts[1:-1])
        return dict(zip(rows, pieces, strict=True))

    def step_last_tokens(self, rows: Mapping[str, Sequence[int]]) -> dict[str, Logits]:
        """As `step`, but only the logits `[1, V]` at the last token of each sequence are asked for, on one rank.

        Raises:
            TypeError: the model is no `LastTokenModel`.
        """
        batch = self._batch(rows)
        token_ids = np.asarray([token for tokens in rows.values() for token in tokens], np.int32)
        last = (batch.query_starts[1:] - 1).astype(np.int32)
        alone = replace(
            batch,
            positions=batch.positions[last],
            query_starts=np.arange(len(rows) + 1, dtype=np.int32),
            cache_slots=tuple(slots[last] for slots in batch.cache_slots),
            max_query_tokens=1,
        )
        indices = LogitsIndices(tokens=self._ops.upload(last), batch=self._uploaded(alone))
        (rank,) = self._ranks
        logits = self._ops.download(rank.last_token_logits(self._ops.upload(token_ids), self._uploaded(batch), indices))
        return dict(zip(rows, np.split(logits, len(rows)), strict=True))

    def restart(self, sequence: str) -> None:
        """Sends a sequence back to its beginning, in other blocks and another slot, as a preemption does."""
        self._free = [block for table in self._tables.pop(sequence) for block in table] + self._free
        self._free_slots.insert(0, self._slots.pop(sequence))
        del self._lengths[sequence]

    def fork(self, sequence: str, parent: str, num_tokens: int | None = None) -> None:
        """Begins a sequence with the first blocks of another, and a copy of its states, as a prefix hit does.

        Args:
            sequence: a new one.
            parent: the other.
            num_tokens: how many of its tokens; None for all. Of a model with states only all: they cannot be set back.

        Raises:
            ValueError: they are no whole blocks, or not all of a model with states.
        """
        shared = self._lengths[parent] if num_tokens is None else num_tokens
        if shared % self.block_tokens or shared > self._lengths[parent]:
            raise ValueError(f"{shared} of {self._lengths[parent]} tokens are no whole blocks of {self.block_tokens}")
        if self.has_states and shared != self._lengths[parent]:
            raise ValueError(f"states of {parent} have consumed {self._lengths[parent]} tokens, not {shared}")
        self._tables[sequence] = [table[: shared // self.block_tokens] for table in self._tables[parent]]
        self._lengths[sequence] = shared
        self._slots[sequence] = self._free_slots.pop()
        for rank in self._ranks:
            for tensor in rank.states.values():
                tensor[self._slots[sequence]] = tensor[self._slots[parent]]

    def _uploaded(self, batch: AttentionBatch) -> AttentionBatch:
        def uploaded(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(uploaded, cast("tuple[Any, ...]", value)))
            return self._ops.upload(cast("HostArray", value)) if isinstance(value, np.ndarray) else value

        there = {field.name: uploaded(getattr(batch, field.name)) for field in fields(batch)}
        return replace(batch, **there)

    def _batch(self, rows: Mapping[str, Sequence[int]]) -> AttentionBatch:
        for sequence, tokens in rows.items():
            if sequence not in self._slots:
                self._slots[sequence] = self._free_slots.pop()
            self._lengths[sequence] = self._lengths.get(sequence, 0) + len(tokens)
            for table in self._tables.setdefault(sequence, [[] for _ in self._windows]):
                while len(table) * self.block_tokens < self._lengths[sequence]:
                    table.append(self._free.pop())
        counts = [len(tokens) for tokens in rows.values()]
        lengths = [self._lengths[sequence] for sequence in rows]
        positions = np.concatenate([np.arange(end - count, end) for end, count in zip(lengths, counts, strict=True)])
        block_tables = [self._block_tables(rows, table) for table in range(len(self._windows))]
        blocks = [
            each[np.repeat(np.arange(len(rows)), counts), positions // self.block_tokens] for each in block_tables
        ]
        offsets = positions % self.block_tokens
        return AttentionBatch(
            positions=positions.astype(np.int32),
            query_starts=np.cumsum([0, *counts]).astype(np.int32),
            context_lens=np.asarray(lengths, np.int32),
            block_tables=tuple(block_tables),
            cache_slots=tuple(each.astype(np.int64) * self.block_tokens + offsets for each in blocks),
            max_query_tokens=max(counts),
            max_context_tokens=max(lengths),
            block_tokens=self.block_tokens,
            state_slots=np.asarray([self._slots[sequence] for sequence in rows], np.int32),
        )

    def _block_tables(self, rows: Mapping[str, Sequence[int]], table: int) -> HostArray:
        """`[rows, blocks]` of one table; what no token of a row sees is a block full of NaN."""
        tables, window = [self._tables[sequence][table] for sequence in rows], self._windows[table]
        found = np.zeros((len(rows), max(map(len, tables))), np.int32)
        for row, ((sequence, tokens), blocks) in enumerate(zip(rows.items(), tables, strict=True)):
            found[row, : len(blocks)] = blocks
            if window is not None:
                first_seen = max(0, self._lengths[sequence] - len(tokens) - window + 1)
                found[row, : first_seen // self.block_tokens] = self._never_written
        return found


def _with_extra_operators(definition: ModelDefinition[Any], own: Ops) -> Ops:
    if not definition.extra_operators:
        return own
    device: Any = getattr(own, "device", None)
    architecture = "cpu" if device is None else device.architecture
    return with_providers(own, choose_providers(definition.extra_operators, architecture=architecture))


def _compute_dtype(ops: Ops) -> KvDtype:
    return KvDtype(str(ops.zeros((1,)).dtype))


class _Rank:
    """One rank's model and memory."""

    def __init__(
        self, model: Model, spec: KvSpec, *, ops: Ops, vocab_size: int, block_tokens: int, num_blocks: int
    ) -> None:
        self.model = model
        self._vocab_size = vocab_size
        layout = KvLayout.from_spec(spec, block_size_tokens=block_tokens)
        self.table_windows = layout.table_windows
        self._pool = make_pool(layout, num_blocks=num_blocks * layout.num_tables + 1, ops=ops)
        # Bytes of a cache in FP8 are NaN where all bits are set, codes and scales alike.
        self._pool.blocks.fill(0xFF if self._pool.blocks.dtype == np.uint8 else np.nan)
        self.states: dict[str, Array] = {}
        for group in spec.slots:
            for tensor in group.tensors:
                dtype = None if tensor.dtype is _compute_dtype(ops) else np.dtype(str(tensor.dtype))
                states = ops.zeros((_NUM_SLOTS, group.num_layers, *tensor.shape), dtype)
                states.fill(np.nan)
                self.states[f"{group.name}.{tensor.name}"] = states

    def logits(self, token_ids: Array, batch: AttentionBatch) -> Logits:
        hidden = self.model.forward(token_ids, batch=self._own(batch), kv_cache=self._pool.layers)
        checked_hidden(self.model, hidden, num_tokens=len(token_ids))
        return checked_logits(self.model, self.model.logits(hidden), num_rows=len(hidden), vocab_size=self._vocab_size)

    def last_token_logits(self, token_ids: Array, batch: AttentionBatch, indices: LogitsIndices) -> Logits:
        model = self.model
        if not isinstance(model, LastTokenModel):
            raise TypeError(f"{type(model).__name__} computes all tokens: it has no forward_last_tokens")
        own = replace(indices, batch=self._own(indices.batch))
        hidden = model.forward_last_tokens(token_ids, batch=self._own(batch), kv_cache=self._pool.layers, last=own)
        return self.model.logits(hidden)

    def _own(self, batch: AttentionBatch) -> AttentionBatch:
        return replace(batch, caches=self._pool.tensors, states=self.states)


def check_family(
    definition: ModelDefinition[Any],
    model_dir: Path,
    token_ids: Sequence[int],
    logits: Logits,
    *,
    tolerance: float,
    ranks: Sequence[int] = (),
    block_tokens: int = 8,
) -> None:
    """A sequence has the same logits however it is computed, on one rank and on several.

    Args:
        definition: of the family.
        model_dir: a model of a few layers.
        token_ids: a sequence, of at least three blocks.
        logits: `[tokens, V]` that a reference computed in float32.
        tolerance: largest difference of a logit.
        ranks: how many ranks to cut the model into, in addition to one.
        block_tokens: `B`.

    Raises:
        AssertionError: they differ; says in which run and by how much.
    """
    for size in (1, *ranks):
        harness = FamilyHarness(definition, model_dir, ranks=size, block_tokens=block_tokens, num_blocks=1000)
        check_steps(harness, token_ids, logits, tolerance=tolerance, name=f"{size} ranks")


def check_steps(
    harness: FamilyHarness, token_ids: Sequence[int], logits: Logits, *, tolerance: float, name: str
) -> None:
    """`check_family` for one harness, which has seen no sequence yet."""
    tokens = list(token_ids)
    boundary = len(tokens) // 2 // harness.block_tokens * harness.block_tokens
    if boundary == 0:
        raise ValueError(f"{len(tokens)} tokens are too few for blocks of {harness.block_tokens}")

    def compare(run: str, got: Logits, first: int = 0) -> None:
        difference = float(np.abs(got - logits[first:]).max())
        assert difference <= tolerance, f"{name}, {run}: logits differ by {difference:.2e}, allowed {tolerance:.2e}"

    compare("whole", harness.step({"whole": tokens})["whole"])
    harness.restart("whole")
    compare("computed again from the beginning", harness.step({"whole": tokens})["whole"])
    harness.restart("whole")
    if harness.selects_last_tokens:
        last = harness.step_last_tokens({"selected": tokens, "other": tokens[:3]})["selected"]
        compare("logits of the last token alone", last, first=len(tokens) - 1)
        harness.restart("selected")
        harness.restart("other")
    pieces = [harness.step({"prefilled": tokens[:boundary]})["prefilled"]]
    pieces += [harness.step({"prefilled": [token]})["prefilled"] for token in tokens[boundary:]]
    compare("prompt, then token by token", np.concatenate(pieces))
    harness.restart("prefilled")
    harness.step({"parent": tokens[:boundary]})
    harness.fork("child", "parent")
    # No further than `tokens` reach: a longer parent could leave the context of a model that just fits them.
    harness.step({"parent": tokens[::-1][: len(tokens) - boundary]})
    compare("after a shared prefix", harness.step({"child": tokens[boundary:]})["child"], first=boundary)
    harness.restart("parent")
    for seed in range(_VARIANTS):
        cut, _ = step_at_random(harness, dict.fromkeys("abc", tokens), np.random.default_rng(seed))
        for sequence, got in cut.items():
            compare(f"cut at random next to others, seed {seed}, {sequence}", got)


def step_at_random(
    harness: FamilyHarness, sequences: Mapping[str, Sequence[int]], rng: np.random.Generator
) -> tuple[dict[str, Logits], int]:
    """Random subsets of new sequences advance by random numbers of tokens, in random order, until all have ended.

    Args:
        harness: has seen none of these sequences, or has sent them back; it sends back each when it has ended.
        sequences: token ids by name.
        rng: of everything at random.

    Returns:
        The logits `[tokens, V]` of each sequence, and the number of steps.
    """
    left = {sequence: list(tokens) for sequence, tokens in sequences.items()}
    pieces: dict[str, list[Logits]] = {sequence: [] for sequence in left}
    num_steps = 0
    while left:
        chosen = rng.permutation(sorted(left))[: rng.integers(1, len(left) + 1)].tolist()
        rows = {sequence: left[sequence][: int(rng.choice([1, 1, 3, 17]))] for sequence in chosen}
        for sequence, got in harness.step(rows).items():
            pieces[sequence].append(got)
            left[sequence] = left[sequence][len(rows[sequence]) :]
            if not left[sequence]:
                del left[sequence]
                harness.restart(sequence)
        num_steps += 1
    return {sequence: np.concatenate(each) for sequence, each in pieces.items()}, num_steps

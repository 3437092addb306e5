"""`SamplingState`: how the sequence in each slot is sampled, and the sampling batch of a step."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from openinfer_core import SamplingParams
from openinfer_core.grammars import MaskWords, mask_words
from openinfer_core.scheduling import SlotStart
from openinfer_kernels import Bias, HostArray, Ops, Penalties, SamplingBatch, TokenMask
from openinfer_kernels.ops.sampling_columns import COLUMN_DTYPES, DEFAULTS


@dataclass(slots=True)
class _Penalised:
    """Token statistics of a sequence with penalties."""

    params: SamplingParams
    output_counts: HostArray  # `[V]` int32
    prompt_seen: HostArray  # `[V]` bool


@dataclass(frozen=True, slots=True)
class LogitChanges:
    """Changes of single logits of a sequence: its bias, and stop tokens that it may not sample yet."""

    token_ids: HostArray
    values: HostArray
    stop_token_ids: HostArray  # forbidden while fewer than `min_tokens` tokens were generated
    no_stop: HostArray  # mask of `token_ids`: those that are no stop tokens

    @classmethod
    def of(cls, params: SamplingParams) -> "LogitChanges | None":
        if not params.logit_bias and params.min_tokens == 0:
            return None
        token_ids = np.fromiter(params.logit_bias.keys(), np.int32, len(params.logit_bias))
        # Not np.unique: its first call imports numpy.ma, for 50 ms in the middle of a step.
        stop = np.array(sorted(set(params.stop_token_ids)), np.int32)
        return cls(
            token_ids=token_ids,
            values=np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias)),
            stop_token_ids=stop,
            no_stop=~np.isin(token_ids, stop),
        )

    def at(self, *, forbid_stop: bool) -> tuple[HostArray, HostArray]:
        """Token ids, each once, and what is added to their logits."""
        if not forbid_stop:
            return self.token_ids, self.values
        forbidden = np.full(len(self.stop_token_ids), -np.inf, np.float32)
        ids = np.concatenate([self.token_ids[self.no_stop], self.stop_token_ids])
        return ids, np.concatenate([self.values[self.no_stop], forbidden])


class SamplingState:
    """One row of parameters per slot, written when a sequence takes the slot."""

    def __init__(self, *, max_num_seqs: int, num_token_ids: int, vocab_size: int) -> None:
        self._num_token_ids = num_token_ids
        self._vocab_size = vocab_size
        # alternatives per sampled token that each slot's request asked for; -1 for no log-probabilities
        self.logprobs: HostArray = np.full(max_num_seqs, -1, np.int32)
        self.prompt_logprobs: HostArray = np.full(max_num_seqs, -1, np.int32)  # the same for prompt tokens
        self._columns: dict[str, HostArray] = {
            name: np.full(max_num_seqs, DEFAULTS.get(name, 0), dtype)
            for name, dtype in COLUMN_DTYPES.items()
            if name != "positions"
        }
        self._prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self._min_tokens = np.zeros(max_num_seqs, np.int64)
        self._penalised: dict[int, _Penalised] = {}
        self._changes: dict[int, LogitChanges] = {}

    def start(self, start: SlotStart) -> None:
        """Takes over a slot for a sequence; everything of the last one is void."""
        slot, params = start.slot, start.request.sampling
        self.logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self.prompt_logprobs[slot] = -1 if params.prompt_logprobs is None else params.prompt_logprobs
        for name, value in {**row_values(params, self._vocab_size), "seeds": start.seed}.items():
            self._columns[name][slot] = value
        self._prompt_tokens[slot] = len(start.request.prompt_token_ids)
        self._min_tokens[slot] = params.min_tokens
        self._penalised.pop(slot, None)
        self._changes.pop(slot, None)
        if has_penalties(params):
            self._penalised[slot] = self._statistics(start)
        if (changes := LogitChanges.of(params)) is not None:
            self._changes[slot] = changes

    def batch(
        self, slots: HostArray, positions: HostArray, ops: Ops, *, masks: Sequence[MaskWords | None] = ()
    ) -> SamplingBatch:
        """How rows are sampled.

        Args:
            slots: `[R]` slot of each row.
            positions: `[R]` int64 position that the sampled token will have.
            ops: where the arrays go.
            masks: of each row, or none at all.
        """
        return SamplingBatch(
            num_token_ids=self._num_token_ids,
            positions=ops.upload(positions),
            bias=self._bias(slots, positions, ops) if self._changes else None,
            penalties=self._penalties(slots, ops) if self._penalised else None,
            token_mask=self._token_mask(masks, ops),
            **{name: ops.upload(column[slots]) for name, column in self._columns.items()},
        )

    def count(self, slots: HostArray, token_ids: HostArray) -> None:
        if self._penalised:
            for slot, token_id in zip(slots.tolist(), token_ids.tolist(), strict=True):
                if token_id >= 0 and slot in self._penalised:
                    self._penalised[slot].output_counts[token_id] += 1

    def _statistics(self, start: SlotStart) -> _Penalised:
        params = start.request.sampling
        prompt_seen = np.zeros(self._vocab_size, np.bool_)
        prompt_seen[np.asarray(start.request.prompt_token_ids, np.int64)] = True
        outputs = np.asarray(start.output_token_ids, np.int64)
        return _Penalised(params, np.bincount(outputs, minlength=self._vocab_size).astype(np.int32), prompt_seen)

    def _penalties(self, slots: HostArray, ops: Ops) -> Penalties | None:
        rows = [row for row, slot in enumerate(slots.tolist()) if slot in self._penalised]
        if not rows:
            return None
        chosen = [self._penalised[int(slots[row])] for row in rows]
        params = [penalised.params for penalised in chosen]
        return Penalties(
            rows=ops.upload(np.asarray(rows, np.int32)),
            presence=ops.upload(np.asarray([p.presence_penalty for p in params], np.float32)),
            frequency=ops.upload(np.asarray([p.frequency_penalty for p in params], np.float32)),
            repetition=ops.upload(np.asarray([p.repetition_penalty for p in params], np.float32)),
            output_counts=ops.upload(np.stack([penalised.output_counts for penalised in chosen])),
            prompt_seen=ops.upload(np.stack([penalised.prompt_seen for penalised in chosen])),
        )

    def _token_mask(self, masks: Sequence[MaskWords | None], ops: Ops) -> TokenMask | None:
        rows = [row for row, mask in enumerate(masks) if mask is not None]
        if not rows:
            return None
        bits = np.zeros((len(rows), mask_words(self._vocab_size)), np.uint32)
        for index, row in enumerate(rows):
            words = masks[row]
            if words is not None:
                bits[index, : len(words)] = words
        return TokenMask(rows=ops.upload(np.asarray(rows, np.int32)), bits=ops.upload(bits))

    def _bias(self, slots: HostArray, positions: HostArray, ops: Ops) -> Bias | None:
        rows = [row for row, slot in enumerate(slots.tolist()) if slot in self._changes]
        if not rows:
            return None
        early = positions - self._prompt_tokens[slots] < self._min_tokens[slots]
        changes = [self._changes[int(slots[row])].at(forbid_stop=bool(early[row])) for row in rows]
        longest = max(len(token_ids) for token_ids, _ in changes)
        ids, values = np.zeros((len(rows), longest), np.int32), np.zeros((len(rows), longest), np.float32)
        for index, (row_ids, row_values) in enumerate(changes):
            ids[index, : len(row_ids)], values[index, : len(row_ids)] = row_ids, row_values
        return Bias(
            rows=ops.upload(np.asarray(rows, np.int32)),
            counts=ops.upload(np.asarray([len(row_ids) for row_ids, _ in changes], np.int32)),
            token_ids=ops.upload(ids),
            values=ops.upload(values),
        )


def row_values(params: SamplingParams, vocab_size: int) -> dict[str, float]:
    """What a slot's row of the sampling columns is, by column; seed and position are not the request's to say."""
    values = {name: getattr(params, name) for name in DEFAULTS}
    return {**values, "top_k": min(params.top_k, vocab_size)}


def has_penalties(params: SamplingParams) -> bool:
    """Whether what was generated, or given, makes tokens less likely or more."""
    return params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1

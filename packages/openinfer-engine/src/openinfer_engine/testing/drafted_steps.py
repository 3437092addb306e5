"""Steps with drafts, planned at random: what a worker must answer is what it answers without any.

`DraftedSteps` plans and applies for a runner as a scheduler would, one step ahead of what it knows, and does whatever
the contract allows: chunks, drafts of the device and of the host, more than the device has, preemptions, rows left
out, masked rows, and steps of no rows, which schedulers may not plan and workers take. The answers are those of steps
of one token each.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from openinfer_core import GenerateRequest, TokenLogprobs
from openinfer_core.grammars import MaskWords, mask_words
from openinfer_core.scheduling import SlotStart, StepPlan, StepResult
from openinfer_engine.worker.runner import PendingStep, Runner

AllowedTokens: TypeAlias = Callable[[GenerateRequest, Sequence[int]], Sequence[int] | None]
"""Tokens that may follow the output of a request so far; None for all."""


_EMPTY_STEPS = 0.1
"""Share of the steps that have no rows, next to the second one."""
_MOST_QUIET_STEPS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedAnswer:
    """What one request got."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: dict[int, TokenLogprobs]
    """By position of the token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedSizes:
    """What a runner has room for."""

    num_blocks: int
    block_size_tokens: int
    max_num_seqs: int
    max_model_tokens: int
    num_token_ids: int


@dataclass(slots=True, eq=False)
class _Sequence:
    request: GenerateRequest
    seed: int
    known: list[int]
    slot: int | None = None
    blocks: list[int] = field(default_factory=list[int])
    is_decoding: bool = False
    computed: int = 0  # tokens of the prompt, and of what was known when the slot began
    in_flight: list[int] = field(default_factory=list[int])  # `max_new` of rows that were not applied
    drafts: tuple[int, ...] = ()  # what the worker said it would draft next
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict[int, TokenLogprobs])
    is_finished: bool = False

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def output(self) -> list[int]:
        return self.known[self.num_prompt :]

    @property
    def bound(self) -> int:
        """Known tokens when all that is in flight was accepted."""
        return len(self.known) + sum(self.in_flight)

    def take(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        sampling = self.request.sampling
        for index, token_id in enumerate(token_ids):
            if self.is_finished:
                return
            self.known.append(token_id)
            self.logprobs += logprobs[index : index + 1]
            num_new = len(self.known) - self.num_prompt
            is_stop = token_id in sampling.stop_token_ids and num_new > sampling.min_tokens
            self.is_finished = is_stop or num_new == sampling.max_tokens


@dataclass(slots=True, eq=False)
class _Row:
    sequence: _Sequence
    start: int
    count: int
    host_ids: list[int]
    max_new: int
    num_drafts: int = 0


class DraftedSteps:
    """Plans steps for a runner until all requests have ended.

    Args:
        runner: has run no step.
        sizes: of the runner.
        seed: of all at random.
        max_drafts: device drafts that a row is planned with at most, and host drafts.
        outputs: what host drafts are taken from, where they are to be right.
        allowed: which tokens a request may be answered with; of the requests that it masks none is planned ahead.
        quiet_share: of steps from which on the same few rows have a token each for a while, without drafts.

    Attributes:
        num_compared: drafts that the runner has compared.
        num_accepted: those of them that were sampled.
        num_preemptions: sequences that lost their slot.
        num_empty: steps of no rows.
    """

    def __init__(
        self,
        runner: Runner,
        sizes: DraftedSizes,
        *,
        seed: int = 0,
        max_drafts: int = 0,
        outputs: Mapping[int, Sequence[int]] | None = None,
        allowed: AllowedTokens | None = None,
        quiet_share: float = 0.0,
    ) -> None:
        self._runner = runner
        self._sizes = sizes
        self._rng = np.random.default_rng(seed)
        self._max_drafts = max_drafts
        self._outputs = outputs or {}
        self._allowed = allowed
        self._free_slots: list[int] = self._rng.permutation(sizes.max_num_seqs).tolist()
        self._free_blocks: list[int] = self._rng.permutation(sizes.num_blocks).tolist()
        self._sequences: list[_Sequence] = []
        self._started: list[SlotStart] = []
        self._step = 0
        self._quiet_share, self._quiet_left, self._quiet = quiet_share, 0, list[_Sequence]()
        self.num_compared = self.num_accepted = self.num_preemptions = self.num_empty = 0

    def run(self, requests: Sequence[GenerateRequest]) -> dict[int, DraftedAnswer]:
        """Answers by request id.

        Raises:
            AssertionError: a result is not what the contract says, or a row failed.
        """
        self._sequences = [
            _Sequence(each, each.sampling.seed or each.request_id + 1, list(each.prompt_token_ids)) for each in requests
        ]
        waiting: tuple[StepPlan, list[_Row], PendingStep] | None = None
        while True:
            planned = self._plan()
            launched = None if planned is None else (*planned, self._runner.launch(planned[0]))
            if waiting is not None:
                self._apply(waiting[0], waiting[1], waiting[2].result())
            elif launched is None:
                break
            waiting = launched
        assert all(each.is_finished for each in self._sequences), "requests are left and nothing was planned"
        return {
            each.request.request_id: DraftedAnswer(
                token_ids=each.output, logprobs=each.logprobs, prompt_logprobs=each.prompt_logprobs
            )
            for each in self._sequences
        }

    # --- planning ---------------------------------------------------------------------------------------

    def _plan(self) -> tuple[StepPlan, list[_Row]] | None:
        self._started = []
        if self._quiet_share and (quiet := self._quiet_rows()):
            return self._columns(quiet), quiet
        live = [each for each in self._sequences if not each.is_finished]
        if live and (self._rng.random() < _EMPTY_STEPS or self._step == 1):
            self.num_empty += 1
            return self._columns([]), []
        order: list[int] = self._rng.permutation(len(live)).tolist()
        chosen = [live[index] for index in order if self._rng.random() < 0.8]
        rows = [row for row in map(self._row, chosen) if row is not None]
        others = iter([each for each in live if each not in chosen])
        while not rows and (other := next(others, None)) is not None:  # none of the chosen can run
            rows += [row for row in [self._row(other)] if row is not None]
        return (self._columns(rows), rows) if rows else None

    def _quiet_rows(self) -> list[_Row]:
        """A token each of the same sequences, step after step, as long as all can go on; none at other times."""
        if not self._quiet_left and self._rng.random() < self._quiet_share:
            able = [each for each in self._sequences if self._can_go_on(each)]
            share = self._rng.choice((0.5, 1.0))
            self._quiet = [each for each in able if self._rng.random() < share]
            self._quiet_left = int(self._rng.integers(1, _MOST_QUIET_STEPS))
        if not (self._quiet_left and self._quiet and all(map(self._can_go_on, self._quiet))):
            self._quiet_left = 0
            return []
        self._quiet_left -= 1
        rows = [_Row(each, each.bound - 1, 1, [], 1) for each in self._quiet]
        for each in self._quiet:
            each.in_flight.append(1)
        return rows

    def _can_go_on(self, sequence: _Sequence) -> bool:
        has_room = sequence.bound < self._sizes.max_model_tokens
        return sequence.is_decoding and has_room and not sequence.is_finished and not self._is_masked(sequence)

    def _row(self, sequence: _Sequence) -> _Row | None:
        self._preempt_at_times(sequence)
        is_masked = self._is_masked(sequence)
        if is_masked and sequence.in_flight:
            return None
        if sequence.slot is None and not self._take_slot(sequence):
            return None
        if sequence.is_decoding:
            return self._decode_row(sequence, is_masked=is_masked)
        left = len(sequence.known) - sequence.computed
        chunk = int(self._rng.integers(1, left + 1)) if self._rng.random() < 0.5 else left
        start = sequence.computed
        sequence.computed += chunk
        host_ids = sequence.known[start : start + chunk]
        if chunk < left:
            sequence.in_flight.append(0)
            return _Row(sequence, start, chunk, host_ids, 0)
        drafts = self._host_drafts(sequence, room=self._sizes.max_model_tokens - start - chunk)
        sequence.is_decoding = True
        sequence.in_flight.append(1 + len(drafts))
        return _Row(sequence, start, chunk + len(drafts), host_ids + drafts, 1 + len(drafts))

    def _decode_row(self, sequence: _Sequence, *, is_masked: bool) -> _Row | None:
        start = sequence.bound - 1
        room = self._sizes.max_model_tokens - sequence.bound
        if room < 1:
            return None
        knows_last = not sequence.in_flight
        host_ids = self._host_drafts(sequence, room=room - 1) if knows_last and self._rng.random() < 0.4 else []
        if is_masked:
            host_ids = list(sequence.drafts[: room - 1])
        num_drafts = 0
        # Sometimes more than the worker can have.
        if self._max_drafts and not is_masked and self._rng.random() < 0.8:
            num_drafts = min(int(self._rng.integers(0, self._max_drafts + 3)), room - 1 - len(host_ids))
        max_new = 1 + len(host_ids) + num_drafts
        # The last id is the worker's, unless it is known here: then it may be a host id as well.
        begins_here = knows_last and self._rng.random() < 0.3
        ids = [sequence.known[-1], *host_ids] if begins_here else host_ids
        sequence.in_flight.append(max_new)
        return _Row(sequence, start, max_new, ids, max_new, num_drafts)

    def _host_drafts(self, sequence: _Sequence, *, room: int) -> list[int]:
        """Some that are right, as far as that is known, then one or two at random, which may be no token ids."""
        if not self._max_drafts or room < 1:
            return []
        num_new = len(sequence.known) - sequence.num_prompt
        right = list(self._outputs.get(sequence.request.request_id, ()))[num_new:]
        num_right = int(self._rng.integers(0, self._max_drafts + 1))
        wrong: list[int] = self._rng.integers(0, self._sizes.num_token_ids, self._rng.integers(0, 3)).tolist()
        if self._rng.random() < 0.2:
            wrong[:1] = [int(self._rng.choice((-1, -(2**31), 2**31 - 1, self._sizes.num_token_ids)))]
        return [*right[:num_right], *wrong][: min(room, self._max_drafts)]

    def _take_slot(self, sequence: _Sequence) -> bool:
        needed = -(-self._sizes.max_model_tokens // self._sizes.block_size_tokens)
        if not self._free_slots or self._sizes.num_blocks < needed * (self._num_running + 1):
            return False
        sequence.slot = self._free_slots.pop()
        output = tuple(sequence.output)
        self._started.append(
            SlotStart(slot=sequence.slot, request=sequence.request, seed=sequence.seed, output_token_ids=output)
        )
        return True

    @property
    def _num_running(self) -> int:
        return sum(each.slot is not None for each in self._sequences)

    def _preempt_at_times(self, sequence: _Sequence) -> None:
        if sequence.slot is None or sequence.in_flight or self._rng.random() > 0.2:
            return
        self.num_preemptions += 1
        self._release(sequence)

    def _release(self, sequence: _Sequence) -> None:
        assert sequence.slot is not None
        self._free_slots.insert(0, sequence.slot)
        self._free_blocks = sequence.blocks + self._free_blocks
        sequence.slot, sequence.blocks, sequence.drafts = None, [], ()
        sequence.is_decoding, sequence.computed = False, 0

    def _columns(self, rows: list[_Row]) -> StepPlan:
        new_blocks: list[list[int]] = []
        for row in rows:
            needed = -(-(row.start + row.count) // self._sizes.block_size_tokens) - len(row.sequence.blocks)
            new_blocks.append([self._free_blocks.pop() for _ in range(needed)])
            row.sequence.blocks += new_blocks[-1]
        self._step += 1
        return StepPlan(
            step=self._step - 1,
            slots=_column([row.sequence.slot for row in rows]),
            starts=_column([row.start for row in rows]),
            counts=_column([row.count for row in rows]),
            num_host_tokens=_column([len(row.host_ids) for row in rows]),
            max_new=_column([row.max_new for row in rows]),
            draft_counts=_column([row.num_drafts for row in rows]),
            token_ids=_column([token_id for row in rows for token_id in row.host_ids]),
            new_block_counts=_column([len(each) for each in new_blocks]),
            new_blocks=_column([block for each in new_blocks for block in each]),
            wants_drafts=np.asarray([self._is_masked(row.sequence) for row in rows], np.bool_),
            started=tuple(self._started),
            token_masks=self._masks(rows),
        )

    def _is_masked(self, sequence: _Sequence) -> bool:
        return self._allowed is not None and self._allowed(sequence.request, sequence.output) is not None

    def _masks(self, rows: list[_Row]) -> dict[tuple[int, int], MaskWords]:
        masks: dict[tuple[int, int], MaskWords] = {}
        for index, row in enumerate(rows):
            if self._allowed is None or not row.max_new:
                continue
            drafts, output = row.host_ids[len(row.host_ids) - row.max_new + 1 :], row.sequence.output
            for position in range(row.max_new):
                tokens = self._allowed(row.sequence.request, output + drafts[:position])
                if tokens is None:
                    break
                masks[index, position] = _words(tokens, self._sizes.num_token_ids)
                if position < len(drafts) and drafts[position] not in tokens:
                    break
        return masks

    # --- results ----------------------------------------------------------------------------------------

    def _apply(self, plan: StepPlan, rows: list[_Row], result: StepResult) -> None:
        assert not result.failed_rows, result.failed_rows
        for index, (row, token_ids) in enumerate(zip(rows, result.tokens_of_rows, strict=True)):
            sequence = row.sequence
            assert (len(token_ids) >= 1) == (row.max_new >= 1), (token_ids, row.max_new)
            assert len(token_ids) <= row.max_new, (token_ids, row.max_new)
            assert max(len(token_ids) - 1, 0) <= result.draft_counts[index] <= max(row.max_new - 1, 0)
            sequence.in_flight.pop(0)
            for offset, logprob in enumerate(result.prompt_logprobs.get(index, ())):
                sequence.prompt_logprobs.setdefault(row.start + 1 + offset, logprob)
            logprobs = result.logprobs.get(index, ())
            assert len(logprobs) in (0, len(token_ids)), (logprobs, token_ids)
            if not sequence.is_finished:
                self.num_compared += int(result.draft_counts[index])
                self.num_accepted += max(len(token_ids) - 1, 0)
                sequence.take(token_ids, logprobs)
            if plan.wants_drafts[index]:
                sequence.drafts = result.next_drafts.get(index, ())
            if sequence.is_finished and not sequence.in_flight:
                self._release(sequence)


def _column(values: Sequence[int | None]) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.asarray(values, np.int32)


def _words(tokens: Sequence[int], num_token_ids: int) -> MaskWords:
    words = np.zeros(mask_words(num_token_ids), np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words

"""`Growth`: how many blocks what runs will still need before enough of it has ended; so many stay free at an admission.

A sequence that is admitted into the last free blocks is preempted as soon as the others have grown, and computes its
prompt again: with long prompts in a small pool that is most of what is computed. How much a sequence will generate is
not known; taken is the mean of those that ended, with more weight on the last ones, and `max_tokens` where that is
less. Then the sequences end in order of what each has left, and of each moment at which one ends it is known what the
others hold: the most of these is what the pool must have room for (as in LightLLM's scheduler, "past-future").

Until a sequence has ended nothing is expected, and each keeps one block in reserve. One that runs alone needs none.
"""

from collections.abc import Iterable

from openinfer_engine.scheduler.sequence import Sequence

_LEAST_WEIGHT = 1 / 16
"""Of the sequence that ended last, in the mean; the first ones weigh alike."""


class Growth:
    """Of one run queue.

    Args:
        block_size_tokens: of its pool.
        num_lasting: block tables without a window; those with one give back what they grow by.
    """

    def __init__(self, *, block_size_tokens: int, num_lasting: int) -> None:
        self._block_tokens = block_size_tokens
        self.num_lasting = num_lasting
        self._mean_tokens = 0.0
        self._num_ended = 0

    def note(self, generated_tokens: int) -> None:
        """A sequence has ended by itself, with so many tokens."""
        self._num_ended += 1
        self._mean_tokens += (generated_tokens - self._mean_tokens) * max(_LEAST_WEIGHT, 1 / self._num_ended)

    def most_blocks(self, num_sequences: int) -> int:
        """At least what `blocks` says of any so many sequences; O(1)."""
        return num_sequences * self.num_lasting * -int(-self._mean_tokens // self._block_tokens)

    def blocks(self, sequences: Iterable[Sequence]) -> int:
        """Blocks beyond those of all known tokens that are needed at the same time, at most; O(n log n)."""
        size = self._block_tokens
        left_and_held = sorted(map(self._left_and_held, sequences), reverse=True)
        held = most = 0
        for number, (left_tokens, held_tokens) in enumerate(left_and_held, 1):
            held += held_tokens
            # when this one ends: it and those that go on have as much more as it had left
            most = max(most, held + number * left_tokens)
        return self.num_lasting * max(0, -(-(most - held) // size))

    def _left_and_held(self, sequence: Sequence) -> tuple[int, int]:
        expected_tokens = round(self._mean_tokens) - sequence.completion_tokens
        left_tokens = max(0, min(expected_tokens, sequence.final_tokens - sequence.known_tokens))
        return left_tokens, sequence.known_tokens - sequence.cached_tokens

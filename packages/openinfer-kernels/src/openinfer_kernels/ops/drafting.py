"""Drafts that are looked up: what followed the last tokens of a sequence where they stood before."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from openinfer_kernels.ops.arrays import Array

LONGEST_NGRAM = 63
"""Bound of `NgramRule.n_max` and `reference_n_max`."""
LONGEST_HISTORY = 1 << 25
"""Bound of the ids that a slot has room for."""


class NgramMatch(StrEnum):
    """Which of several matches of one length is taken."""

    EARLIEST = "earliest"
    """The first one in the sequence: vLLM's rule."""
    LATEST = "latest"
    """The last one. It may overlap what it is matched with; drafts then go on with drafts, as copies in LZ77 do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramRule:
    """How drafts are looked up; integers in `1 .. LONGEST_NGRAM`, n_min at most n_max and at most reference_n_max."""

    n_min: int
    """Tokens that must match at least."""
    n_max: int
    """Tokens of the end of the sequence that are compared at most: of more the match is not longer."""
    reference_n_max: int
    """The same where a reference is looked up."""
    match: NgramMatch
    max_tokens: int
    """Longest sequence: drafts end there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramHistory:
    """What is known of the sequence in each of `S` slots. `Ops.ngram_drafts` keeps it up to date; all int32."""

    ids: Array
    """`[S, W]`: the ids of a reference, then those of the sequence."""
    known: Array
    """`[S]` tokens of the sequence among them."""
    references: Array
    """`[S]` ids before its first token: a text that the sequence is expected to repeat, after some ids that it is
    expected to follow. 0: there is none, and the sequence is looked up in itself."""
    drafts: Array
    """`[S, k]` what was drafted last, -1 from the first that is none."""


class NgramOps(Protocol):
    """Drafts that are looked up."""

    def ngram_drafts(
        self, history: NgramHistory, slots: Array, last_ids: Array, lengths: Array, *, rule: NgramRule
    ) -> Array:
        """Takes in what sequences have grown by, and drafts what followed their last tokens before.

        Since the last call a sequence has grown by some of its drafts, from the front, and its last id. Of all places
        where up to `n_max` of its last tokens stand, and more follow, that with most of them is taken, if these are
        `n_min`. With `NgramMatch.EARLIEST` and no reference this is the rule of vLLM
        (`vllm/v1/spec_decode/ngram_proposer.py`, `_find_longest_matched_ngram_and_propose_tokens`). A reference is
        looked up alone, and drafts end with it.

        Args:
            history: mutated, in the rows of `slots`.
            slots: `[R]` int32, each at most once.
            last_ids: `[R]` int32.
            lengths: `[R]` int32 tokens of each sequence, the last one included. A row that has not grown gets no
                drafts, nor does one that its slot has no room for; ids that no draft has are unknown, -1.
            rule: of all rows.

        Returns:
            `[R, k]` int32, -1 from each row's first that is none.
        """
        ...

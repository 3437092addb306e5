"""What drafters ask of a device.

Drafts that are looked up: what followed the last tokens of a sequence where they stood before. And hidden states of a
model, which drafters that are models go on from.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from openinfer_kernels.ops.arrays import Array
from openinfer_kernels.ops.batch import AttentionBatch
from openinfer_kernels.ops.cache import PagedCache
from openinfer_kernels.ops.quantised import QuantisedWeight

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


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenMemory:
    """Hidden states that a drafter keeps of the sequence in each of `S` slots, all on the device."""

    last: Array
    """`[S, h]` before the sequence's next token; rows may lie apart."""
    tail: Array
    """`[S, n, h]` of the last n tokens of the row that was shown last, from its end."""
    ends: Array
    """`[S]` int32 position of that row's last token."""
    begun: Array
    """`[S]` int32, 1 where a sequence began and no row of it was shown yet."""
    boundary: PagedCache | None = None
    """The first of the layers of a block that hold the hidden state of its last token, in the first numbers of theirs:
    a cached prefix has it. None: it comes with the recurrent states that `last` is one of."""
    boundary_layers: int = 0


class DraftingOps(Protocol):
    """What drafters that read hidden states have in common. A pair of the hidden state at `p - 1` and the token at `p`
    stands at position `p`: a row's first pair needs the hidden state of the step before, and a row with refused drafts
    goes on from that of its last accepted token. Rows with slot -1 and tokens after the last row's are padding.
    """

    def hidden_before(self, hidden: Array, memory: HiddenMemory, slots: Array, batch: AttentionBatch) -> Array:
        """`[T, h]`: the hidden state before each token of a step, whose own are `hidden [T, h]`.

        Zeros before position 0 and for padding. Rows whose sequence has begun take what the block before them has, if
        they begin with a block, else zeros: then drafts are a little worse there.

        Args:
            hidden: of the step.
            memory: `last` and `begun` are changed, in the rows of `slots`.
            slots: `[R]` int32.
            batch: of the step; blocks have `block_tokens` tokens.
        """
        ...

    def keep_hidden(self, hidden: Array, memory: HiddenMemory, slots: Array, batch: AttentionBatch) -> None:
        """After a step, whose hidden states are `hidden [T, h]`: changes `last`, `tail`, `ends`, and boundaries."""
        ...

    def settle_hidden(
        self, memory: HiddenMemory, slots: Array, lengths: Array, *, hidden: Array | None = None
    ) -> Array:
        """`[n, h]` before the last known token of sequences, which are then the `last` that they go on from.

        Args:
            memory: `last` is changed.
            slots: `[n]` int32, each at most once.
            lengths: `[n]` int32 known tokens, the last included: the row shown last ended at most n positions later.
            hidden: what they are, where the caller knows it.
        """
        ...

    def join_columns(self, *parts: Array) -> Array:
        """`[T, sum of widths]` in the compute dtype: matrices of float32 or the compute dtype next to each other.

        On a GPU their widths are multiples of 8. One matrix alone is rounded: a residual stream for a product.
        """
        ...

    def clear_rows(self, matrix: Array, positions: Array, position: int) -> None:
        """Writes zeros into the rows of `matrix [T, w]`, in the compute dtype, whose `positions [T]` are this one."""
        ...

    def put_ids(self, ids: Array, matrix: Array, column: int) -> None:
        """Writes token `ids [n]` int32 into a column of `matrix [n, k]` int32."""
        ...

    def add_logits(self, target: Array, logits: Array, *, first: int, step: int) -> None:
        """Adds row `first + i * step` of `logits [m, V]` to row `i` of `target [n, V]`; both float32, which is changed.

        Args:
            target: of contiguous rows.
            logits: rows may lie apart.
            first: below `step`.
            step: rows of `logits` for each of the target's; there are at least `n * step`.
        """
        ...

    def draft_head(self, head: Array) -> QuantisedWeight:
        """`head [V, h]` in E4M3 with a scale for each row, `max |w| / 448`, for `draft_logits`: half as much to read.

        Drafts change no token, so that a head which is rounded costs acceptance alone.
        """
        ...

    def draft_logits(self, hidden: Array, head: QuantisedWeight) -> Array:
        """`[n, V]` float32 for `hidden [n, h]` and what `draft_head` made; a sum may depend on `n`."""
        ...

    def draft_ids(self, logits: Array, drafts: Array, column: int, *, token_ids: Array | None = None) -> Array:
        """`[n]` int32, the likeliest of each row of `logits [n, V]`, which `drafts [n, k]` has in a column, too.

        Of a row with numbers that are not finite it is some id.

        Args:
            logits: float32.
            drafts: int32, of contiguous rows; changed.
            column: of it.
            token_ids: `[V]` int32, what the ids of the logits are in the model's vocabulary; None: the same.
        """
        ...

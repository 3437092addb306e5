"""One token per row from logits, and log-probabilities."""

from dataclasses import dataclass
from typing import Protocol

from openinfer_kernels.ops.arrays import Array
from openinfer_kernels.ops.sampling_columns import SamplingColumns


@dataclass(frozen=True, slots=True, kw_only=True)
class Bias:
    """Additive changes of single logits, for the rows that have any; `-inf` forbids a token."""

    rows: Array
    """`[b]` rows of the logits, each once; -1 names none."""
    counts: Array
    """`[b]` changes of each row, from the front of the next two."""
    token_ids: Array
    """`[b, n]`, of one row each once."""
    values: Array
    """`[b, n]` float32, finite or `-inf`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Penalties for the rows that ask for any; other rows are not named."""

    rows: Array
    """`[p]` rows of the logits, each once; -1 names none."""
    presence: Array
    """`[p]` float32, subtracted once from every token that occurs in the output."""
    frequency: Array
    """`[p]` float32, subtracted once per occurrence in the output."""
    repetition: Array
    """`[p]` float32 > 0: positive logits of tokens seen in prompt or output are divided by it, others multiplied."""
    output_counts: Array
    """`[p, V]` occurrences of each token in the output so far."""
    prompt_seen: Array
    """`[p, V]` bool, whether a token occurs in the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMask:
    """Which tokens a grammar allows, for the rows that have one."""

    rows: Array
    """`[m]` rows of the logits, each once; -1 names none."""
    bits: Array
    """`[m, ceil(V / 32)]` uint32; bit `i % 32` of word `i // 32` set: token i may be sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch(SamplingColumns):
    """How each row of a `[R, V]` logits array is sampled; all arrays `[R]` unless said otherwise.

    The order is: repetition, frequency and presence penalties; bias; token mask; division by the temperature;
    min-p; top-k; top-p over what top-k left, renormalised; one draw. Ids from `num_token_ids` on are padding
    of the embedding and never sampled. Rows with temperature 0 take the largest logit (the lowest id among
    equals) after penalties, bias and mask.

    Among equal logits top-k and top-p keep the lower ids first, so that top-k 1 is the greedy choice and
    exactly k tokens are kept. Top-p keeps the fewest of the likeliest tokens whose probabilities sum to at
    least `top_p`.

    A row has no answer where its largest logit after penalties, bias and mask is not finite: every token is
    forbidden, or a NaN came out of the model. Its token is -1, the other rows are sampled as ever, and the
    engine fails that request alone.

    The draw of a row depends on its seed and position only, never on the batch: the uniform number in [0, 1)
    is made from the first word of Philox-4x32-10 (Salmon et al., SC 2011), `word * 2**-32`, with the seed as
    key and the position as counter (low words first, the upper two counter words 0), and the token is found
    by inverting the cumulative distribution in order of token id.
    """

    num_token_ids: int
    bias: Bias | None = None
    penalties: Penalties | None = None
    token_mask: TokenMask | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Log-probabilities of chosen tokens under the unmodified logits (natural logarithm).

    A chosen id of -1 (a row that `Ops.sample` had no answer for) gives NaN and rank 0.
    """

    chosen: Array
    """`[R]` float32 of the chosen ids."""
    ranks: Array
    """`[R]` 1 + the number of tokens with a strictly larger logit, over the whole vocabulary: the true rank."""
    top_ids: Array
    """`[R, top]` the likeliest tokens, best first, equal ones by lower id."""
    top: Array
    """`[R, top]` float32, of `top_ids`."""


class SamplingOps(Protocol):
    """One token per row from logits, and log-probabilities."""

    def sample(self, logits: Array, sampling: SamplingBatch) -> Array:
        """One token per row of `logits [R, V]` (not mutated): `[R]` int32, -1 where a row has no finite maximum.

        See `SamplingBatch` for the rules.
        """
        ...

    def logprobs(self, logits: Array, token_ids: Array, *, top: int) -> Logprobs:
        """Log-probabilities and true ranks of `token_ids [R]` and of the `top <= 1024` likeliest tokens per row."""
        ...

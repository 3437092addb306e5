"""Steps that a GPU worker captures, so that replaying one costs the host next to nothing.

decode steps    one graph for the forward pass, one for each way of sampling: plain, or full with penalties, biases,
                masks and log-probabilities
mixed batches   prefill chunks and decode rows together, up to a number of tokens below which the device would wait
                for launches: the forward pass alone
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from openinfer_engine.cuda.step_buckets import BY_TOKEN_TOKENS
from openinfer_kernels import Array, Logprobs
from openinfer_kernels.cuda.common.graphs import Graph, Stream
from openinfer_kernels.cuda.sampling.step_inputs import DecodeInputs, MixedInputs


@dataclass(frozen=True, slots=True)
class CapturedSampling:
    """A way of sampling."""

    graph: Graph
    token_ids: Array
    logprobs: Logprobs | None


@dataclass(frozen=True, slots=True)
class CapturedDecode:
    """Decode steps of so many rows."""

    inputs: DecodeInputs
    forward: Graph
    hidden: Array
    plain: CapturedSampling
    full: CapturedSampling


@dataclass(frozen=True, slots=True)
class CapturedMixed:
    """Mixed batches of so many tokens; `hidden` is what the forward pass leaves."""

    inputs: MixedInputs
    forward: Graph
    hidden: Array
    by_token: Graph | None = None
    """The same for a few rows of a few tokens, whose attention takes each token for a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """What there is to capture; each queues kernels and returns where their results will be."""

    decode: Callable[[DecodeInputs], tuple[Array, Array]]
    """Logits and hidden states."""
    sample: Callable[[Array, DecodeInputs], Array]
    sample_fully: Callable[[Array, DecodeInputs], tuple[Array, Logprobs]]
    mixed_hidden: Callable[[MixedInputs], Array]
    hidden_by_token: Callable[[MixedInputs, Array], None] | None = None
    """Leaves the same in an array that is given; None where attention has the rows as they are."""


def capture_decode(stream: Stream, inputs: DecodeInputs, work: StepWork) -> CapturedDecode:
    forward, (logits, hidden) = stream.capture(lambda: work.decode(inputs))
    plain, token_ids = stream.capture(lambda: work.sample(logits, inputs))
    full, (full_ids, logprobs) = stream.capture(lambda: work.sample_fully(logits, inputs))
    samplings = CapturedSampling(plain, token_ids, None), CapturedSampling(full, full_ids, logprobs)
    return CapturedDecode(inputs, forward, hidden, *samplings)


def capture_mixed(stream: Stream, inputs: MixedInputs, work: StepWork) -> CapturedMixed:
    forward, hidden = stream.capture(lambda: work.mixed_hidden(inputs))
    by_token = None
    if work.hidden_by_token is not None and len(inputs.token_ids) <= BY_TOKEN_TOKENS:
        by_token, _ = stream.capture(partial(work.hidden_by_token, inputs, hidden))
    return CapturedMixed(inputs, forward, hidden, by_token)

"""What the server counts: `metrics_page` shows it, `docs/reference/metrics.md` promises its names."""

from collections import Counter as Counts
from collections.abc import Iterable

from openinfer_core.events import FailureKind, FinishReason
from openinfer_server.observability.exposition import Counter, Histogram
from openinfer_server.parsers.output import ParserFault
from openinfer_server.tools.types import DROPPED_TOOLS

# Times between tokens, and before the first.
TOKEN_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0),
)
LAG_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
# Parts of a request's life: vLLM's bounds from 0.3 s on, and shorter ones.
REQUEST_BOUNDS_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class ServerMetrics:
    """Counters and histograms of one server.

    Args:
        max_model_tokens: the engine's context; the bounds of token counts go up to it.
    """

    def __init__(self, *, max_model_tokens: int) -> None:
        self.responses: Counts[tuple[str, int]] = Counts()  # by route and status
        self.ended: Counts[str] = Counts(dict.fromkeys(FinishReason, 0))  # engine requests that ended well, by reason
        self.failures: Counts[str] = Counts(dict.fromkeys(FailureKind, 0))  # engine requests that failed, by kind
        self.prompt_tokens = Counter()
        self.cached_tokens = Counter()
        self.generated_tokens = Counter()
        self.known_characters = Counter()  # of rendered chats whose ids were known
        self.encoded_characters = Counter()  # of those that were encoded
        self.prefix_breaks = Counter()  # turns that left the one before of their conversation
        self.prefix_break_tokens = Counter()  # of the turns before, that are lost by it
        self.dropped_tools: Counts[str] = Counts(dict.fromkeys(DROPPED_TOOLS, 0))  # by their type
        self.slow_clients = Counter()
        self.faults = Counter()
        self.parser_faults: Counts[str] = Counts()  # requests that failed because a parser raised, by the parser's kind
        self.event_loop_lag_s = Histogram(LAG_BOUNDS_S)
        self.time_to_first_token_s = Histogram(TOKEN_BOUNDS_S)
        self.inter_token_s = Histogram(TOKEN_BOUNDS_S)
        self.time_per_output_token_s = Histogram(TOKEN_BOUNDS_S)
        self.queue_s = Histogram(REQUEST_BOUNDS_S)
        self.prefill_s = Histogram(REQUEST_BOUNDS_S)
        self.decode_s = Histogram(REQUEST_BOUNDS_S)
        self.inference_s = Histogram(REQUEST_BOUNDS_S)
        self.request_s = Histogram(REQUEST_BOUNDS_S)
        counts = tuple(one_two_five(max_model_tokens))
        self.request_prompt_tokens = Histogram(counts)
        self.request_generation_tokens = Histogram(counts)
        self.request_max_tokens = Histogram(counts)

    def count_fault(self, error: Exception) -> None:
        """Counts a fault of this server, or of a parser, inside one request."""
        self.faults.value += 1
        if isinstance(error, ParserFault):
            self.parser_faults[error.kind] += 1

    def count_scheduled(self, *, prompt_tokens: int, cached_tokens: int, queued_s: float) -> None:
        self.prompt_tokens.value += prompt_tokens
        self.cached_tokens.value += cached_tokens
        self.queue_s.observe(queued_s)

    def count_first_token(self, *, since_submission_s: float, queued_s: float) -> None:
        self.time_to_first_token_s.observe(since_submission_s)
        self.prefill_s.observe(max(0.0, since_submission_s - queued_s))

    def count_complete(self, *, prompt_tokens: int, generated_tokens: int, total_s: float) -> None:
        """Counts a request that ended well, and not by an abort."""
        self.request_prompt_tokens.observe(prompt_tokens)
        self.request_generation_tokens.observe(generated_tokens)
        self.request_s.observe(total_s)

    def count_generated(self, *, generated_tokens: int, decode_s: float, inference_s: float) -> None:
        """Counts the generation of such a request, if it had a token."""
        self.decode_s.observe(decode_s)
        self.inference_s.observe(inference_s)
        if generated_tokens > 1:
            self.time_per_output_token_s.observe(decode_s / (generated_tokens - 1))


def one_two_five(limit: int) -> Iterable[int]:
    """1, 2, 5, 10, 20, 50, … up to a limit."""
    scale = 1
    while scale <= limit:
        yield from (scale * step for step in (1, 2, 5) if scale * step <= limit)
        scale *= 10

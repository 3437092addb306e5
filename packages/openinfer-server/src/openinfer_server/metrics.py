"""What the server counts, under the promised prefix `openinfer_`."""

from collections import Counter as Tally
from collections.abc import Iterator

from openinfer_core.engine import EngineInfo, EngineStats
from openinfer_server.exposition import Counter, Histogram, Sample, render_family, render_histogram
from openinfer_server.parsers.output import ParserFault

LATENCY_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
REQUEST_BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)


class ServerMetrics:
    """Counters and histograms of one server."""

    def __init__(self) -> None:
        self.responses: Tally[tuple[str, int]] = Tally()
        """By route and status."""
        self.requests: Tally[str] = Tally()
        """Engine requests by outcome: a finish reason, or a failure's kind."""
        self.prompt_tokens = Counter()
        self.cached_tokens = Counter()
        self.generated_tokens = Counter()
        self.slow_clients = Counter()
        self.faults = Counter()
        self.parser_faults: Tally[str] = Tally()
        """Requests that failed because a parser raised, by the parser's kind."""
        self.time_to_first_token_s = Histogram(LATENCY_BOUNDS_S)
        self.inter_token_s = Histogram(LATENCY_BOUNDS_S)
        self.queued_s = Histogram(LATENCY_BOUNDS_S)
        self.request_s = Histogram(REQUEST_BOUNDS_S)

    def count_fault(self, error: Exception) -> None:
        """Counts a fault of this server, or of a parser, inside one request."""
        self.faults.value += 1
        if isinstance(error, ParserFault):
            self.parser_faults[error.kind] += 1

    def render(self, info: EngineInfo, stats: EngineStats | None, *, open_requests: int) -> bytes:
        """Everything in Prometheus' text format.

        Args:
            info: the engine's constants.
            stats: the engine's own numbers, None if it has ended.
            open_requests: engine requests that have not ended.
        """
        lines = [*self._own(info, open_requests)]
        lines += render_family(
            "openinfer_engine_up", "gauge", "1 while the engine lives.", [((), int(stats is not None))]
        )
        if stats is not None:
            lines += _of_engine(stats)
        return "\n".join([*lines, ""]).encode()

    def _own(self, info: EngineInfo, open_requests: int) -> Iterator[str]:
        labels = (("model", info.model), ("family", info.family))
        yield from render_family("openinfer_info", "gauge", "What is served.", [(labels, 1)])
        by_route: list[Sample] = [
            ((("route", route), ("status", str(status))), count)
            for (route, status), count in sorted(self.responses.items())
        ]
        yield from render_family(
            "openinfer_http_responses_total", "counter", "Responses by route and status.", by_route
        )
        outcomes: list[Sample] = [((("outcome", name),), count) for name, count in sorted(self.requests.items())]
        yield from render_family("openinfer_requests_total", "counter", "Ended engine requests by outcome.", outcomes)
        yield from render_family(
            "openinfer_requests_open", "gauge", "Engine requests that have not ended.", [((), open_requests)]
        )
        parser_faults: list[Sample] = [((("kind", kind),), self.parser_faults[kind]) for kind in ("reasoning", "tool")]
        yield from render_family(
            "openinfer_parser_faults_total", "counter", "Requests failed by a parser that raised.", parser_faults
        )
        for name, text, counter in (
            ("openinfer_prompt_tokens_total", "Prompt tokens of ended requests.", self.prompt_tokens),
            ("openinfer_cached_prompt_tokens_total", "Prompt tokens found in the prefix cache.", self.cached_tokens),
            ("openinfer_generated_tokens_total", "Tokens received from the engine.", self.generated_tokens),
            ("openinfer_slow_clients_dropped_total", "Connections dropped for not reading.", self.slow_clients),
            ("openinfer_request_faults_total", "Faults of this server inside one request.", self.faults),
        ):
            yield from render_family(name, "counter", text, [((), counter.value)])
        for name, text, histogram in (
            ("openinfer_time_to_first_token_seconds", "Submission to first token.", self.time_to_first_token_s),
            ("openinfer_inter_token_latency_seconds", "Between tokens of one request.", self.inter_token_s),
            ("openinfer_queue_seconds", "Submission to the first step.", self.queued_s),
            ("openinfer_request_seconds", "Submission to the end.", self.request_s),
        ):
            yield from render_histogram(name, text, histogram)


def _of_engine(stats: EngineStats) -> Iterator[str]:
    usage = stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
    for name, kind, text, value in (
        ("openinfer_requests_running", "gauge", "Sequences in the current batch.", stats.running),
        ("openinfer_requests_waiting", "gauge", "Requests in the queue.", stats.waiting),
        ("openinfer_kv_blocks_used", "gauge", "KV blocks of running sequences.", stats.blocks_used),
        ("openinfer_kv_blocks_total", "gauge", "KV blocks there are.", stats.blocks_total),
        ("openinfer_kv_usage_ratio", "gauge", "Used share of the KV blocks.", usage),
        ("openinfer_engine_step_age_seconds", "gauge", "Since the last step, while there is work.", stats.step_age_s),
        ("openinfer_engine_steps_total", "counter", "Steps of the engine.", stats.steps),
        ("openinfer_engine_prompt_tokens_total", "counter", "Prompt tokens computed.", stats.prompt_tokens),
        ("openinfer_engine_cached_tokens_total", "counter", "Prompt tokens found in a cache.", stats.cached_tokens),
        ("openinfer_engine_generated_tokens_total", "counter", "Tokens sampled.", stats.generated_tokens),
        ("openinfer_engine_preemptions_total", "counter", "Sequences preempted.", stats.preemptions),
        ("openinfer_engine_wasted_rows_total", "counter", "Rows computed for nothing.", stats.wasted_rows),
        ("openinfer_engine_policy_faults_total", "counter", "Faults of the queue policy.", stats.policy_faults),
        ("openinfer_engine_failed_requests_total", "counter", "Requests that failed.", stats.failed_requests),
    ):
        yield from render_family(name, kind, text, [((), value)])

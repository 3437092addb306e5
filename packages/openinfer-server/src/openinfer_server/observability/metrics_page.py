"""`/metrics`: what the server counted and what the engine says, in Prometheus' text format.

Every name begins with `openinfer_`; where vLLM has a metric of the same meaning the rest of the name, the labels
`model_name` and `finished_reason`, and the unit are vLLM's. `docs/reference/metrics.md` promises them.
`metric_names.py` gives these vLLM's names where the user asks for them.
"""

import time
from collections import Counter as Counts
from collections.abc import Callable, Iterator, Sequence

from openinfer_core.engine import MASK_OUTCOMES, EngineInfo, EngineState, EngineStats, GrammarStats, KvTransferStats
from openinfer_server.observability.exposition import Sample, render_family, render_histogram
from openinfer_server.observability.metric_names import MetricsNames, renamed
from openinfer_server.observability.metrics import ServerMetrics
from openinfer_server.observability.metrics_snapshot import BudgetUse

Labels = Sequence[tuple[str, str]]
PARSER_KINDS = ("reasoning", "tool")


def metrics_page(
    metrics: ServerMetrics,
    info: EngineInfo,
    stats: EngineStats | None,
    *,
    model_name: str,
    open_requests: int,
    budgets: Sequence[BudgetUse] = (),
    names: MetricsNames = MetricsNames.OPENINFER,
    clock: Callable[[], float] = time.time,
) -> bytes:
    """The whole page; `stats` is None if the engine has ended, and then there are none of its metrics."""
    model = (("model_name", model_name),)
    lines = [*_of_server(metrics, info, model, open_requests), *_of_budgets(budgets)]
    lines += render_family("openinfer_engine_up", "gauge", "1 while the engine lives.", [((), int(stats is not None))])
    if stats is not None:
        lines += _of_engine(stats, model)
        lines += _of_adapters(stats, info, now_s=clock())
    return "\n".join([*renamed(lines, names), ""]).encode()


def _of_server(metrics: ServerMetrics, info: EngineInfo, model: Labels, open_requests: int) -> Iterator[str]:
    yield from _constants(info)
    responses: list[Sample] = [
        ((("route", route), ("status", str(status))), count)
        for (route, status), count in sorted(metrics.responses.items())
    ]
    yield from render_family("openinfer_http_responses_total", "counter", "Responses by route and status.", responses)
    yield from _by_label(
        "openinfer_request_success_total", "Requests that ended well.", metrics.ended, "finished_reason", model
    )
    yield from _by_label("openinfer_request_failures_total", "Requests that failed.", metrics.failures, "kind", model)
    parser_faults = Counts({kind: metrics.parser_faults[kind] for kind in PARSER_KINDS})
    yield from _by_label(
        "openinfer_parser_faults_total", "Requests failed by a parser that raised.", parser_faults, "kind", ()
    )
    tools = (("field", "tools"),)
    text = "Fields of requests dropped with notice."
    yield from _by_label("openinfer_dropped_fields_total", text, metrics.dropped_tools, "type", tools)
    yield from render_family("openinfer_requests_open", "gauge", "Requests that have not ended.", [((), open_requests)])
    for name, text, counter in (
        ("openinfer_slow_clients_dropped_total", "Connections dropped for not reading.", metrics.slow_clients),
        ("openinfer_request_faults_total", "Faults of this server inside one request.", metrics.faults),
        ("openinfer_known_prompt_characters_total", "Of chats, encoded before.", metrics.known_characters),
        ("openinfer_encoded_prompt_characters_total", "Of chats, encoded.", metrics.encoded_characters),
        ("openinfer_prefix_breaks_total", "Turns that differ from the one before.", metrics.prefix_breaks),
        ("openinfer_prefix_break_tokens_total", "Of turns before, lost by it.", metrics.prefix_break_tokens),
    ):
        yield from render_family(name, "counter", text, [((), counter.value)])
    for name, text, counter in (
        ("openinfer_prompt_tokens_total", "Prompt tokens of scheduled requests.", metrics.prompt_tokens),
        ("openinfer_generation_tokens_total", "Tokens sampled, stop tokens included.", metrics.generated_tokens),
        ("openinfer_prefix_cache_queries_total", "Prompt tokens looked for in the cache.", metrics.prompt_tokens),
        ("openinfer_prefix_cache_hits_total", "Prompt tokens found there.", metrics.cached_tokens),
    ):
        yield from render_family(name, "counter", text, [(model, counter.value)])
    for name, text, histogram in (
        ("openinfer_event_loop_lag_seconds", "How late the event loop woke.", metrics.event_loop_lag_s),
        ("openinfer_time_to_first_token_seconds", "Submission to first token.", metrics.time_to_first_token_s),
        ("openinfer_inter_token_latency_seconds", "Between tokens of a request.", metrics.inter_token_s),
        ("openinfer_request_time_per_output_token_seconds", "Their mean.", metrics.time_per_output_token_s),
        ("openinfer_request_queue_time_seconds", "Submission to the first step.", metrics.queue_s),
        ("openinfer_request_prefill_time_seconds", "First step to first token.", metrics.prefill_s),
        ("openinfer_request_decode_time_seconds", "First to last token.", metrics.decode_s),
        ("openinfer_request_inference_time_seconds", "First step to last token.", metrics.inference_s),
        ("openinfer_e2e_request_latency_seconds", "Submission to the end.", metrics.request_s),
        ("openinfer_request_prompt_tokens", "Prompt tokens of a request.", metrics.request_prompt_tokens),
        ("openinfer_request_generation_tokens", "Generated tokens.", metrics.request_generation_tokens),
        ("openinfer_request_params_max_tokens", "What max_tokens was.", metrics.request_max_tokens),
    ):
        yield from render_histogram(name, text, histogram, model)


def _of_budgets(budgets: Sequence[BudgetUse]) -> Iterator[str]:
    for name, kind, text, field in (
        ("openinfer_budget_used", "gauge", "How much of a budget is taken.", "used"),
        ("openinfer_budget_limit", "gauge", "How much of it there is.", "limit"),
        ("openinfer_budget_refused_total", "counter", "What was refused or ended for it.", "refused"),
    ):
        samples: list[Sample] = [((("budget", each.budget),), getattr(each, field)) for each in budgets]
        yield from render_family(name, kind, text, samples)


def _constants(info: EngineInfo) -> Iterator[str]:
    labels = (("model", info.model), ("family", info.family))
    yield from render_family("openinfer_info", "gauge", "What is served.", [(labels, 1)])
    cache = (("block_size", str(info.block_size_tokens)), ("num_gpu_blocks", str(info.num_blocks)))
    yield from render_family("openinfer_cache_config_info", "gauge", "How KV memory is cut.", [(cache, 1)])
    memory: list[Sample] = [((("purpose", name),), size) for name, size in info.memory_bytes.items()]
    yield from render_family("openinfer_engine_memory_bytes", "gauge", "What its device's memory is for.", memory)


def _by_label(name: str, text: str, tally: "Counts[str]", label: str, labels: Labels) -> Iterator[str]:
    samples: list[Sample] = [((*labels, (label, str(key))), count) for key, count in sorted(tally.items())]
    yield from render_family(name, "counter", text, samples)


def _of_adapters(stats: EngineStats, info: EngineInfo, *, now_s: float) -> Iterator[str]:
    """VLLM's labels, by which routers send a request to where its adapter is; the value is the time."""
    if not info.max_adapters:
        return
    labels = (
        ("max_lora", str(info.max_adapters)),
        ("running_lora_adapters", ",".join(each.name for each in stats.adapters if each.running)),
        ("waiting_lora_adapters", ",".join(each.name for each in stats.adapters if each.waiting)),
    )
    yield from render_family("openinfer_lora_requests_info", "gauge", "Adapters in use.", [(labels, now_s)])
    yield from render_family(
        "openinfer_lora_adapters", "gauge", "Adapters that requests may name.", [((), len(stats.adapters))]
    )


def _of_engine(stats: EngineStats, model: Labels) -> Iterator[str]:
    usage = stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
    for name, kind, text, value in (
        ("openinfer_num_requests_running", "gauge", "Sequences in the current batch.", stats.running),
        ("openinfer_num_requests_waiting", "gauge", "Requests in the queue.", stats.waiting),
        ("openinfer_num_tokens_waiting", "gauge", "Tokens that they have yet to compute.", stats.waiting_tokens),
        ("openinfer_kv_cache_usage_perc", "gauge", "Used share of the KV blocks; 1 is all.", usage),
        ("openinfer_num_preemptions_total", "counter", "Sequences preempted.", stats.preemptions),
        ("openinfer_share_preemptions_total", "counter", "Of these, for another tenant.", stats.share_preemptions),
        ("openinfer_share_rows_sat_out_total", "counter", "Decode rows in turns.", stats.share_rows_sat_out),
        ("openinfer_active_tenants", "gauge", "Tenants with requests running or waiting.", stats.tenants),
        ("openinfer_protected_blocks", "gauge", "Blocks of prefixes kept while others wait.", stats.protected_blocks),
    ):
        yield from render_family(name, kind, text, [(model, value)])
    for name, kind, text, value in (
        ("openinfer_kv_blocks_used", "gauge", "KV blocks of running sequences.", stats.blocks_used),
        ("openinfer_kv_blocks", "gauge", "KV blocks there are.", stats.blocks_total),
        ("openinfer_kv_blocks_retained", "gauge", "KV blocks asked to be kept longer.", stats.retained_blocks),
        ("openinfer_engine_step_age_seconds", "gauge", "Since the last step, while there is work.", stats.step_age_s),
        ("openinfer_engine_steps_total", "counter", "Steps of the engine.", stats.steps),
        ("openinfer_engine_prompt_tokens_total", "counter", "Prompt tokens computed.", stats.prompt_tokens),
        ("openinfer_engine_cached_tokens_total", "counter", "Prompt tokens found in a cache.", stats.cached_tokens),
        ("openinfer_engine_generated_tokens_total", "counter", "Tokens sampled.", stats.generated_tokens),
        ("openinfer_engine_state_snapshots", "gauge", "Copies of recurrent states.", stats.state_snapshots),
        (
            "openinfer_engine_evicted_state_snapshots_total",
            "counter",
            "Copies of recurrent states given up for others.",
            stats.evicted_state_snapshots,
        ),
        ("openinfer_engine_wasted_rows_total", "counter", "Rows computed for nothing.", stats.wasted_rows),
        ("openinfer_engine_policy_faults_total", "counter", "Faults of the queue policy.", stats.policy_faults),
        ("openinfer_engine_drafter_faults_total", "counter", "Faults of the drafter.", stats.drafter_faults),
        ("openinfer_engine_failed_requests_total", "counter", "Requests that failed.", stats.failed_requests),
        ("openinfer_weight_updates_total", "counter", "Times the weights were replaced.", stats.weight_updates),
        (
            "openinfer_failed_weight_updates_total",
            "counter",
            "Times that left the engine without weights.",
            stats.failed_weight_updates,
        ),
        ("openinfer_engine_sleeps_total", "counter", "Times the engine gave its memory back.", stats.sleeps),
    ):
        yield from render_family(name, kind, text, [((), value)])
    states: list[Sample] = [((("state", state),), int(state is stats.state)) for state in EngineState]
    yield from render_family("openinfer_engine_state", "gauge", "Whether it serves; 1 is the state it is in.", states)
    version: list[Sample] = [((("version", stats.weights_version),), 1)]
    yield from render_family("openinfer_weights_info", "gauge", "What KV is told apart by; empty at first.", version)
    yield from _grammar_lines(stats.grammars or GrammarStats())
    yield from _plugin_lines(stats)
    yield from _of_drafts(stats, model)
    yield from tier_lines(stats)
    yield from _transfer_lines(stats.kv_transfer or KvTransferStats())


def _transfer_lines(stats: KvTransferStats) -> Iterator[str]:
    for name, text, value in (
        ("openinfer_kv_transfer_prompts_total", "Prompts left for other engines.", stats.prompts),
        ("openinfer_kv_transfer_tokens_total", "Their tokens that others could read.", stats.tokens),
        ("openinfer_kv_transfer_partial_prompts_total", "Prompts that were left in part.", stats.partial_prompts),
        ("openinfer_kv_transfer_mismatches_total", "Blocks of another layout or prompt.", stats.mismatches),
        ("openinfer_kv_transfer_late_look_ups_total", "Requests that tiers said nothing to.", stats.late_look_ups),
    ):
        yield from render_family(name, "counter", text, [((), value)])


def _grammar_lines(stats: GrammarStats) -> Iterator[str]:
    for name, kind, text, value in (
        ("openinfer_grammars_kept", "gauge", "Grammars that are there at once.", stats.kept),
        ("openinfer_grammar_bytes", "gauge", "Their memory, about.", stats.kept_bytes),
        ("openinfer_grammar_bytes_limit", "gauge", "What it may be.", stats.max_kept_bytes),
        ("openinfer_grammar_owners", "gauge", "Tenants that grammars are kept for.", stats.kept_owners),
        ("openinfer_grammar_evictions_total", "counter", "Grammars that made room for others.", stats.evicted),
        ("openinfer_grammar_renewals_total", "counter", "Lexers of grammars made anew.", stats.renewed),
        ("openinfer_grammars_waiting", "gauge", "Requests whose grammar is not compiled.", stats.waiting),
        ("openinfer_grammar_compile_seconds_total", "counter", "Of the compiler's thread.", stats.compile_s),
        ("openinfer_grammar_guard_faults_total", "counter", "Times its process was not there.", stats.guard_faults),
        ("openinfer_grammar_masks_computed_total", "counter", "Masks of rows computed.", stats.masks_computed),
        ("openinfer_grammar_masks_shared_total", "counter", "Masks of rows taken from others.", stats.masks_shared),
        ("openinfer_grammar_masks_pending", "gauge", "Masks of rows to be computed.", stats.masks_pending),
        ("openinfer_grammar_mask_wait_seconds_total", "counter", "Steps waited for masks.", stats.mask_wait_s),
        ("openinfer_grammar_rows_sat_out_total", "counter", "Rows that steps went without.", stats.rows_sat_out),
    ):
        yield from render_family(name, kind, text, [((), value)])
    seconds: list[Sample] = [((("outcome", outcome),), stats.mask_s.get(outcome, 0.0)) for outcome in MASK_OUTCOMES]
    yield from render_family("openinfer_grammar_mask_seconds_total", "counter", "Processor time of masks.", seconds)


def _plugin_lines(stats: EngineStats) -> Iterator[str]:
    faults: list[Sample] = [
        ((("group", each.group), ("plugin", each.plugin), ("kind", kind)), count)
        for each in stats.plugin_faults
        for kind, count in sorted(each.counts.items())
    ]
    yield from render_family("openinfer_plugin_faults_total", "counter", "Breaches of a plug-in's contract.", faults)
    call = stats.slow_call
    slow: list[Sample] = []
    if call is not None:
        slow.append(((("plugin", call.plugin), ("call", call.call)), call.age_s))
    text = "Since the engine's loop called a plug-in, if longer than a second."
    yield from render_family("openinfer_plugin_slow_call_seconds", "gauge", text, slow)


def _of_drafts(stats: EngineStats, model: Labels) -> Iterator[str]:
    for name, text, value in (
        ("openinfer_spec_decode_num_drafts_total", "Rows whose drafts were compared.", stats.spec_decode_num_drafts),
        (
            "openinfer_spec_decode_num_draft_tokens_total",
            "Drafts that were compared.",
            stats.spec_decode_num_draft_tokens,
        ),
        (
            "openinfer_spec_decode_num_accepted_tokens_total",
            "Drafts that were accepted.",
            stats.spec_decode_num_accepted_tokens,
        ),
    ):
        yield from render_family(name, "counter", text, [(model, value)])
    samples: list[Sample] = [
        ((*model, ("position", str(position))), count)
        for position, count in enumerate(stats.spec_decode_num_accepted_tokens_per_pos)
    ]
    text = "Accepted drafts by their place in the row, from 0."
    yield from render_family("openinfer_spec_decode_num_accepted_tokens_per_pos_total", "counter", text, samples)


_OF_EACH = (
    ("openinfer_kv_tier_finds_total", "counter", "Times it was asked for a chain of blocks.", "finds"),
    ("openinfer_kv_tier_hit_blocks_total", "counter", "Blocks that were found.", "hit_blocks"),
    ("openinfer_kv_tier_missed_blocks_total", "counter", "Blocks that were asked for and not found.", "missed_blocks"),
    ("openinfer_kv_tier_loaded_blocks_total", "counter", "Blocks brought into the pool.", "loaded_blocks"),
    ("openinfer_kv_tier_saved_blocks_total", "counter", "Blocks taken from it.", "saved_blocks"),
    ("openinfer_kv_tier_evicted_blocks_total", "counter", "Blocks given up for space or age.", "evicted_blocks"),
    ("openinfer_kv_tier_corrupt_blocks_total", "counter", "Blocks dropped for their checksum.", "corrupt_blocks"),
    ("openinfer_kv_tier_stored_blocks", "gauge", "Blocks held.", "stored_blocks"),
)


def tier_lines(stats: EngineStats) -> Iterator[str]:
    for name, kind, text, value in (
        ("openinfer_kv_tier_tokens_total", "counter", "Tokens that KV tiers had.", stats.tier_tokens),
        ("openinfer_kv_tier_loading", "gauge", "Sequences whose prefix is on its way.", stats.loading),
        (
            "openinfer_kv_tier_unsaved_blocks_total",
            "counter",
            "Blocks that tiers were not given.",
            stats.unsaved_blocks,
        ),
        (
            "openinfer_kv_tier_prefetched_blocks_total",
            "counter",
            "Blocks brought up for requests that wait.",
            stats.prefetched_blocks,
        ),
        (
            "openinfer_kv_tier_early_blocks_total",
            "counter",
            "Blocks loaded before the turn that needs them.",
            stats.early_blocks,
        ),
        (
            "openinfer_kv_tier_early_unused_blocks_total",
            "counter",
            "Of these, given up before they were used.",
            stats.early_unused_blocks,
        ),
        ("openinfer_kv_tier_faults_total", "counter", "Times a tier raised.", stats.kv_tier_faults),
    ):
        yield from render_family(name, kind, text, [((), value)])
    for name, kind, text, field in _OF_EACH:
        samples: list[Sample] = [((("tier", tier.tier),), getattr(tier, field)) for tier in stats.kv_tiers]
        yield from render_family(name, kind, text, samples)
    failures: list[Sample] = [
        ((("tier", tier.tier), ("reason", reason)), count)
        for tier in stats.kv_tiers
        for reason, count in sorted(tier.failures.items())
    ]
    text = "Transfers that ended partial."
    yield from render_family("openinfer_kv_tier_failures_total", "counter", text, failures)
    conditions: list[Sample] = [((("tier", tier.tier), ("condition", tier.condition)), 1) for tier in stats.kv_tiers]
    yield from render_family("openinfer_kv_tier_condition", "gauge", "How a tier does, by name; 1.", conditions)

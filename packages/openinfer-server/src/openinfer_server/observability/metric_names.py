"""`--metrics-names`: the names under which `/metrics` shows what vLLM has, too.

One table, by family: labels, units and meanings are equal already, so that a page in vLLM's names is this page with
its families renamed. A family that vLLM has not keeps its name in both.
"""

from collections.abc import Iterable, Iterator
from enum import StrEnum

OURS, VLLM = "openinfer_", "vllm:"
_HELP = f"# HELP {OURS}"


class MetricsNames(StrEnum):
    """Whose names metrics have where vLLM has one of the same meaning."""

    OPENINFER = "openinfer"
    """All begin with `openinfer_`."""
    VLLM = "vllm"
    """Those that vLLM has begin with `vllm:`, as its dashboards and scalers, and llm-d's router, ask for them."""


# The rest of the names, after the prefix; docs/reference/metrics.md marks the same rows.
VLLM_FAMILIES = frozenset(
    (
        "cache_config_info",
        "e2e_request_latency_seconds",
        "generation_tokens_total",
        "inter_token_latency_seconds",
        "kv_cache_usage_perc",
        "lora_requests_info",
        "num_preemptions_total",
        "num_requests_running",
        "num_requests_waiting",
        "prefix_cache_hits_total",
        "prefix_cache_queries_total",
        "prompt_tokens_total",
        "request_decode_time_seconds",
        "request_generation_tokens",
        "request_inference_time_seconds",
        "request_params_max_tokens",
        "request_prefill_time_seconds",
        "request_prompt_tokens",
        "request_queue_time_seconds",
        "request_success_total",
        "request_time_per_output_token_seconds",
        "spec_decode_num_accepted_tokens_per_pos_total",
        "spec_decode_num_accepted_tokens_total",
        "spec_decode_num_draft_tokens_total",
        "spec_decode_num_drafts_total",
        "time_to_first_token_seconds",
    )
)


def renamed(lines: Iterable[str], names: MetricsNames) -> Iterator[str]:
    """The lines of a page with its families under these names."""
    if names is MetricsNames.OPENINFER:
        yield from lines
        return
    is_vllms = False
    for line in lines:
        # A family's samples follow its HELP, and have its name at their beginning, or after `# HELP` and `# TYPE`.
        if line.startswith("# HELP "):
            is_vllms = line.removeprefix(_HELP).split(" ", 1)[0] in VLLM_FAMILIES
        yield line.replace(OURS, VLLM, 1) if is_vllms else line

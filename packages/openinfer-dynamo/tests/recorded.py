"""Requests as the frontend of ai-dynamo 1.6.1 sent them to a worker, in the words of its request plane.

Recorded from `python -m dynamo.frontend` with file discovery; prompts and model are those of the tiny checkpoint.
"""

from typing import Any

_NO_SAMPLING: dict[str, Any] = dict.fromkeys(
    (
        "n",
        "best_of",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "use_beam_search",
        "length_penalty",
        "seed",
        "include_stop_str_in_output",
        "guided_decoding",
    )
)
_NO_STOPS: dict[str, Any] = dict.fromkeys(
    ("stop", "stop_token_ids", "stop_token_ids_visible", "min_tokens", "ignore_eos", "max_thinking_tokens")
)
_NO_OUTPUT: dict[str, Any] = dict.fromkeys(
    ("logprobs", "prompt_logprobs", "skip_special_tokens", "formatted_prompt", "return_tokens_as_token_ids")
)

COMPLETION: dict[str, Any] = {
    "model": "tiny",
    "token_ids": [257, 75, 512],
    "stop_conditions": {**_NO_STOPS, "max_tokens": 2, "stop_token_ids_hidden": [2033, 2031]},
    "sampling_options": {**_NO_SAMPLING, "seed": 7},
    "output_options": _NO_OUTPUT,
    "eos_token_ids": [2033, 2031],
    "mdc_sum": "35249e700575aa48f02a6117c5c2e9256bea1849e50afaad25345179263612e4",
    "annotations": [],
    "routing": {},
    "router_config_override": None,
}
"""Of `{"prompt": "hello", "max_tokens": 2, "seed": 7}`."""

CHAT: dict[str, Any] = {
    **COMPLETION,
    "token_ids": [2032, 411, 198, 321, 2033, 198, 2032, 510, 198],
    "stop_conditions": {**_NO_STOPS, "max_tokens": 5, "stop_token_ids_hidden": [2033, 2031]},
    "sampling_options": {**_NO_SAMPLING, "guided_decoding": {"json": {"type": "object"}}},
    "output_options": {**_NO_OUTPUT, "logprobs": 2},
}
"""Of a chat with `logprobs`, `top_logprobs: 2` and `response_format: {"type": "json_object"}`."""

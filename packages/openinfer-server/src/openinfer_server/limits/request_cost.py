"""`RequestCost`: what a request asks of the engine and of memory, known before anything is allocated for it."""

from collections.abc import Sequence
from dataclasses import dataclass

from openinfer_server.http.api_errors import invalid
from openinfer_server.options import ServerOptions


@dataclass(frozen=True, slots=True)
class PromptCost:
    """What one prompt is, and how far it may be continued."""

    prompt_tokens: int
    max_tokens: int
    output_logprobs: int | None  # alternatives per generated token; None if nothing is scored
    prompt_logprobs: int | None  # alternatives per prompt token


@dataclass(frozen=True, slots=True)
class RequestCost:
    """The budget of one request.

    Attributes:
        prompt_tokens: over all choices.
        kv_tokens: room in the KV cache that all choices may come to need, in whole blocks.
        logprob_entries: log-probabilities that come back, one per token and alternative.
    """

    prompt_tokens: int
    kv_tokens: int
    logprob_entries: int

    @classmethod
    def of(cls, prompts: Sequence[PromptCost], *, n: int, block_size_tokens: int) -> "RequestCost":
        blocks = sum(-(-(prompt.prompt_tokens + prompt.max_tokens) // block_size_tokens) for prompt in prompts)
        return cls(
            prompt_tokens=n * sum(prompt.prompt_tokens for prompt in prompts),
            kv_tokens=n * blocks * block_size_tokens,
            logprob_entries=n * sum(map(_logprob_entries, prompts)),
        )

    @staticmethod
    def longest_completion(
        prompts: Sequence[PromptCost], options: ServerOptions, *, n: int, block_size_tokens: int
    ) -> int:
        """The largest `max_tokens` of every choice, with which they stay within the budgets; of some prompts below 1.

        The `max_tokens` of `prompts` are not read.
        """
        num_choices = n * len(prompts)
        blocks = options.max_request_kv_tokens // num_choices // block_size_tokens
        by_room = blocks * block_size_tokens - max(prompt.prompt_tokens for prompt in prompts)
        prompt_entries = n * sum(_prompt_entries(prompt) for prompt in prompts)
        entries = (options.max_logprob_entries - prompt_entries) // num_choices
        scored = [max(0, prompt.output_logprobs) for prompt in prompts if prompt.output_logprobs is not None]
        return min([by_room, *(entries // (alternatives + 1) for alternatives in scored)])

    def check(self, options: ServerOptions, field: str, logprobs_field: str = "logprobs") -> None:
        """Compares it with what one request may ask for; the fields are where prompts and log-probabilities are asked.

        Raises:
            ApiError: 400; says what was asked and what is possible.
        """
        if self.prompt_tokens > options.max_request_tokens:
            message = f"{self.prompt_tokens} prompt tokens over all choices exceed {options.max_request_tokens}"
            raise invalid(field, message)
        if self.kv_tokens > options.max_request_kv_tokens:
            raise invalid(
                "max_tokens",
                f"all choices together may need room for {self.kv_tokens} tokens (prompt and max_tokens of each, in "
                f"whole blocks); one request may ask for {options.max_request_kv_tokens}: lower max_tokens or n",
            )
        if self.logprob_entries > options.max_logprob_entries:
            asked, most = self.logprob_entries, options.max_logprob_entries
            raise invalid(logprobs_field, f"{asked} log-probabilities are asked for; at most {most} are possible")


def _logprob_entries(prompt: PromptCost) -> int:
    output = 0 if prompt.output_logprobs is None else prompt.max_tokens * (prompt.output_logprobs + 1)
    return output + _prompt_entries(prompt)


def _prompt_entries(prompt: PromptCost) -> int:
    return 0 if prompt.prompt_logprobs is None else prompt.prompt_tokens * (prompt.prompt_logprobs + 1)

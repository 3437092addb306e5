"""`ShortestFirst`: few tokens before many."""

from openinfer_core import GenerateRequest
from openinfer_core.scheduling import QueuePolicyConfig, WaitingRequest

AGE_TOKENS = 16
"""How much longer a request counts for each one that arrived before it."""


class ShortestFirst:
    """Orders by the tokens a request may take, prompt and `max_tokens` together, and by age.

    A request is overtaken by at most one later request per `AGE_TOKENS` of its own tokens.
    """

    def __init__(self, config: QueuePolicyConfig) -> None:
        del config

    def key(self, waiting: WaitingRequest) -> tuple[int, int]:
        """Tokens and age, then arrival."""
        tokens = len(waiting.request.prompt_token_ids) + waiting.request.sampling.max_tokens
        return tokens + AGE_TOKENS * waiting.arrival, waiting.arrival

    def admitted(self, request: GenerateRequest) -> None:
        """Keeps no account."""

    def withdrawn(self, request: GenerateRequest) -> None:
        """Keeps no account."""

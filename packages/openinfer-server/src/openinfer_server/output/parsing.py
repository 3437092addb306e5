"""`OutputParsers`: how the choices of one prompt are parsed, for APIs that tell reasoning, text and calls apart."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openinfer_core.request import GenerateRequest
from openinfer_server.http.api_errors import invalid, refused
from openinfer_server.output.delta_choice import ParsingOptions
from openinfer_server.parsers.continued import CallBegun
from openinfer_server.parsers.output import OutputParser
from openinfer_server.request.plan import Prompt
from openinfer_server.service import Service
from openinfer_server.tools.available import AvailableTools


@dataclass(frozen=True, slots=True)
class OutputParsers:
    """Makes a parser for each answer to a prompt.

    Attributes:
        prompt: what the engine is asked; reasoning that has no budget at all is closed in it.
        is_plain: whether there is nothing to parse: all text is content.
    """

    prompt: Prompt
    is_plain: bool
    _service: Service
    _schemas: Mapping[str, Mapping[str, Any]]
    _parallel: bool
    _budget_tokens: int | None

    @classmethod
    def make(
        cls,
        service: Service,
        prompt: Prompt,
        available: AvailableTools,
        *,
        budget_tokens: int | None,
        budget_field: str = "thinking_token_budget",
    ) -> "OutputParsers":
        """The reader of the answers to a prompt.

        Raises:
            ApiError: 400; the budget cannot be kept.
            ParserFault: a parser cannot be made.
        """
        try:
            first = service.parsers.open(prompt.before_answer, available.schemas, begun=prompt.begun)
        except CallBegun as error:
            raise refused(prompt.field, "the last message has a call, and a call cannot be continued") from error
        if budget_tokens is not None:
            if budget_tokens < 0:
                raise invalid(budget_field, f"{budget_field} is {budget_tokens}; it must be at least 0")
            if not first.closing_text:
                raise refused(
                    budget_field, "no reasoning parser is chosen; start the server with --reasoning-parser NAME"
                )
            if budget_tokens == 0 and first.reasoning:
                prompt = _with_closed_reasoning(service, prompt, first)
        return cls(prompt, first.is_plain, service, available.schemas, available.parallel, budget_tokens)

    @property
    def may_call(self) -> bool:
        """Whether an answer may be calls and nothing else."""
        return bool(self._schemas)

    @property
    def begin_tokens(self) -> Mapping[int, str]:
        """Tokens that may begin a call inside the reasoning, by their ids in this vocabulary."""
        if not self._schemas:
            return {}
        found = {name: self._service.tokenizer.token_id(name) for name in self._service.parsers.begin_tokens}
        return {token_id: name for name, token_id in found.items() if token_id is not None}

    def parsing(self, request: GenerateRequest) -> ParsingOptions:
        """How one answer is read."""
        return ParsingOptions(
            parser=self._service.parsers.open(self.prompt.before_answer, self._schemas, begun=self.prompt.begun),
            request=request,
            parallel_calls=self._parallel,
            reasoning_budget_tokens=self._budget_tokens,
            max_model_tokens=self._service.info.max_model_tokens,
        )


def _with_closed_reasoning(service: Service, prompt: Prompt, parser: OutputParser) -> Prompt:
    closing = parser.closing_text
    token_ids = (*prompt.token_ids, *service.tokenizer.encode_short(closing))
    begun = prompt.begun + closing if prompt.begun else ""
    return Prompt(token_ids, prompt.text + closing, prompt.field, begun)

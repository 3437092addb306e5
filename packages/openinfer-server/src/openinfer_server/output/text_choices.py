"""`TextChoice`: a choice that knows its text: stop strings, log-probabilities, echo.

    token ─► detokenizer ─► stop scanner ─► show(text, scores)

Streamed and whole responses get the same text and scores in the same order, so that they are equal.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from openinfer_core.events import Finished, FinishReason, TokenLogprobs, Tokens
from openinfer_server.output.logprobs import ScoredToken, score_prompt
from openinfer_server.output.response import Choice, Response
from openinfer_server.parsers.reasoning_calls import BeginToken
from openinfer_server.request.plan import Prompt
from openinfer_server.text.stop_strings import StopScanner
from openinfer_server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextOptions:
    """What is wanted of a choice's text."""

    tokenizer: Tokenizer
    stops: tuple[str, ...]
    min_tokens: int  # stop strings are not looked for in the text of so many first tokens
    echo: bool
    # Alternatives of each token of the echoed prompt; None: it comes without log-probabilities.
    echo_alternatives: int | None = None
    shows_stop: bool = False  # whether what ends the text, a stop string or the text of a stop token, is part of it
    tells_token_ids: bool = False
    visible_tokens: frozenset[str] = frozenset()  # special tokens that show by name, for parsers that know them
    begin_tokens: Mapping[int, str] = field(default_factory=dict[int, str])  # by id: tokens that may begin a call


class TextChoice(Choice):
    """Turns tokens into pieces of text; subclasses say where they go.

    Attributes:
        is_complete: whether the text ends here, whatever the engine would still say.
        prompt_logprobs: of the prompt's tokens from the second on, if they were asked for; all are there at the end.
    """

    __slots__ = (
        "_begin_tokens",
        "_begun",
        "_detokenizer",
        "_echo",
        "_echo_alternatives",
        "_generated_ids",
        "_min_tokens",
        "_offset",
        "_prompt",
        "_scanner",
        "_shows_stop",
        "_tells_token_ids",
        "_tokenizer",
        "is_complete",
        "prompt_logprobs",
    )

    def __init__(self, response: Response, index: int, *, prompt: Prompt, options: TextOptions) -> None:
        super().__init__(response, index, prompt_tokens=len(prompt.token_ids))
        self.is_complete = False
        self._begin_tokens = options.begin_tokens
        self._begun: list[BeginToken] = []  # begin tokens that no subclass has taken yet
        self._detokenizer = options.tokenizer.detokenizer(prompt.token_ids, visible=options.visible_tokens)
        self._echo = options.echo
        self._echo_alternatives = options.echo_alternatives
        self._min_tokens = options.min_tokens
        self._offset = 0
        self._prompt = prompt
        self.prompt_logprobs: list[TokenLogprobs] = []
        self._generated_ids: list[int] | None = None  # all tokens so far, if a subclass wants them kept
        self._scanner = StopScanner(options.stops, shows_stop=options.shows_stop) if options.stops else None
        self._shows_stop = options.shows_stop
        self._tells_token_ids = options.tells_token_ids
        self._tokenizer = options.tokenizer

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return None if self._scanner is None else self._scanner.matched

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        return self._prompt.token_ids

    @property
    def stop_reason(self) -> str | int | None:
        return super().stop_reason if self.stop_string is None else self.stop_string

    def show(self, text: str, scores: Sequence[ScoredToken]) -> None:
        """Takes the next piece of text and the tokens it goes with; either may be empty."""
        raise NotImplementedError

    def show_token_id(self, token_id: int) -> None:
        """Takes the token that the next text comes of; only if the options ask for it."""
        raise NotImplementedError

    def show_prompt(self, text: str, scores: Sequence[ScoredToken]) -> None:
        """Takes the prompt, which may be large."""
        raise NotImplementedError

    def tokens(self, event: Tokens) -> None:
        if event.prompt_logprobs is not None:
            self.prompt_logprobs += event.prompt_logprobs
        if self._echo and event.token_ids:
            self._show_prompt()
        if self._generated_ids is not None:
            self._generated_ids += event.token_ids
        logprobs = event.logprobs
        for place, token_id in enumerate(event.token_ids):
            scores = () if logprobs is None else (ScoredToken(token_id, logprobs[place], self._offset),)
            text = self._detokenizer.feed(token_id)
            self._offset += len(text)
            self.completion_tokens += 1
            if token_id in self._begin_tokens and text.endswith(name := self._begin_tokens[token_id]):
                self._begun.append((self._offset - len(name), name))
            if self._tells_token_ids:
                self.show_token_id(token_id)
            self.show(text if self._scanner is None else self._scan(text), scores)
            if self.is_complete:
                self.complete()
                self.response.link.unread(len(event.token_ids) - place - 1)  # they are beyond the end
                return

    def finished(self, event: Finished) -> None:
        if self._echo:
            self._show_prompt()
        if event.stop_token_id is not None:
            self.completion_tokens = event.completion_tokens
            self._take_stop_token(event.stop_token_id)
        rest = self.take_held()
        if rest:
            self.show(rest, ())
        super().finished(event)

    def _take_stop_token(self, token_id: int) -> None:
        if self._tells_token_ids:
            self.show_token_id(token_id)
        if self._shows_stop:
            text = self._detokenizer.feed(token_id)
            self._offset += len(text)
            self.show(text if self._scanner is None else self._scan(text), ())

    def complete(self) -> None:
        self.end_early(FinishReason.STOP)

    def end_early(self, reason: FinishReason) -> None:
        self.response.link.stopped(self)
        self.conclude(reason)

    def continue_after(self, token_ids: Sequence[int], *, visible: frozenset[str]) -> None:
        """The next token follows these, whatever came before."""
        self._detokenizer = self._tokenizer.detokenizer(token_ids, visible=visible)

    def take_held(self) -> str:
        """Text that is held back for what may follow it, as if nothing followed."""
        rest = self._detokenizer.finish()
        return rest if self._scanner is None else self._scanner.feed(rest) + self._scanner.finish()

    def _scan(self, text: str) -> str:
        """What can be shown of a piece before stop strings; looks for none in the first `min_tokens` tokens."""
        if self._scanner is None or self.completion_tokens <= self._min_tokens:
            return text
        text = self._scanner.feed(text)
        self.is_complete = self._scanner.found
        return text

    def _show_prompt(self) -> None:
        # with the first token all log-probabilities of the prompt have come
        self._echo = False
        self._offset = len(self._prompt.text)
        alternatives = self._echo_alternatives
        # All but the first token have one; of a prompt that ended before, none is shown.
        if alternatives is None or len(self.prompt_logprobs) != len(self._prompt.token_ids) - 1:
            scores: Sequence[ScoredToken] = ()
        else:
            scores = score_prompt(self._tokenizer, self._prompt, self.prompt_logprobs, alternatives)
        self.show_prompt(self._prompt.text, scores)

"""`LlguidanceCompiler`: makes matchers in a worker thread and keeps those of recent grammars."""

import logging
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import cached_property

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from openinfer_core import GenerateRequest, Grammar, InvalidRequest, Preamble, Refused
from openinfer_core.engine import GrammarStats
from openinfer_core.fair_queue import FairQueue
from openinfer_core.grammars import TokenMatcher, Vocabulary, mask_words
from openinfer_core.tokenizer_files import read_tokenizer
from openinfer_engine.grammars.compiled import CompiledGrammar
from openinfer_engine.grammars.digests import GrammarDigests
from openinfer_engine.grammars.guard import LIMITS, GrammarGuard, refused
from openinfer_engine.grammars.kept import KeptGrammars
from openinfer_engine.grammars.matcher import LlguidanceMatcher

logger = logging.getLogger("openinfer.engine")

# Bounded, as between the parts of JSON (`guard_process.WHITESPACE`): a model cannot go on with it forever.
_SPACES = r"SPACES: /[ \n]{0,32}/"


class LlguidanceCompiler:
    """Implements `openinfer_core.grammars.GrammarCompiler` and `FillsInParallel`.

    The tokenizer is read in the worker thread, while the engine starts. For 151k tokens that
    takes about 1 s, in which llguidance keeps the interpreter lock.

    Raises:
        Refused: the model folder has no tokenizer.
    """

    fills_in_parallel = True  # each matcher is a copy of its own, and llguidance gives the interpreter lock back

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        guard: GrammarGuard | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if read_tokenizer(vocabulary.model_dir) is None:
            raise Refused(f"{vocabulary.model_dir} has no tokenizer, which grammars need")
        self._vocabulary = vocabulary
        self._guard = guard or GrammarGuard()
        self._kept = KeptGrammars[CompiledGrammar](clock=clock)
        self._digests = GrammarDigests()
        self._counting = threading.Lock()
        self._num_renewed = 0
        self._queue = FairQueue("openinfer-grammars")
        self._queue.submit("", self._read_tokenizer)

    def compile(self, request: GenerateRequest) -> "Future[TokenMatcher]":
        grammar = request.sampling.grammar
        if grammar is None or not request.sampling.stop_token_ids:
            why = "there is none" if grammar is None else "no stop token can end its output; give stop_token_ids"
            return _done(lambda: _raise(InvalidRequest(f"the grammar cannot be used: {why}", field="grammar")))
        key = self._digests.of(grammar)
        known = self._kept.get(key, request.tenant)
        if known is not None:
            return _done(lambda: self._matcher(known, key, request))
        return self._queue.submit(request.tenant, lambda: self._compile(key, grammar, request))

    def stats(self) -> GrammarStats:
        """What it keeps, and what it has used."""
        return GrammarStats(
            kept=len(self._kept),
            kept_bytes=self._kept.num_bytes,
            max_kept_bytes=self._kept.max_bytes,
            kept_owners=self._kept.num_owners,
            evicted=self._kept.num_evicted,
            renewed=self._num_renewed,
            waiting=self._queue.num_waiting,
            compile_s=self._queue.used_s,
            guard_faults=self._guard.num_faults,
        )

    def close(self) -> None:
        self._guard.close()
        self._queue.close()
        self._queue.join()

    def _compile(self, key: bytes, grammar: Grammar, request: GenerateRequest) -> TokenMatcher:
        known = self._kept.get(key, request.tenant)
        if known is None:
            try:
                known = self._first(grammar)
            except InvalidRequest as refusal:
                known = refusal
            self._kept.put(key, grammar, known, owner=request.tenant)
        return self._matcher(known, key, request)

    def _first(self, grammar: Grammar) -> CompiledGrammar:
        """What has made its first mask, which is the dearest of many grammars."""
        tokenizer = self._tokenizer
        checked = self._guard.check(grammar, head_of(grammar.preamble, tokenizer))

        def make() -> LLMatcher:
            return LLMatcher(tokenizer, checked, log_level=0, limits=LLParserLimits(**LIMITS, verbose_errors=False))

        matcher = make()
        mask = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            raise refused(grammar, matcher.get_error())
        if not any(mask):
            raise refused(grammar, "no output of this model's tokens matches it")
        return CompiledGrammar(matcher, make, on_renewed=self._note_renewed)

    def _note_renewed(self) -> None:
        with self._counting:  # any thread that computes masks
            self._num_renewed += 1

    def _matcher(self, known: "CompiledGrammar | InvalidRequest", key: bytes, request: GenerateRequest) -> TokenMatcher:
        grammar = request.sampling.grammar
        if isinstance(known, InvalidRequest) or grammar is None:
            raise InvalidRequest(str(known), field="grammar")
        eos_token_ids = self._vocabulary.eos_token_ids
        return LlguidanceMatcher(known, key, grammar, request.sampling, eos_token_ids=eos_token_ids)

    def _read_tokenizer(self) -> None:
        try:
            _ = self._tokenizer
        except InvalidRequest:
            logger.exception("requests with a grammar will be refused")

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """Read once, in the worker thread; raises `InvalidRequest` if llguidance cannot read it."""
        vocabulary = self._vocabulary
        try:
            tokenizer = LLTokenizer(
                (read_tokenizer(vocabulary.model_dir) or b"").decode(),
                n_vocab=vocabulary.num_token_ids,
                eos_token=list(vocabulary.eos_token_ids) or None,
            )
        except Exception as error:  # what PyO3 makes of Rust's errors
            raise InvalidRequest("grammars are not possible with this model's tokenizer", field="grammar") from error
        if mask_words(tokenizer.vocab_size) != mask_words(vocabulary.num_token_ids):
            raise InvalidRequest("grammars are not possible: the tokenizer is of another size", field="grammar")
        return tokenizer


def _done(make: Callable[[], TokenMatcher]) -> "Future[TokenMatcher]":
    future: Future[TokenMatcher] = Future()
    try:
        future.set_result(make())
    except Exception as error:  # noqa: BLE001 - raised where the result is taken
        future.set_exception(error)
    return future


def _raise(error: InvalidRequest) -> TokenMatcher:
    raise error


def head_of(preamble: Preamble | None, tokenizer: LLTokenizer) -> str | None:
    """Lark that begins with a preamble and goes on with `@body`; None if there is no preamble.

    An end that is one token of the vocabulary is that token: its text in other tokens is not the model's way to write
    it. White space after the preamble belongs to it.
    """
    if preamble is None:
        return None
    rules = [_SPACES]
    free = _free_up_to(preamble, tokenizer, rules)
    if preamble.opening is None:
        start = f"start: {free} SPACES @body"
    else:
        start = f"start: ({_literal(preamble.opening, tokenizer)} {free} SPACES)? @body"
    return "\n".join([start, *rules])


def _free_up_to(preamble: Preamble, tokenizer: LLTokenizer, rules: list[str]) -> str:
    without = "".join(rf" & ~/(.|\n)*{_pattern(text)}(.|\n)*/" for text in preamble.without)
    token_id = _token_id(preamble.closing, tokenizer)
    if token_id is None:
        rules += ["free[lazy]: FREE", rf"FREE: /(.|\n)*{_pattern(preamble.closing)}/{without}"]
        return "free"
    rules.append(rf"FREE: /(.|\n)*/{without}")
    return f"FREE <[{token_id}]>"


def _pattern(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _literal(text: str, tokenizer: LLTokenizer) -> str:
    token_id = _token_id(text, tokenizer)
    if token_id is not None:
        return f"<[{token_id}]>"
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _token_id(text: str, tokenizer: LLTokenizer) -> int | None:
    token_ids = tokenizer.tokenize_str(text, parse_special=True)
    return token_ids[0] if len(token_ids) == 1 else None

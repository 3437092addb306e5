"""`LLM`: the engine in your process, without a server.

    with LLM("tiny") as llm:
        print(llm.generate(["The capital of France is"], max_tokens=8)[0].text)

An event loop in a thread of its own carries the engine's events, so that `LLM` works in a script, in a notebook and
next to an event loop of yours alike. Methods may be called from several threads.
"""

import asyncio
import itertools
import queue
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import msgspec

from openinfer.completion import Assembler, Completion
from openinfer.models import find_family, find_model_dir
from openinfer_core import (
    EngineClosed,
    EngineInfo,
    Finished,
    FinishReason,
    GenerateRequest,
    InvalidRequest,
    OpenInferError,
    RequestId,
    SamplingParams,
    TokenEvent,
    Tokens,
)
from openinfer_core.contracts import one_release, require_one_release
from openinfer_core.events import Failed
from openinfer_core.sampling_defaults import SamplingDefaultsFrom, read_sampling_defaults
from openinfer_server.chat.bounds import RenderingRefused
from openinfer_server.chat.template import ChatTemplate
from openinfer_server.text.control_tokens import OriginLost
from openinfer_server.text.marked_text import MarkedText
from openinfer_server.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 128

Result = TypeVar("Result")

Prompt = str | Sequence[int]
"""Text, or token ids."""


class GenerationFailed(OpenInferError):
    """The engine ended a request with a failure."""


class LLM:
    """A loaded model.

    Args:
        model: a Hugging Face model folder, the name of an installed checkpoint (`tiny`), or of a repository of the
            hub (`Qwen/Qwen3-4B`), which is looked for in the cache and then downloaded into it.
        family: the model family, when more than one claims the model.
        revision: of a repository: a branch, a tag or a commit.
        offline: download nothing, as `HF_HUB_OFFLINE=1`.
        sampling_defaults: `model`: parameters that a call does not give are as the model's `generation_config.json`
            says; `none`: they change nothing.
        **options: fields of the family's options (`EngineOptions`): max_num_seqs, kv_cache_bytes, scheduler, …

    Raises:
        InvalidCheckpoint, UnclaimedModel, PluginError, Refused: the model cannot be served; the message says why.
        InvalidRequest: an option is unknown or out of range.
        MixedReleases: packages of openinfer are installed that do not belong together.
    """

    def __init__(
        self,
        model: str,
        *,
        family: str | None = None,
        revision: str | None = None,
        offline: bool = False,
        sampling_defaults: str = "model",
        **options: Any,
    ) -> None:
        require_one_release("openinfer")
        defaults_from = _defaults_from(sampling_defaults)
        with one_release():
            self._model_dir = find_model_dir(model, revision=revision, offline=offline, family=family)
            self._defaults = read_sampling_defaults(self._model_dir, defaults_from)
            found, _ = find_family(self._model_dir, family)
            self._engine = found.launch(self._model_dir, _options(found.options_type, options))
        self._tokenizer = Tokenizer.load(self._model_dir, num_token_ids=self._engine.info.num_token_ids)
        self._template = ChatTemplate.load(self._model_dir, timeout_s=10.0, max_characters=2**24)
        own_texts = () if self._template is None else self._template.own_texts
        self._control_tokens = self._tokenizer.control_tokens(own_texts=own_texts)
        self._ids = itertools.count()
        self._sinks: dict[RequestId, Callable[[TokenEvent], None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._carry, name="openinfer-llm", daemon=True)
        self._closed = False
        self._thread.start()

    @property
    def info(self) -> EngineInfo:
        """What does not change while the engine lives."""
        return self._engine.info

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        **sampling: Any,
    ) -> list[Completion]:
        """Continues each prompt; all of them run together.

        Args:
            prompts: texts, or lists of token ids.
            stop: strings that end the text; they are not part of it.
            ignore_eos: go on past the model's end-of-text tokens.
            **sampling: fields of `SamplingParams`; `max_tokens` is 128 unless given, other numbers are the model's own
                defaults (`sampling_defaults`).

        Raises:
            InvalidRequest: a value is out of range.
            GenerationFailed: the engine could not serve a prompt.
        """
        params = self._sampling(sampling, ignore_eos=ignore_eos)
        return self._wait(self._generate([self._submission(prompt, params, stop) for prompt in prompts]))

    def stream(
        self, prompt: Prompt, *, stop: Sequence[str] = (), ignore_eos: bool = False, **sampling: Any
    ) -> Iterator[str]:
        """Yields the text of a completion as it comes; arguments as for `generate`. Closing the iterator aborts."""
        submission = self._submission(prompt, self._sampling(sampling, ignore_eos=ignore_eos), stop)
        pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        submission.on_text = pieces.put
        submission.future.add_done_callback(lambda _: pieces.put(None))
        self._loop.call_soon_threadsafe(self._start, submission)
        try:
            while (piece := pieces.get()) is not None:
                yield piece
            submission.future.result()
        finally:
            if not submission.future.done():
                self._loop.call_soon_threadsafe(self._engine.abort, submission.request.request_id)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template: Mapping[str, Any] | None = None,
        stop: Sequence[str] = (),
        **sampling: Any,
    ) -> Completion:
        """The assistant's next turn, through the model's own chat template.

        Args:
            messages: turns with `role` and `content`.
            template: further variables of the template: `tools`, `enable_thinking`.
            stop: as for `generate`.
            **sampling: as for `generate`.
        """
        return self.generate([self._prompt(messages, template)], stop=stop, **sampling)[0]

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template: Mapping[str, Any] | None = None,
        stop: Sequence[str] = (),
        **sampling: Any,
    ) -> Iterator[str]:
        """Yields the text of the assistant's next turn as it comes; arguments as for `chat`. Closing it aborts."""
        return self.stream(self._prompt(messages, template), stop=stop, **sampling)

    def render(self, messages: Sequence[Mapping[str, Any]], *, template: Mapping[str, Any] | None = None) -> str:
        """The prompt that `chat` would continue.

        Raises:
            InvalidRequest: the model has no chat template, or it refuses the messages.
        """
        return self._rendered(messages, template).plain

    def close(self) -> None:
        """Ends the engine. Idempotent; open calls raise `GenerationFailed`."""
        if not self._closed:
            self._closed = True
            asyncio.run_coroutine_threadsafe(self._engine.close(), self._loop).result()
            self._thread.join()
            self._tokenizer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _sampling(self, given: dict[str, Any], *, ignore_eos: bool) -> SamplingParams:
        stops = tuple(given.pop("stop_token_ids", ()))
        known = set(SamplingParams.__struct_fields__)
        if unknown := sorted(set(given) - known):
            raise InvalidRequest(f"unknown sampling parameter {unknown[0]!r}; known: {', '.join(sorted(known))}")
        eos = () if ignore_eos else self._engine.info.eos_token_ids
        fields: dict[str, Any] = {
            "max_tokens": DEFAULT_MAX_TOKENS,
            **given,
            **self._defaults.resolve(given),
            "stop_token_ids": (*stops, *eos),
        }
        return SamplingParams(**fields)

    def _rendered(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None) -> MarkedText:
        if self._template is None:
            raise InvalidRequest(f"{self._model_dir} has no chat template; use generate", field="messages")
        try:
            return self._template.render(messages, dict(variables or {}))
        except RenderingRefused as error:
            raise InvalidRequest(str(error), field="messages") from error

    def _prompt(self, messages: Sequence[Mapping[str, Any]], template: Mapping[str, Any] | None) -> Sequence[int]:
        text = self._rendered(messages, template)  # which has the special tokens that the model wants, BOS too
        try:
            token_ids = self._wait(self._tokenizer.encode_chat(text, self._control_tokens)).token_ids
        except OriginLost as error:
            raise InvalidRequest(str(error), field="messages") from error
        return token_ids

    def _submission(self, prompt: Prompt, params: SamplingParams, stop: Sequence[str]) -> "_Submission":
        token_ids: Sequence[int] = self._encode(prompt) if isinstance(prompt, str) else prompt
        request = GenerateRequest(
            request_id=RequestId(next(self._ids)), prompt_token_ids=tuple(token_ids), sampling=params
        )
        return _Submission(request, Assembler(request, self._tokenizer, stop))

    def _encode(self, text: str) -> list[int]:
        return self._wait(self._tokenizer.encode(text, add_special_tokens=True))

    def _wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        if self._closed:
            work.close()
            raise EngineClosed("this LLM was closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _generate(self, submissions: "list[_Submission]") -> list[Completion]:
        for submission in submissions:
            self._start(submission)
        return list(await asyncio.gather(*(asyncio.wrap_future(each.future) for each in submissions)))

    def _start(self, submission: "_Submission") -> None:
        request_id = submission.request.request_id
        self._sinks[request_id] = lambda event: self._take(submission, event)
        try:
            self._engine.submit(submission.request)
        except OpenInferError as error:
            del self._sinks[request_id]
            submission.future.set_exception(error)

    def _take(self, submission: "_Submission", event: TokenEvent) -> None:
        assembler, request_id = submission.assembler, event.request_id
        if isinstance(event, Failed):
            del self._sinks[request_id]
            submission.future.set_exception(GenerationFailed(event.message))
            return
        if isinstance(event, Tokens):
            submission.on_text(assembler.feed(event))
            if assembler.stopped:  # a stop string: the text is complete, the engine need not go on
                self._engine.abort(request_id)
        if isinstance(event, Finished):
            del self._sinks[request_id]
            submission.on_text(assembler.finish())
            reason = FinishReason.STOP if assembler.stopped else event.reason
            submission.future.set_result(assembler.completion(event, reason))

    def _carry(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._route())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def _route(self) -> None:
        try:
            async for events in self._engine.events():
                for event in events:
                    sink = self._sinks.get(event.request_id)
                    if sink is not None:
                        sink(event)
        except EngineClosed:  # it died: every open request has heard of it
            self._closed = True


def _ignore(text: str) -> None:
    del text


@dataclass(slots=True)
class _Submission:
    request: GenerateRequest
    assembler: Assembler
    future: "Future[Completion]" = field(default_factory=Future[Completion])
    on_text: Callable[[str], None] = _ignore


def _defaults_from(name: str) -> SamplingDefaultsFrom:
    try:
        return SamplingDefaultsFrom(name)
    except ValueError as error:
        known = ", ".join(SamplingDefaultsFrom)
        message = f"sampling_defaults is {name!r}; it must be one of {known}"
        raise InvalidRequest(message, field="sampling_defaults") from error


def _options(options_type: type[msgspec.Struct], given: dict[str, Any]) -> msgspec.Struct:
    known = options_type.__struct_fields__
    if unknown := sorted(set(given) - set(known)):
        raise InvalidRequest(f"unknown option {unknown[0]!r}; known: {', '.join(sorted(known))}", field=unknown[0])
    here = {"engine_host": "thread"} if "engine_host" in known else {}
    try:
        return msgspec.convert({**here, **given}, options_type)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error)) from error

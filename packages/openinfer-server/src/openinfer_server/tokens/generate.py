"""`POST /inference/v1/generate`: tokens in, tokens out; the tokenizer is not asked."""

import secrets
from collections.abc import Sequence

import msgspec

from openinfer_core.events import FinishReason, TokenLogprobs, Tokens
from openinfer_core.sampling import Grammar
from openinfer_core.sampling_defaults import NO_DEFAULTS
from openinfer_server.http.api_errors import ApiError, ErrorResponse, invalid
from openinfer_server.http.request import HttpRequest
from openinfer_server.http.routes import Route, RouteDoc
from openinfer_server.http.writers import StreamWriter
from openinfer_server.openai.event_frames import DONE, DONE_DATA, error_event
from openinfer_server.output.logprobs import LEAST_LOGPROB
from openinfer_server.output.pipeline import deliver
from openinfer_server.output.response import Choice, Response, told_transfer
from openinfer_server.output.usage import usage_of
from openinfer_server.request.fields import check_rules
from openinfer_server.request.generation_fields import GenerationFields
from openinfer_server.request.plan import (
    Plan,
    Prompt,
    Scoring,
    StreamUsage,
    check_prompt_token_ids,
    check_stream_options,
    make_plan,
    too_long,
)
from openinfer_server.request.structured import constrained, output_constraint, text_grammar
from openinfer_server.service import Service
from openinfer_server.tokens.types import (
    ScoredTokenId,
    TokenAlternative,
    TokenChoice,
    TokenRequest,
    TokenResponse,
    TokenSampling,
)

DEFAULT_TOKENS = 16  # vLLM's default of `max_tokens`
MAX_REQUEST_ID = 128
ERRORS = (404, 408, 413, 415, 429, 503)

_decoder = msgspec.json.Decoder(TokenRequest)


class TokenGeneration:
    """The route's handler."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, http_request: HttpRequest) -> None:
        service = self._service
        service.check_serving(http_request.owner)
        request = await http_request.read_json(_decoder)
        _check(request)
        model = await service.find_model(request.model, http_request.owner)
        usage_wanted = check_stream_options(_fields(request))
        plan = await http_request.aside(lambda: constrained(self._plan(http_request, request), _grammar(request)))
        head = TokenResponse(request_id=request.request_id or f"gen-{secrets.token_hex(12)}", model=model, choices=[])
        response = Response(service.link)
        writer = http_request.stream(plan.n) if request.stream else None
        choices = [
            _TokenIds(response, index, plan, head=head, writer=writer, usage=usage_wanted) for index in range(plan.n)
        ]
        await response.submit(choices, plan.requests)

        def end(error: ApiError | None) -> bytes:
            if error is not None:
                return error_event(error) + DONE
            last = msgspec.structs.replace(head, usage=usage_of(choices, plan.n))
            return (_event(last) if usage_wanted.last else b"") + DONE

        def body() -> bytes:
            return msgspec.json.encode(_whole(head, choices, plan))

        await deliver(http_request, service, response, writer, body=body, end=end)

    def _plan(self, http_request: HttpRequest, request: TokenRequest) -> Plan:
        info, sampling = self._service.info, request.sampling_params
        check_prompt_token_ids(request.token_ids, info, "token_ids")
        if len(request.token_ids) > info.max_model_tokens:
            raise too_long(str(len(request.token_ids)), info, "token_ids")
        return make_plan(
            self._service,
            _fields(request),
            [Prompt(tuple(request.token_ids), "", "token_ids")],
            tenant=http_request.tenant,
            owner=http_request.owner,
            max_tokens=sampling.max_tokens,
            default_tokens=DEFAULT_TOKENS,
            scoring=Scoring(output=sampling.logprobs, prompt=sampling.prompt_logprobs),
            transfer=request.kv_transfer_params,
            defaults=NO_DEFAULTS,  # what tokens are sampled from is its caller's matter here
        )


def _check(request: TokenRequest) -> None:
    check_rules(request)
    if request.request_id is not None and not 1 <= len(request.request_id) <= MAX_REQUEST_ID:
        raise invalid("request_id", f"request_id must have 1 to {MAX_REQUEST_ID} characters")
    if request.stream and request.sampling_params.prompt_logprobs is not None:
        raise invalid("sampling_params.prompt_logprobs", "prompt_logprobs goes with stream=false")


def _grammar(request: TokenRequest) -> Grammar | None:
    try:
        return text_grammar(output_constraint(_fields(request)))
    except ApiError as error:
        raise error.with_names({error.body.param or "": f"sampling_params.{error.body.param}"}) from error


def _fields(request: TokenRequest) -> GenerationFields:
    given = request.sampling_params
    shared = set(TokenSampling.__struct_fields__) & set(GenerationFields.__struct_fields__)
    return GenerationFields(
        **{name: getattr(given, name) for name in shared},
        model=request.model,
        stream=request.stream,
        stream_options=request.stream_options,
        cache_salt=request.cache_salt,
        priority=request.priority,
        deadline_s=request.deadline_s,
        hints=request.hints,
    )


class _TokenIds(Choice):
    """Keeps ids for one body, or writes an event per step."""

    __slots__ = ("_head", "_n", "_usage", "_writer", "prompt_scores", "scores", "token_ids")

    def __init__(
        self,
        response: Response,
        index: int,
        plan: Plan,
        *,
        head: TokenResponse,
        writer: StreamWriter | None,
        usage: StreamUsage,
    ) -> None:
        super().__init__(response, index, prompt_tokens=len(plan.prompt_of(index).token_ids))
        self._head = head
        self._n = plan.n
        self._usage = usage
        self._writer = writer
        self.token_ids: list[int] = []
        self.scores: list[ScoredTokenId] | None = None if plan.scoring.output is None else []
        self.prompt_scores: list[TokenLogprobs] = []

    def tokens(self, event: Tokens) -> None:
        self.prompt_scores += event.prompt_logprobs or ()
        if not event.token_ids:
            return
        self.completion_tokens += len(event.token_ids)
        scores = None if event.logprobs is None else list(map(_scored, event.token_ids, event.logprobs))
        if self._writer is None:
            self.token_ids += event.token_ids
            if self.scores is not None:
                self.scores += scores or ()
            return
        self._write(TokenChoice(index=self.index, token_ids=[*event.token_ids], logprobs=scores, finish_reason=None))

    def conclude(self, reason: FinishReason) -> None:
        if self._writer is not None:
            self._write(self.choice(reason))
        super().conclude(reason)

    def choice(self, reason: FinishReason | None) -> TokenChoice:
        return TokenChoice(
            index=self.index,
            token_ids=self.token_ids,
            logprobs=self.scores,
            finish_reason=None if reason is None else str(reason),
            stop_token_id=self.stop_token_id,
        )

    def _write(self, choice: TokenChoice) -> None:
        writer = self._writer
        if writer is None:
            return
        usage = usage_of(self.response.choices, self._n) if self._usage.every else None
        writer.events.append(_event(msgspec.structs.replace(self._head, choices=[choice], usage=usage)))
        writer.mark_dirty(self.response.link.dirty)


def _event(response: TokenResponse) -> bytes:
    return b"data: " + msgspec.json.encode(response) + b"\n\n"


def _whole(head: TokenResponse, choices: Sequence[_TokenIds], plan: Plan) -> TokenResponse:
    first, prompt = choices[0], plan.prompts[0]
    prompt_logprobs: list[ScoredTokenId | None] | None = None
    if plan.scoring.prompt is not None:
        prompt_logprobs = [None, *map(_scored, prompt.token_ids[1:], first.prompt_scores)]
    return msgspec.structs.replace(
        head,
        choices=[choice.choice(choice.finish_reason) for choice in choices],
        prompt_logprobs=prompt_logprobs,
        usage=usage_of(choices, plan.n),
        kv_transfer_params=told_transfer(choices),
    )


def _scored(token_id: int, logprobs: TokenLogprobs) -> ScoredTokenId:
    top = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
    return ScoredTokenId(
        token_id=token_id,
        logprob=max(logprobs.logprob, LEAST_LOGPROB),
        rank=logprobs.rank,
        top=[TokenAlternative(other, max(logprob, LEAST_LOGPROB)) for other, logprob in top],
    )


def token_generation_routes(service: Service) -> list[Route]:
    doc = RouteDoc(
        summary="Continues token ids with token ids.",
        tag="Tokens",
        body=TokenRequest,
        response=TokenResponse,
        events=(TokenResponse, ErrorResponse),
        last_data=DONE_DATA,
        errors=ERRORS,
    )
    handler, path = TokenGeneration(service), "/inference/v1/generate"
    return [Route(method="POST", path=path, handler=handler, doc=doc, is_stateless=True)]

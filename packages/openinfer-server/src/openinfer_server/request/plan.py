"""From a request's fields to what the engine is asked: prompts, sampling parameters, bounds.

Everything is checked before anything is submitted; the contract's own types check the ranges of single values.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from openinfer_core.engine import EngineInfo
from openinfer_core.errors import InvalidRequest
from openinfer_core.request import MAX_NAME_LENGTH, GenerateRequest, NamedBeginning, RequestId, with_prompt
from openinfer_core.sampling import SamplingParams
from openinfer_core.sampling_defaults import SamplingDefaults
from openinfer_server.http.api_errors import ApiError, from_invalid_request, invalid
from openinfer_server.limits.request_cost import PromptCost, RequestCost
from openinfer_server.options import ServerOptions
from openinfer_server.request.fields import MAX_LOGIT_BIAS, MAX_STOP_CHARACTERS, MAX_STOPS
from openinfer_server.request.generation_fields import GenerationFields, TokenDetailFields
from openinfer_server.request.kv_transfer import KvTransferParams, asked_transfer
from openinfer_server.request.restrictions import Restrictions, read_restrictions
from openinfer_server.request.retention import Retention, retention_of
from openinfer_server.service import Service

T = TypeVar("T")

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for `/v1/completions`
ID_BYTES = 4  # of a token id, where the size of work is compared with that of a body
_CHOICE_BYTES = 2048  # a body that takes as long to decode as a choice to plan: 16 choices are large
_SLICE_IDS = 2**14


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt."""

    token_ids: tuple[int, ...]
    text: str  # as `echo` shows it; of a chat as it was rendered; may be empty where it is not shown
    field: str  # where it came from, for messages
    begun: str = ""  # the end of the text that is the beginning of the answer, which the client has written
    prefix_tokens: tuple[int, ...] = ()  # of each prefix that the client marked
    beginnings: tuple[NamedBeginning, ...] = ()  # of the ids

    @property
    def before_answer(self) -> str:
        """The text up to where the answer begins."""
        return self.text.removesuffix(self.begun)


@dataclass(frozen=True, slots=True)
class Scoring:
    """Which log-probabilities are asked of the engine."""

    output: int | None = None  # alternatives per generated token
    echo: int | None = None  # alternatives per token of an echoed prompt
    prompt: int | None = None  # alternatives per prompt token, beside the text

    @property
    def of_prompt(self) -> int | None:
        """Alternatives that the engine is asked for per prompt token: what shows most of them."""
        return max((each for each in (self.echo, self.prompt) if each is not None), default=None)

    @property
    def field(self) -> str:
        """What messages name."""
        return "prompt_logprobs" if self.output is None and self.echo is None else "logprobs"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a request asks for, checked. Choice `i` continues prompt `i // n`."""

    prompts: Sequence[Prompt]
    n: int
    requests: Sequence[GenerateRequest]  # one per choice
    stops: tuple[str, ...]
    min_tokens: int
    scoring: Scoring
    shows_stop: bool = False  # whether text shows the stop string, or the text of the stop token, that ended it
    named_stop_ids: frozenset[int] = frozenset()  # stop tokens that the request names itself

    @property
    def has_prediction(self) -> bool:
        """Whether the client says what it expects the answer to be."""
        return any(request.prediction_token_ids for request in self.requests)

    def prompt_of(self, index: int) -> Prompt:
        return self.prompts[index // self.n]


def plan_bytes(prompts: Sequence[Prompt], n: int) -> int:
    """How large a body would take as long as planning these prompts, for `HttpRequest.aside`."""
    return n * sum(_CHOICE_BYTES + ID_BYTES * len(prompt.token_ids) for prompt in prompts)


def make_plan(
    service: Service,
    fields: GenerationFields,
    prompts: Sequence[Prompt],
    *,
    tenant: str,
    owner: str,
    max_tokens: int | None,
    default_tokens: int | None = None,
    scoring: Scoring,
    defaults: SamplingDefaults | None = None,
    transfer: KvTransferParams | None = None,
    retention: Retention | None = None,
) -> Plan:
    """Checks a request as a whole, its cost first. May be called in any thread; whether the queue has room for it, its
    submission says.

    Cached prefixes are `tenant`'s; what is shared is taken from `owner`'s share, also where requests have no tenant.
    Parameters that are not given have the values of `defaults`, by default the server's. Without `max_tokens`, choices
    may be as long as context and budgets allow, and as `default_tokens`, if given. `transfer` says where KV goes to, or
    comes from. Without `retention`, what the fields say of it counts.

    Raises:
        ApiError: 400.
    """
    info = service.info
    numbers = (service.sampling_defaults if defaults is None else defaults).resolve(fields.sampling_numbers)
    n = check_num_choices(fields, len(prompts), service.options)
    asked = asked_transfer(transfer, info, stream=bool(fields.stream))
    # What a prefill engine samples is not shown: no text of it ends the request before its KV is stored.
    stops = () if transfer is not None and transfer.leaves_kv else _stops(fields)
    if max_tokens is None:
        limits = _default_limits(service, prompts, scoring, n=n, at_most=default_tokens)
    else:
        limits = [max_tokens] * len(prompts)
    for prompt, limit in zip(prompts, limits, strict=True):
        _check_context(prompt, limit, info)
    cost = RequestCost.of(
        [
            PromptCost(len(prompt.token_ids), max(0, limit), scoring.output, scoring.of_prompt)
            for prompt, limit in zip(prompts, limits, strict=True)
        ],
        n=n,
        block_size_tokens=info.block_size_tokens,
    )
    cost.check(service.options, prompts[0].field, scoring.field)
    if retention is None:
        retention = retention_of(fields.prompt_cache_key, fields.prompt_cache_retention)
    salt = salt_of(tenant, fields.cache_salt)
    if retention.key is not None:
        conversation = (retention.key, tenant, fields.cache_salt, fields.model)
        service.prefix_breaks.note(owner, conversation, prompts[0].token_ids)
    restrictions = read_restrictions(service, fields, num_choices=n * len(prompts))
    requests = [
        _request(
            prompt,
            _sampling(
                fields,
                info,
                max_tokens=limit,
                numbers=numbers,
                scoring=scoring,
                restrictions=restrictions,
                choice=choice,
            ),
            request_id=service.link.new_id(),
            number=index * n + choice,
            owner=owner,
            salt=salt,
            lora=service.adapter_of(fields.model),
            fields=fields,
            transfer=asked,
            retention=retention,
        )
        for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
        for choice in range(n)
    ]
    return Plan(
        prompts,
        n,
        requests,
        stops,
        fields.min_tokens or 0,
        scoring,
        shows_stop=bool(fields.include_stop_str_in_output),
        named_stop_ids=frozenset(fields.stop_token_ids or ())
        - (frozenset() if fields.ignore_eos else frozenset(info.eos_token_ids)),
    )


def _default_limits(
    service: Service, prompts: Sequence[Prompt], scoring: Scoring, *, n: int, at_most: int | None
) -> list[int]:
    info = service.info
    costs = [PromptCost(len(prompt.token_ids), 0, scoring.output, scoring.of_prompt) for prompt in prompts]
    longest = RequestCost.longest_completion(costs, service.options, n=n, block_size_tokens=info.block_size_tokens)
    if at_most is not None:
        longest = min(longest, at_most)
    return [max(1, min(longest, info.max_model_tokens - len(prompt.token_ids))) for prompt in prompts]


def salt_of(tenant: str, given: str | None) -> str | None:
    """What separates the cached prefixes of a request from others': its tenant, and what it gave itself.

    A tenant's salt is a digest of both, so that no salt that a request can give is another tenant's.

    Raises:
        ApiError: 400; the given one is too long.
    """
    if given is not None and len(given) > MAX_NAME_LENGTH:
        raise invalid("cache_salt", f"cache_salt has {len(given)} characters; at most {MAX_NAME_LENGTH} fit")
    if not tenant:
        return given
    return hashlib.sha256(msgspec.json.encode((tenant, given))).hexdigest()


@dataclass(frozen=True, slots=True)
class StreamUsage:
    """Which events of a stream say how many tokens there were."""

    last: bool = False  # one more event at the end; the others then say that theirs is null
    every: bool = False  # each, of the tokens so far


def check_stream_options(fields: GenerationFields) -> StreamUsage:
    stream_options = fields.stream_options
    if stream_options is None:
        return StreamUsage()
    if not fields.stream:
        raise invalid("stream_options", "stream_options is only for stream=true")
    return StreamUsage(bool(stream_options.include_usage), bool(stream_options.continuous_usage_stats))


def check_prompt_token_ids(token_ids: Sequence[int], info: EngineInfo, field: str) -> None:
    """Checks a prompt's ids."""
    if not token_ids:
        raise invalid(field, "the prompt is empty; it must have at least one token")
    for begin in range(0, len(token_ids), _SLICE_IDS):  # `min` of a million ids would hold the interpreter for 10 ms
        some = token_ids[begin : begin + _SLICE_IDS]
        if min(some) < 0 or max(some) >= info.num_token_ids:
            raise invalid(field, f"a token id is outside 0 .. {info.num_token_ids - 1}")


def num_kept_tokens(
    fields: TokenDetailFields, info: EngineInfo, *, max_tokens: int | None, default_tokens: int = 1
) -> int | None:
    """How many tokens of a prompt's end are kept; None for all.

    -1 keeps what the context holds beside the answer.

    Raises:
        ApiError: 400; it is out of range.
    """
    kept, context = fields.truncate_prompt_tokens, info.max_model_tokens
    if kept is None:
        return None
    if kept == -1:
        return max(1, context - (default_tokens if max_tokens is None else max_tokens))
    if not 1 <= kept <= context:
        message = f"truncate_prompt_tokens is {kept}; it must be -1, or 1 to the model's context of {context} tokens"
        raise invalid("truncate_prompt_tokens", message)
    return kept


def prompt_alternatives(fields: TokenDetailFields) -> int | None:
    """Alternatives per prompt token that are shown beside the text; None for none.

    Raises:
        ApiError: 400; they are not streamed.
    """
    if fields.prompt_logprobs is not None and fields.stream:
        raise invalid("prompt_logprobs", "prompt_logprobs goes with stream=false")
    return fields.prompt_logprobs


def too_long(num_tokens: str, info: EngineInfo, field: str) -> ApiError:
    message = f"the prompt has {num_tokens} tokens; the model's context holds {info.max_model_tokens}"
    return ApiError(400, message, param=field, code="context_length_exceeded")


def check_num_choices(fields: GenerationFields, num_prompts: int, options: ServerOptions) -> int:
    """Returns `n`; known before any prompt is encoded."""
    n = 1 if fields.n is None else fields.n
    if n < 1:
        raise invalid("n", f"n is {n}; it must be at least 1")
    if n * num_prompts > options.max_choices:
        raise invalid("n", f"{num_prompts} prompts x n={n} exceed {options.max_choices} choices")
    return n


def _stops(fields: GenerationFields) -> tuple[str, ...]:
    if fields.stop is None:
        return ()
    stops = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop)
    if len(stops) > MAX_STOPS:
        raise invalid("stop", f"stop has {len(stops)} strings; at most {MAX_STOPS} are possible")
    if not all(1 <= len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise invalid("stop", f"each stop string must have 1 to {MAX_STOP_CHARACTERS} characters")
    return stops


def _check_context(prompt: Prompt, max_tokens: int, info: EngineInfo) -> None:
    length = len(prompt.token_ids)
    if length > info.max_model_tokens - min(1, max_tokens):
        raise too_long(str(length), info, prompt.field)
    if length + max_tokens > info.max_model_tokens:
        message = (
            f"the prompt has {length} tokens and max_tokens is {max_tokens}; "
            f"together they exceed the model's context of {info.max_model_tokens}"
        )
        raise ApiError(400, message, param="max_tokens", code="context_length_exceeded")


def _sampling(
    fields: GenerationFields,
    info: EngineInfo,
    *,
    max_tokens: int,
    numbers: Mapping[str, Any],
    scoring: Scoring,
    restrictions: Restrictions,
    choice: int,
) -> SamplingParams:
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            **numbers,
            seed=_seed(fields, choice),
            logit_bias=_logit_bias(fields, info),
            stop_token_ids=_stop_token_ids(fields, info),
            min_tokens=_or(fields.min_tokens, 0),
            logprobs=scoring.output,
            prompt_logprobs=scoring.of_prompt,
            allowed_token_ids=restrictions.allowed_token_ids,
            bad_words=restrictions.bad_words,
        )
    except InvalidRequest as error:
        raise from_invalid_request(error) from error


def _or(given: T | None, default: T) -> T:
    # `null` means absent
    return default if given is None else given


def _seed(fields: GenerationFields, choice: int) -> int | None:
    # Choices of one prompt get successive seeds, or they would all be the same. Signed seeds wrap.
    if fields.seed is None:
        return None
    if not -(2**63) <= fields.seed < 2**64:
        raise invalid("seed", "seed must fit in 64 bits")
    return (fields.seed + choice) % 2**64


def _logit_bias(fields: GenerationFields, info: EngineInfo) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in (fields.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 11 and int(key) < info.num_token_ids):
            raise invalid("logit_bias", f"{key[:32]!r} is not a token id in 0 .. {info.num_token_ids - 1}")
        if not -MAX_LOGIT_BIAS <= value <= MAX_LOGIT_BIAS:
            raise invalid("logit_bias", f"logit_bias of token {key} must be between -100 and 100")
        bias[int(key)] = value
    return bias


def _stop_token_ids(fields: GenerationFields, info: EngineInfo) -> tuple[int, ...]:
    given = fields.stop_token_ids or []
    if any(not 0 <= token_id < info.num_token_ids for token_id in given):
        raise invalid("stop_token_ids", f"a stop token id is outside 0 .. {info.num_token_ids - 1}")
    return (*given, *(() if fields.ignore_eos else info.eos_token_ids))


def _request(
    prompt: Prompt,
    sampling: SamplingParams,
    *,
    request_id: RequestId,
    number: int,
    owner: str,
    salt: str | None,
    lora: str | None,
    fields: GenerationFields,
    transfer: dict[str, Any] | None,
    retention: Retention,
) -> GenerateRequest:
    try:
        request = GenerateRequest(
            request_id=request_id,
            prompt_token_ids=prompt.token_ids[:1],
            sampling=sampling,
            lora=lora,
            cache_salt=salt,
            tenant=owner,
            priority=fields.priority or 0,
            choice=number,
            deadline_s=fields.deadline_s,
            hints=fields.hints or {},
            transfer=transfer,
            retain_s=retention.seconds,
            cache_key=retention.key,
            beginnings=prompt.beginnings,
        )
        # All ids are the tokenizer's, or were checked when they came (`check_prompt_token_ids`).
        return with_prompt(request, prompt.token_ids, retention.prefixes)
    except InvalidRequest as error:
        raise from_invalid_request(error) from error

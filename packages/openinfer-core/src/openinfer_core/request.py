"""`GenerateRequest`: what a frontend asks of an engine. Tokens in; text never reaches an engine."""

from typing import Any, NewType, cast

import msgspec

from openinfer_core.errors import InvalidRequest
from openinfer_core.sampling import MAX_TOKENS, SamplingParams, check_integer, check_token_ids, check_tuple

RequestId = NewType("RequestId", int)
"""Chosen by the caller, 0 .. 2^63 - 1, unique among the requests of one handle that have not ended."""

MAX_NAME_LENGTH = 512
"""Bound of tenant, salt, LoRA name and trace parent, in characters."""

MAX_TRANSFER_BYTES = 1 << 16
"""Bound of `GenerateRequest.transfer`, as JSON."""

MAX_PREDICTION_TOKENS = 1 << 14
"""Bound of `GenerateRequest.prediction_token_ids`."""

MAX_DEADLINE_S = 30 * 86_400.0
MAX_RETAIN_S = 86_400.0
MAX_RETAINED_PREFIXES = 4
MAX_HINTS = 16
MAX_HINT_LENGTH = 256
"""Bound of a hint's name, and of its text, in characters."""


NO_ADAPTER_SLOT = -1


class LoadedAdapter(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An adapter that the engine has."""

    digest: bytes
    """Of its content, 16 bytes: KV computed with it is found by this and not by its name, under which others may be
    loaded later."""
    slot: int = NO_ADAPTER_SLOT
    """Adapter slot that holds it: chosen by the scheduler when the request begins to run (`SlotStart.request`)."""


class RetainedPrefix(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A beginning of a prompt whose KV is to be kept for a time."""

    num_tokens: int
    """Of the prompt; the block that holds the last of them is kept with it."""
    retain_s: float
    """As in `GenerateRequest`."""


class NamedBeginning(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A beginning that several prompts of one frontend have in common."""

    name: int
    """A random one of 63 bits: no other beginning of this process or another has it."""
    num_tokens: int
    """Ids that all prompts with this name begin with."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt to continue.

    Raises:
        InvalidRequest: a value is out of range or not of its type; `field` names it.
    """

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    lora: str | None = None
    """Name of a loaded adapter."""
    adapter: LoadedAdapter | None = None
    """What `lora` names: the engine's loop sets it before the scheduler sees the request, and a frontend leaves it."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with equal salts."""
    tenant: str = ""
    """Whose fair share this request draws on: a name, or a client's address where there are no names."""
    priority: int = 0
    """Smaller is served earlier by the `priority` queue policy."""
    trace_parent: str | None = None
    """A W3C `traceparent`, handed on to spans."""
    deadline_s: float | None = None
    """Seconds from its arrival at the engine, after which it ends with `Failed(DEADLINE)`, waiting or running."""
    retain_s: float | None = None
    """Seconds for which its KV, when it has ended, is given up after what others left: an order of eviction, in the
    tenant's share, for which no request waits. At most `MAX_RETAIN_S`; None asks for nothing."""
    cache_key: str | None = None
    """Names the conversation: what a turn of it retained is retained no longer when a newer one has ended, as far as
    the two differ. Only with `retain_s`."""
    choice: int = 0
    """Its number among the requests that were made of one: of several choices (`n`) or prompts those after the first
    may be served later than other requests of the tenant, so that many weigh as one."""
    hints: dict[str, str] = {}
    """What its sender tells a scheduler that knows it; nothing else reads them. At most `MAX_HINTS`, each a name and a
    text of at most `MAX_HINT_LENGTH` characters; not to be changed."""

    transfer: dict[str, Any] | None = None
    """Where KV computed by another engine is, or where to leave it, for an engine that can: what a router of prefill
    and decode engines sends (vLLM's `kv_transfer_params`). At most `MAX_TRANSFER_BYTES` as JSON; not to be changed."""
    prediction_token_ids: tuple[int, ...] = ()
    """What its sender expects much of the answer to be, for an engine whose drafter takes that
    (`EngineCapability.PREDICTIONS`): drafts come from it, and change no token. At most `MAX_PREDICTION_TOKENS`."""
    retained_prefixes: tuple[RetainedPrefix, ...] = ()
    """Beginnings of the prompt that are kept as `retain_s` keeps all of it: of what both name, the longest time counts.
    At most `MAX_RETAINED_PREFIXES`."""
    highest_token_id: int | None = None
    """One that no id of the prompt exceeds, where the link that brought the request has looked at them, part by part;
    a frontend leaves it."""
    beginnings: tuple[NamedBeginning, ...] = ()
    """What the frontend knows of the prompt, so that a link of its process need not compare it with those that it sent
    before; of a request that came by a link there are none."""

    def __post_init__(self) -> None:
        check_integer("request_id", self.request_id, low=0, high=2**63 - 1)
        _check_prompt(self.prompt_token_ids)
        check_integer("choice", self.choice, low=0, high=2**31 - 1)
        check_integer("priority", self.priority, low=-(2**31), high=2**31 - 1)
        for name in ("lora", "cache_salt", "tenant", "trace_parent", "cache_key"):
            value = getattr(self, name)
            if value is not None and len(value) > MAX_NAME_LENGTH:
                raise InvalidRequest(f"{name} has {len(value)} characters; at most {MAX_NAME_LENGTH} fit", field=name)
        if self.deadline_s is not None:
            _check_seconds("deadline_s", self.deadline_s, most=MAX_DEADLINE_S)
        if self.retain_s is not None:
            _check_seconds("retain_s", self.retain_s, most=MAX_RETAIN_S)
        elif self.cache_key is not None:
            raise InvalidRequest("cache_key is for retain_s, which is not given", field="cache_key")
        if self.hints:
            _check_hints(self.hints)
        if self.transfer is not None:
            check_transfer(self.transfer)
        if self.prediction_token_ids:
            _check_prediction(self.prediction_token_ids)
        if self.retained_prefixes:
            _check_prefixes(self.retained_prefixes, len(self.prompt_token_ids))


def with_fields(request: GenerateRequest, **fields: Any) -> GenerateRequest:
    """Another request of the same prompt, with other values of some fields; these are checked, the prompt's ids not.

    Args:
        request: which stays as it is.
        fields: of `GenerateRequest`, but for the prompt and prefixes of it (`with_prompt`).

    Raises:
        InvalidRequest: a value is out of range or not of its type; `field` names it.
        TypeError: there is no such field, or it is one of the two.
    """
    # a stand-in for the prompt is checked in its place: all of 290,000 ids would take 5 ms each time
    changed = msgspec.structs.replace(request, prompt_token_ids=(0,), retained_prefixes=(), **fields)
    msgspec.structs.force_setattr(changed, "prompt_token_ids", request.prompt_token_ids)
    msgspec.structs.force_setattr(changed, "retained_prefixes", request.retained_prefixes)
    return changed


def with_prompt(
    request: GenerateRequest, prompt_token_ids: tuple[int, ...], retained_prefixes: tuple[RetainedPrefix, ...]
) -> GenerateRequest:
    """The request with another prompt, whose ids are known to be ids, and prefixes of it.

    It is changed in place: in another one all ids would be checked once more, 5 ms for 290,000.

    Args:
        request: of which nothing else holds a reference.
        prompt_token_ids: integers in the range of `sampling.TokenIds`.
        retained_prefixes: of this prompt.

    Raises:
        InvalidRequest: the prompt is too long, or shorter than a prefix; nothing has changed then.
    """
    _check_num_tokens(len(prompt_token_ids))
    if retained_prefixes:
        _check_prefixes(retained_prefixes, len(prompt_token_ids))
    msgspec.structs.force_setattr(request, "prompt_token_ids", prompt_token_ids)
    msgspec.structs.force_setattr(request, "retained_prefixes", retained_prefixes)
    return request


def token_id_beyond(request: GenerateRequest, limit: int) -> int | None:
    """The highest id of the prompt if it is not below a limit, the number of ids that a model has; else None."""
    known = request.highest_token_id
    if known is not None and known < limit:  # looking at 290,000 takes 4 ms
        return None
    highest = max(request.prompt_token_ids)
    return highest if highest >= limit else None


def with_id(request: GenerateRequest, request_id: RequestId) -> GenerateRequest:
    """The request under another id, changed in place as `with_prompt` does; the id is one that an engine gave."""
    msgspec.structs.force_setattr(request, "request_id", request_id)
    return request


def _check_prompt(prompt: object) -> None:
    _check_num_tokens(len(check_tuple("prompt_token_ids", prompt)))
    check_token_ids("prompt_token_ids", prompt)


def _check_num_tokens(num_tokens: int) -> None:
    if not 1 <= num_tokens <= MAX_TOKENS:
        raise InvalidRequest(
            f"the prompt has {num_tokens} tokens; it must have between 1 and {MAX_TOKENS}", field="prompt_token_ids"
        )


def _check_prediction(prediction: object) -> None:
    num_tokens = len(check_tuple("prediction_token_ids", prediction))
    if num_tokens > MAX_PREDICTION_TOKENS:
        raise InvalidRequest(
            f"the prediction has {num_tokens} tokens; at most {MAX_PREDICTION_TOKENS} are possible",
            field="prediction_token_ids",
        )
    check_token_ids("prediction_token_ids", prediction)


def _check_prefixes(prefixes: object, num_tokens: int) -> None:
    name = "retained_prefixes"
    several = check_tuple(name, prefixes)
    if len(several) > MAX_RETAINED_PREFIXES:
        raise InvalidRequest(f"{name} has {len(several)}; at most {MAX_RETAINED_PREFIXES} are possible", field=name)
    for each in several:
        if not isinstance(each, RetainedPrefix):
            raise InvalidRequest(f"{name} has a {type(each).__name__} in it", field=name)
        check_integer(name, each.num_tokens, low=1, high=num_tokens)
        _check_seconds(name, each.retain_s, most=MAX_RETAIN_S)


def _check_seconds(name: str, seconds: object, *, most: float) -> None:
    if type(seconds) not in (int, float):
        raise InvalidRequest(f"{name} is of type {type(seconds).__name__}; it must be a number", field=name)
    if not 0 < cast("float", seconds) <= most:  # not true of NaN either
        raise InvalidRequest(f"{name} is {seconds}; it must be above 0 and at most {most:.0f} seconds", field=name)


def _check_hints(hints: object) -> None:
    if type(hints) is not dict:
        raise InvalidRequest(f"hints is of type {type(hints).__name__}; it must be a dict", field="hints")
    entries = cast("dict[object, object]", hints)
    if len(entries) > MAX_HINTS:
        raise InvalidRequest(f"hints has {len(entries)} entries; at most {MAX_HINTS} are possible", field="hints")
    for name, text in entries.items():
        if type(name) is not str or type(text) is not str:
            raise InvalidRequest("hints must have texts as names and values", field="hints")
        if not name or max(len(name), len(text)) > MAX_HINT_LENGTH:
            raise InvalidRequest(
                f"a hint has a name of {len(name)} and a text of {len(text)} characters; a name must have 1 to "
                f"{MAX_HINT_LENGTH}, a text at most {MAX_HINT_LENGTH}",
                field="hints",
            )


def check_transfer(transfer: object) -> None:
    """Raises `InvalidRequest`: these are no parameters of a transfer, or too many bytes of them."""
    if type(transfer) is not dict:
        raise InvalidRequest(f"transfer is of type {type(transfer).__name__}; it must be a dict", field="transfer")
    try:
        num_bytes = len(msgspec.json.encode(cast("dict[Any, Any]", transfer)))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest("transfer must be what JSON can say", field="transfer") from error
    if num_bytes > MAX_TRANSFER_BYTES:
        raise InvalidRequest(
            f"transfer has {num_bytes} bytes as JSON; at most {MAX_TRANSFER_BYTES} are possible", field="transfer"
        )

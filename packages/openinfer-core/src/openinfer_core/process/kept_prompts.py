"""Long prompts that a link keeps at both ends, so that the next turn of a conversation sends what is new of it.

    client: SentPrompts                                    engine: KeptPrompts, PromptBuffer
    a prompt, compared with those sent before ── KnownPrompt: begins like place 3, 280,000 tokens; keep it there ──►
                                              ── PromptPart …, Submit: the rest ──►   beginning of place 3 + the rest

The client alone decides what is kept and what is given up; the engine's end does what it is told within the number of
ids that its `Welcome` allowed, and a client that exceeds it breaks the protocol. Prompts are compared id by id, but for
a beginning that has one name in both (`NamedBeginning`): what is sent is never a guess about what the other end has.
Those of other cache salts are not compared, so that the time a prompt takes says nothing of another tenant's.
"""

import itertools
from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from openinfer_core.errors import ContractViolation, InvalidRequest
from openinfer_core.process.wire import PART_IDS, KnownPrompt, PromptPart
from openinfer_core.request import GenerateRequest, NamedBeginning, RetainedPrefix, with_prompt
from openinfer_core.sampling import MAX_TOKENS

MAX_PLACES = 1024
"""Prompts that a link keeps at most."""
KEPT_IDS = 2**24
"""Ids of all of them: 58 conversations of 290,000. At 8 bytes each 134 MB at each end, since prompts share the ids."""
ALL_KEPT_IDS = 2**27
"""Of all links of an engine; those that come when it is spent keep nothing."""
_LEAST_IDS = PART_IDS  # shorter prompts take less time than is worth keeping them, and so do shorter beginnings
_TAIL_IDS = 256  # that a turn may change at the end of the one before, such as the beginning of its answer
_PROBE_IDS = 32
_MOST_COMPARED = 4
_TAIL_PARTS = 4  # a prompt's tail is at most so many parts: the next turn copies it besides the rest
_SLICE_IDS = 2**11  # ids of which one call makes shared ones, during which no other thread runs


@dataclass(frozen=True, slots=True)
class Sending:
    """How a prompt is sent."""

    known: KnownPrompt | None
    """What is sent first; None for a prompt that is neither like another nor kept."""
    cache_salt: str | None = None
    beginnings: tuple[NamedBeginning, ...] = ()

    @property
    def num_known(self) -> int:
        """Tokens of the prompt that the engine has."""
        return 0 if self.known is None else self.known.num_tokens


_WHOLE = Sending(None)


@dataclass(frozen=True, slots=True)
class _Sent:
    """A prompt that was sent, in parts that successive turns share."""

    cache_salt: str | None
    parts: tuple[tuple[int, ...], ...]
    num_ids: int
    head: tuple[int, ...]
    near_end: tuple[int, ...]  # before what the next turn may change
    beginnings: tuple[NamedBeginning, ...]

    @classmethod
    def of(cls, prompt: tuple[int, ...], like: "_Sent | None", sending: Sending) -> "_Sent":
        same = () if like is None else like.parts[: sending.num_known // PART_IDS]
        rest = (prompt[begin : begin + PART_IDS] for begin in range(len(same) * PART_IDS, len(prompt), PART_IDS))
        parts = (*same, *rest)
        head, near_end = prompt[:_PROBE_IDS], _near(prompt, len(prompt))
        return cls(sending.cache_salt, parts, len(prompt), head, near_end, sending.beginnings)


class SentPrompts:
    """The client's end.

    Args:
        max_ids: that the engine allows.
    """

    def __init__(self, max_ids: int) -> None:
        self._max_ids = max_ids
        self._num_ids = 0
        self._kept: OrderedDict[int, _Sent] = OrderedDict()  # by place, longest unused first

    def plan(
        self,
        prompt: tuple[int, ...],
        prefixes: tuple[RetainedPrefix, ...],
        *,
        cache_salt: str | None,
        beginnings: tuple[NamedBeginning, ...] = (),
    ) -> Sending:
        """How a prompt is sent. Nothing has changed before `sent`: the frames may turn out not to be sent."""
        if not _LEAST_IDS < len(prompt) <= self._max_ids:
            return _WHOLE
        alike, num_known = self._most_alike(prompt, cache_salt, beginnings)
        num_ids, num_kept, forgotten = self._num_ids, len(self._kept), list[int]()
        if (
            alike is not None and num_known >= self._kept[alike].num_ids - _TAIL_IDS
        ):  # the next turn: it takes the place
            place = alike
            num_ids -= self._kept[alike].num_ids
        else:
            place = next(each for each in itertools.count() if each not in self._kept)
            num_kept += 1
        for each, held in self._kept.items():
            if num_ids + len(prompt) <= self._max_ids and num_kept <= MAX_PLACES:
                break
            if each != place:
                forgotten.append(each)
                num_ids -= held.num_ids
                num_kept -= 1
        return Sending(KnownPrompt(place, alike, num_known, tuple(forgotten), prefixes), cache_salt, beginnings)

    def sent(self, sending: Sending, prompt: tuple[int, ...]) -> None:
        """It was sent so."""
        known = sending.known
        if known is None:
            return
        made = _Sent.of(prompt, None if known.like is None else self._kept[known.like], sending)
        for place in {*known.forgotten, known.place} & self._kept.keys():
            self._num_ids -= self._kept.pop(place).num_ids
        if known.like in self._kept:
            self._kept.move_to_end(known.like)
        self._kept[known.place] = made
        self._num_ids += len(prompt)

    def _most_alike(
        self, prompt: tuple[int, ...], cache_salt: str | None, beginnings: tuple[NamedBeginning, ...]
    ) -> tuple[int | None, int]:
        """The place of a kept prompt with a long common beginning, and its length; the last id is never in it."""
        best, most = None, 0
        for place in self._candidates(prompt, cache_salt):
            kept = self._kept[place]
            num_named = max((each.num_tokens for each in beginnings if each in kept.beginnings), default=0)
            num_common = min(_num_common(kept, prompt, num_named), len(prompt) - 1)
            if num_common > most:
                best, most = place, num_common
            if num_common >= kept.num_ids - _TAIL_IDS:
                break
        return (best, most) if most >= _LEAST_IDS else (None, 0)

    def _candidates(self, prompt: tuple[int, ...], cache_salt: str | None) -> list[int]:
        """Some of those that begin like a prompt: those first whose ends it has, too, then those used last."""
        head = prompt[:_PROBE_IDS]
        own = ((place, kept) for place, kept in reversed(self._kept.items()) if kept.cache_salt == cache_salt)
        alike = [(place, kept) for place, kept in own if kept.head == head]
        ended = (place for place, kept in alike if kept.near_end == _near(prompt, kept.num_ids))
        return [*itertools.islice(ended, _MOST_COMPARED), *(place for place, _ in alike[:_MOST_COMPARED])]


@dataclass(frozen=True, slots=True)
class _Kept:
    """A prompt that came, in two parts.

    Those before its tail are what an earlier turn had, too, so that the next turn's prompt is made by one pass over
    them: to cut them off a prompt and to free that again takes two more, of a millisecond each for 290,000.
    """

    before: tuple[int, ...]
    tail: tuple[int, ...]
    highest: int
    """Id that is not below any of them."""

    @property
    def num_ids(self) -> int:
        return len(self.before) + len(self.tail)

    def beginning(self, num_ids: int) -> "_Kept":
        num_before = len(self.before)
        if num_ids < num_before:
            return _Kept(self.before[:num_ids], (), self.highest)
        return _Kept(self.before, self.tail[: num_ids - num_before], self.highest)

    def followed_by(self, rest: tuple[int, ...], highest: int) -> "tuple[_Kept, tuple[int, ...]]":
        """What is kept of a prompt that begins so and goes on, and all of its ids."""
        tail = self.tail + rest
        prompt = self.before + tail
        if len(tail) > _TAIL_PARTS * PART_IDS or not self.before:
            return _Kept(prompt, (), highest), prompt
        return _Kept(self.before, tail, highest), prompt


_NOTHING = _Kept((), (), 0)


class KeptPrompts:
    """The engine's end: prompts of one link, by place.

    Args:
        max_ids: of all; what the link was allowed.
    """

    def __init__(self, max_ids: int = 0) -> None:
        self._max_ids = max_ids
        self._num_ids = 0
        self._kept: dict[int, _Kept] = {}

    def beginning(self, known: KnownPrompt) -> _Kept:
        """The ids that a prompt begins with.

        Raises:
            ContractViolation: there are not as many.
        """
        if known.like is None:
            return _NOTHING
        kept = self._kept.get(known.like, _NOTHING)
        if not 0 < known.num_tokens <= kept.num_ids:
            raise ContractViolation(f"a prompt begins with {known.num_tokens} ids of one that is not kept")
        return kept.beginning(known.num_tokens)

    def keep(self, known: KnownPrompt, kept: _Kept) -> None:
        """Raises `ContractViolation`: more than is allowed."""
        if not 0 <= known.place <= MAX_PLACES:
            raise ContractViolation(f"a prompt is to be kept at place {known.place}")
        for place in (*known.forgotten, known.place):
            if place in self._kept:
                self._num_ids -= self._kept.pop(place).num_ids
        if self._num_ids + kept.num_ids > self._max_ids:
            raise ContractViolation(f"more than {self._max_ids} ids of prompts are to be kept")
        self._kept[known.place] = kept
        self._num_ids += kept.num_ids


class SharedIds:
    """One object for each id, which all kept prompts share: as objects of their own they take 32 bytes each.

    Args:
        num_token_ids: of the model; others are left as they are.
    """

    def __init__(self, num_token_ids: int) -> None:
        self._limit = num_token_ids
        self._ids: list[int] = []

    def of(self, ids: tuple[int, ...], highest: int) -> tuple[int, ...]:
        """The same ids; `highest` is theirs."""
        if highest >= self._limit:
            return ids
        if highest >= len(self._ids):
            self._ids.extend(range(len(self._ids), highest + 1))
        find = self._ids.__getitem__
        shared: list[int] = []
        for begin in range(0, len(ids), _SLICE_IDS):
            shared += map(find, ids[begin : begin + _SLICE_IDS])
        return tuple(shared)


class PromptBuffer:
    """Parts of a link's next prompt, and what it has in common with those before."""

    __slots__ = ("_beginning", "_highest", "_ids", "_kept", "_known", "_retained_prefixes", "_token_ids")

    def __init__(self, kept: KeptPrompts | None = None, ids: SharedIds | None = None) -> None:
        self._kept = KeptPrompts() if kept is None else kept
        self._ids = SharedIds(0) if ids is None else ids
        self._clear()

    def _clear(self) -> None:
        self._known: KnownPrompt | None = None
        self._beginning = _NOTHING
        self._token_ids: list[int] = []
        self._highest = 0
        self._retained_prefixes: tuple[RetainedPrefix, ...] = ()

    def begin(self, known: KnownPrompt) -> None:
        """Raises `ContractViolation`: it does not come first, or there is no such beginning."""
        if self._known is not None or self._token_ids:
            raise ContractViolation("what is known of a prompt comes before its parts")
        self._beginning = self._kept.beginning(known)
        self._highest = self._beginning.highest
        self._known, self._retained_prefixes = known, known.retained_prefixes

    def take(self, part: PromptPart) -> None:
        """Raises `ContractViolation`: no prompt is as long."""
        if self._beginning.num_ids + len(self._token_ids) + len(part.token_ids) > MAX_TOKENS:
            raise ContractViolation(f"parts of a prompt have more than {MAX_TOKENS} tokens")
        self._token_ids += self._noted(part.token_ids)
        if part.retained_prefixes:
            self._retained_prefixes = part.retained_prefixes

    def complete(self, request: GenerateRequest) -> GenerateRequest:
        """The request that `prompt_parts` was given; its only holder is the caller, since it is changed in place.

        Raises:
            ContractViolation: it does not belong to the parts before it, or more is to be kept than is allowed.
        """
        if self._known is None and not self._token_ids:
            # What a client says of it counts for nothing.
            msgspec.structs.force_setattr(request, "highest_token_id", None)
            return _without_names(request)
        known, rest = self._known, (*self._token_ids, *self._noted(request.prompt_token_ids))
        prefixes, highest = self._retained_prefixes, self._highest
        kept, prompt = self._beginning.followed_by(rest, highest)
        self._clear()
        try:
            whole = with_prompt(request, prompt, prefixes)
        except InvalidRequest as error:
            raise ContractViolation(f"a request does not belong to the parts of a prompt before it: {error}") from error
        msgspec.structs.force_setattr(whole, "highest_token_id", highest)
        if known is not None:
            self._kept.keep(known, kept)
        return _without_names(whole)

    def _noted(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        highest = max(ids, default=0)
        self._highest = max(self._highest, highest)
        return ids if self._known is None else self._ids.of(ids, highest)


def prompt_parts(request: GenerateRequest, sending: Sending = _WHOLE) -> tuple[list[PromptPart], GenerateRequest]:
    """What is sent before a request on a link, after `sending.known`, and the request with the rest of its prompt."""
    prompt = request.prompt_token_ids
    if len(prompt) <= PART_IDS and not sending.num_known:
        return [], request
    begins = range(sending.num_known, len(prompt), PART_IDS)
    parts = [PromptPart(prompt[begin : begin + PART_IDS]) for begin in begins[:-1]]
    if parts and sending.known is None:
        parts[-1] = PromptPart(parts[-1].token_ids, request.retained_prefixes)
    rest = prompt[begins[-1] :]
    return parts, msgspec.structs.replace(request, prompt_token_ids=rest, retained_prefixes=(), beginnings=())


def _near(prompt: tuple[int, ...], end: int) -> tuple[int, ...]:
    last = max(0, end - _TAIL_IDS)
    return prompt[max(0, last - _PROBE_IDS) : last]


def _without_names(request: GenerateRequest) -> GenerateRequest:
    """Changed in place: who sends by a link is not believed that prompts are the same."""
    if request.beginnings:
        msgspec.structs.force_setattr(request, "beginnings", ())
    return request


def _num_common(sent: _Sent, prompt: tuple[int, ...], num_same: int) -> int:
    """Ids that two prompts begin with alike, of which some are known to be the same.

    Parts are compared by C, and keep the interpreter for 0.1 ms each.
    """
    for number, part in enumerate(sent.parts[num_same // PART_IDS :], start=num_same // PART_IDS):
        other = prompt[number * PART_IDS : number * PART_IDS + len(part)]
        if part == other:
            continue
        begin, end = 0, len(other)
        while begin < end:  # the first that differs is one of these, or there is none
            middle = (begin + end) // 2
            if part[begin : middle + 1] == other[begin : middle + 1]:
                begin = middle + 1
            else:
                end = middle
        return number * PART_IDS + begin
    return sent.num_ids

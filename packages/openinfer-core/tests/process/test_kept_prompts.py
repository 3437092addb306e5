"""Long prompts of conversations reach the engine as they are, whatever is kept of those before."""

# ruff: noqa: SLF001 - what is kept shows nowhere else

import asyncio
import random

import msgspec
import pytest

from openinfer_core import ContractViolation, GenerateRequest, RequestId, RetainedPrefix, SamplingParams
from openinfer_core.process import kept_prompts
from openinfer_core.process.kept_prompts import (
    MAX_PLACES,
    KeptPrompts,
    PromptBuffer,
    SentPrompts,
    SharedIds,
    prompt_parts,
)
from openinfer_core.process.wire import (
    PART_IDS,
    FrameBuffer,
    KnownPrompt,
    PromptPart,
    Submit,
    encode_frame,
    to_engine_decoder,
)
from openinfer_core.request import NamedBeginning, token_id_beyond
from openinfer_core.simulated import SimulatedOptions, simulated_token, spawn_simulated

NUM_IDS = 70_000


class Ends:
    """Both ends of a link, with the wire between them."""

    def __init__(self, max_ids: int) -> None:
        self.sent = SentPrompts(max_ids)
        self.kept = KeptPrompts(max_ids)
        self.buffer = PromptBuffer(self.kept, SharedIds(NUM_IDS))
        self.num_bytes = 0  # of the last request

    def send(self, request: GenerateRequest) -> GenerateRequest:
        prompt = request.prompt_token_ids
        sending = self.sent.plan(
            prompt, request.retained_prefixes, cache_salt=request.cache_salt, beginnings=request.beginnings
        )
        parts, rest = prompt_parts(request, sending)
        known = [] if sending.known is None else [sending.known]
        data = b"".join(map(encode_frame, (*known, *parts, Submit(rest))))
        self.sent.sent(sending, request.prompt_token_ids)
        self.num_bytes = len(data)
        for body in FrameBuffer().feed(data):
            message = to_engine_decoder.decode(body)
            if isinstance(message, KnownPrompt):
                self.buffer.begin(message)
            elif isinstance(message, PromptPart):
                self.buffer.take(message)
            else:
                assert isinstance(message, Submit)
                return self.buffer.complete(message.request)
        raise AssertionError


def make(prompt: tuple[int, ...], *retained: int, beginnings: tuple[NamedBeginning, ...] = ()) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(1),
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=1),
        retained_prefixes=tuple(RetainedPrefix(each, 60.0) for each in retained),
        beginnings=beginnings,
    )


def drawn(rng: random.Random, num_tokens: int) -> tuple[int, ...]:
    return tuple(rng.choices(range(NUM_IDS), k=num_tokens))


def plain(request: GenerateRequest) -> GenerateRequest:
    return msgspec.structs.replace(request, highest_token_id=None, beginnings=())


class Names(dict[tuple[int, ...], NamedBeginning]):
    """Of beginnings, as a frontend gives them."""

    def of(self, prompt: tuple[int, ...], lengths: tuple[int, ...]) -> tuple[NamedBeginning, ...]:
        found = (prompt[:length] for length in lengths if length <= len(prompt))
        return tuple(self.setdefault(each, NamedBeginning(len(self), len(each))) for each in found)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("max_ids", [0, 300, 800, 2**20])
@pytest.mark.parametrize("lengths", [(), (20, 70, 130, 200)])
def test_prompts_arrive_as_they_were_sent(
    monkeypatch: pytest.MonkeyPatch, seed: int, max_ids: int, lengths: tuple[int, ...]
) -> None:
    small = {"PART_IDS": 64, "_LEAST_IDS": 64, "_TAIL_IDS": 8, "_PROBE_IDS": 4, "_TAIL_PARTS": 1}
    for name, number in small.items():
        monkeypatch.setattr(kept_prompts, name, number)
    rng, names = random.Random(seed), Names()
    ends = Ends(max_ids)
    common = drawn(rng, 80)
    sessions = [common[: rng.choice((0, 10, 64, 80))] + drawn(rng, 80) for _ in range(4)]
    for _ in range(60):
        number = rng.randrange(len(sessions))
        prompt = sessions[number]
        match rng.randrange(6):
            case 0:  # a turn of another length, or the same one again
                prompt = prompt[: rng.choice((1, 64, len(prompt)))]
            case 1:  # its history is written otherwise somewhere
                place = rng.randrange(len(prompt))
                prompt = (*prompt[:place], (prompt[place] + 1) % NUM_IDS, *prompt[place + 1 :])
            case _:
                prompt = prompt[: len(prompt) - rng.choice((0, 3, 20))] + drawn(rng, rng.choice((1, 7, 70)))
        sessions[number] = prompt if 80 < len(prompt) < 400 else drawn(rng, 100)
        retained = sorted({1, rng.randint(1, len(prompt)), len(prompt)})
        request = make(prompt, *retained, beginnings=names.of(prompt, lengths))
        arrived = ends.send(request)
        assert not arrived.beginnings
        assert plain(arrived) == plain(request)
        if len(prompt) > 64:
            assert arrived.highest_token_id is not None
            assert max(prompt) <= arrived.highest_token_id < NUM_IDS
        assert token_id_beyond(arrived, NUM_IDS) is None
        assert token_id_beyond(arrived, max(prompt)) == max(prompt)


def test_next_turns_send_what_is_new() -> None:
    rng = random.Random(1)
    ends = Ends(2**21)
    sessions = [drawn(rng, 20_000) for _ in range(3)]
    for session in sessions:
        ends.send(make(session))
        assert ends.num_bytes > 40_000
    for _ in range(2):
        for number, session in enumerate(sessions):
            sessions[number] = session[:-5] + drawn(rng, 600)
            ends.send(make(sessions[number], len(sessions[number])))
            assert ends.num_bytes < 4500
    assert ends.sent._num_ids == ends.kept._num_ids == sum(map(len, sessions))


def test_prompts_of_another_salt_are_sent_whole() -> None:
    ends = Ends(2**21)
    prompt = drawn(random.Random(4), 40_000)
    for cache_salt, is_known in (("a", False), ("b", False), (None, False), ("a", True), ("b", True), (None, True)):
        request = msgspec.structs.replace(make(prompt), cache_salt=cache_salt)
        assert plain(ends.send(request)) == request
        assert (ends.num_bytes < 1000) is is_known
    assert ends.sent._num_ids == ends.kept._num_ids == 3 * len(prompt)


def test_what_was_used_least_recently_is_given_up_and_ends_agree() -> None:
    rng = random.Random(2)
    ends = Ends(100_000)
    first, second, third = (drawn(rng, 40_000) for _ in range(3))
    for prompt in (first, second, first, third):  # the second makes room
        ends.send(make(prompt))
    for prompt, is_known in ((first, True), (third, True), (second, False)):
        ends.send(make(prompt))
        assert (ends.num_bytes < 1000) is is_known
    assert ends.sent._num_ids == ends.kept._num_ids == 80_000


def test_as_many_places_as_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_prompts, "_LEAST_IDS", 64)
    sent = SentPrompts(2**40)
    for number in range(MAX_PLACES + 3):
        prompt = (number, *range(64))
        sending = sent.plan(prompt, (), cache_salt=None)
        assert sending.known is not None
        assert 0 <= sending.known.place <= MAX_PLACES
        sent.sent(sending, prompt)
    assert len(sent._kept) == MAX_PLACES


def test_few_are_compared_however_many_look_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in {"_LEAST_IDS": 64, "_TAIL_IDS": 8, "_PROBE_IDS": 4}.items():
        monkeypatch.setattr(kept_prompts, name, number)
    sent, compared = SentPrompts(2**40), []
    num_common = kept_prompts._num_common
    monkeypatch.setattr(kept_prompts, "_num_common", lambda *args: compared.append(1) or num_common(*args))
    for number in range(100):  # equal but in one place
        prompt = (*range(20), -number, *range(80))
        sent.sent(sent.plan(prompt, (), cache_salt=None), prompt)
        assert len(compared) <= 8
        compared.clear()


def test_nothing_is_kept_of_a_request_that_is_not_sent() -> None:
    sent = SentPrompts(2**20)
    prompt = tuple(range(PART_IDS + 1))
    assert sent.plan(prompt, (), cache_salt=None) == sent.plan(prompt, (), cache_salt=None)
    assert not sent._kept


def test_ids_beyond_the_model_are_told_and_hurt_no_later_prompt() -> None:
    ends = Ends(2**20)
    good = tuple(range(40_000))
    bad = ends.send(make((*good, NUM_IDS + 7)))
    assert token_id_beyond(bad, NUM_IDS) == NUM_IDS + 7
    after = ends.send(make((*good, 5)))
    assert ends.num_bytes < 1000
    assert token_id_beyond(after, NUM_IDS) is None


def test_what_has_one_name_is_not_compared() -> None:
    """Of two prompts that differ in their beginning, which no frontend would name alike."""
    named = (NamedBeginning(1, 2 * PART_IDS),)
    for beginnings, num_known in (((), 40), (named, 2 * PART_IDS + 9)):
        sent = SentPrompts(2**20)
        first = tuple(range(2 * PART_IDS + 10))
        sent.sent(sent.plan(first, (), cache_salt=None, beginnings=beginnings), first)
        other = (*first[:40], 7, *first[41:])
        _, num_common = sent._most_alike(other, None, beginnings)
        assert num_common == (num_known if beginnings else 0)  # 40 are too few to name
        known = sent.plan(other, (), cache_salt="another", beginnings=beginnings).known
        assert known is not None
        assert known.like is None


def test_next_turns_are_made_of_what_is_kept_in_one_pass() -> None:
    """What is before the tail stays one object; a tail that grows long becomes part of it."""
    rng = random.Random(5)
    ends = Ends(2**21)
    prompt = drawn(rng, 50_000)
    ends.send(make(prompt))
    before = ends.kept._kept[0].before
    for number in range(8):
        prompt = prompt[:-3] + drawn(rng, 10_000) if number else prompt + drawn(rng, 10_000)
        assert ends.send(make(prompt)).prompt_token_ids == prompt
        kept = ends.kept._kept[0]
        assert (kept.before + kept.tail, kept.highest >= max(prompt)) == (prompt, True)
        assert (kept.before is before) is (number < 6)
    assert ends.sent._num_ids == ends.kept._num_ids == len(prompt)


def test_what_a_client_says_of_its_ids_counts_for_nothing() -> None:
    said = {"highest_token_id": 0, "beginnings": (NamedBeginning(1, 2),)}
    taken = PromptBuffer().complete(msgspec.structs.replace(make((5, 9)), **said))
    assert (taken.highest_token_id, taken.beginnings) == (None, ())


@pytest.mark.parametrize(
    ("known", "refusal"),
    [
        (KnownPrompt(0, 7, 3), "of one that is not kept"),
        (KnownPrompt(0, 1, 4), "begins with 4 ids"),
        (KnownPrompt(0, 1, -1), "begins with -1 ids"),
        (KnownPrompt(0, 1, 0), "begins with 0 ids"),
        (KnownPrompt(-1, None, 0), "at place -1"),
        (KnownPrompt(MAX_PLACES + 1, None, 0), "at place"),
        (KnownPrompt(2, 1, 3), "more than 5 ids"),
    ],
)
def test_what_does_not_hold_breaks_the_protocol(known: KnownPrompt, refusal: str) -> None:
    kept = KeptPrompts(5)
    first = PromptBuffer(kept)
    first.begin(KnownPrompt(1, None, 0))
    first.complete(make((1, 2, 3)))
    buffer = PromptBuffer(kept)

    def take() -> None:
        buffer.begin(known)
        buffer.complete(make((4,)))

    with pytest.raises(ContractViolation, match=refusal):
        take()


def test_what_is_known_comes_first_and_once() -> None:
    for first in (KnownPrompt(0, None, 0), PromptPart((1,))):
        buffer = PromptBuffer(KeptPrompts(9))
        buffer.begin(first) if isinstance(first, KnownPrompt) else buffer.take(first)
        with pytest.raises(ContractViolation, match="before its parts"):
            buffer.begin(KnownPrompt(0, None, 0))


def test_turns_of_a_conversation_over_a_link() -> None:
    options = SimulatedOptions(num_token_ids=NUM_IDS)

    async def play() -> int:
        engine = spawn_simulated(options)
        try:
            prompt = tuple(range(PART_IDS + 100))
            for number in range(3):
                request = msgspec.structs.replace(make(prompt), request_id=RequestId(number))
                engine.submit(request)
                async for events in engine.events():
                    said = [token_id for event in events for token_id in getattr(event, "token_ids", ())]
                    if said:
                        assert said == [simulated_token(request, 0, options)]
                        break
                prompt += (number, *range(700))
            return engine._prompts._num_ids
        finally:
            await engine.close()

    assert asyncio.run(play()) == PART_IDS + 100 + 2 * 701

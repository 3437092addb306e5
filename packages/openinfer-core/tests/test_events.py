"""Events keep their bytes: a frontend and an engine of different releases understand each other."""

import msgspec
import pytest

from openinfer_core import (
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    RequestId,
    Scheduled,
    TokenEvent,
    TokenLogprobs,
    Tokens,
)

LOGPROBS = TokenLogprobs(-0.5, 2, (7, 9), (-0.25, -0.5))

# Recorded when the format was made. A difference here is a break for every other release: append fields, with
# defaults, and record a further line; never change one of these.
GOLDEN: dict[str, tuple[TokenEvent, str]] = {
    "scheduled": (Scheduled(RequestId(5), 16, 0.25), "94a1730510cb3fd0000000000000"),
    "tokens": (Tokens(RequestId(5), (7, 300)), "95a174059207cd012cc0c0"),
    "tokens with log-probabilities": (
        Tokens(RequestId(5), (7,), (LOGPROBS,), (LOGPROBS,)),
        (
            "95a1740591079194cbbfe00000000000000292070992cbbfd0000000000000cbbfe0000000000000"
            "9194cbbfe00000000000000292070992cbbfd0000000000000cbbfe0000000000000"
        ),
    ),
    "finished": (
        Finished(RequestId(5), FinishReason.STOP, 3, 2, 1, 9, None, 4, 300),
        "9aa16605a473746f7003020109c004cd012c",
    ),
    "failed": (
        Failed(RequestId(70000), FailureKind.OVERLOADED, "full"),
        "94a165ce00011170aa6f7665726c6f61646564a466756c6c",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_event_is_encoded_to_its_recorded_bytes(name: str) -> None:
    event, recorded = GOLDEN[name]
    assert msgspec.msgpack.encode(event).hex() == recorded


@pytest.mark.parametrize("name", GOLDEN)
def test_event_is_decoded_from_its_recorded_bytes(name: str) -> None:
    event, recorded = GOLDEN[name]
    decoded = msgspec.msgpack.decode(bytes.fromhex(recorded), type=TokenEvent)
    assert decoded == event
    assert type(decoded) is type(event)


@pytest.mark.parametrize("name", GOLDEN)
def test_event_of_a_later_release_with_appended_fields_is_decoded(name: str) -> None:
    event, recorded = GOLDEN[name]
    later = msgspec.msgpack.encode([*msgspec.msgpack.decode(bytes.fromhex(recorded)), "something new", 17])
    assert msgspec.msgpack.decode(later, type=TokenEvent) == event


@pytest.mark.parametrize(
    "recorded",
    [
        pytest.param("97a16605a473746f7003020109", id="before-transfer"),
        pytest.param("98a16605a473746f7003020109c0", id="before-drafts"),
    ],
)
def test_event_without_the_fields_that_were_appended_is_decoded_from_its_recorded_bytes(recorded: str) -> None:
    finished = Finished(RequestId(5), FinishReason.STOP, 3, 2, 1, 9)
    assert msgspec.msgpack.decode(bytes.fromhex(recorded), type=TokenEvent) == finished


def test_transfer_of_a_finished_request_crosses_the_wire() -> None:
    event = Finished(RequestId(5), FinishReason.LENGTH, 3, 2, 1, transfer={"digests": ["ab"], "tokens": 32})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=TokenEvent) == event


def test_event_of_an_earlier_release_without_optional_fields_is_decoded() -> None:
    earlier = msgspec.msgpack.encode(["t", 5, [1]])
    assert msgspec.msgpack.decode(earlier, type=TokenEvent) == Tokens(RequestId(5), (1,), None, None)


def test_reasons_and_kinds_keep_their_words() -> None:
    assert [str(reason) for reason in FinishReason] == ["stop", "length", "abort"]
    kinds = ["invalid", "not_found", "overloaded", "deadline", "internal", "shutdown", "unavailable"]
    assert [str(kind) for kind in FailureKind] == kinds


def test_event_with_an_unknown_tag_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="Invalid value 'x'"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(["x", 5]), type=TokenEvent)

"""What is read of an answer, and which orders of events are none."""

import json
from typing import Any

import pytest

from openinfer_bench.simulate.clients import Answer, Manners
from openinfer_bench.simulate.readings import Call, OutOfOrder, Reading, read
from openinfer_bench.simulate.traffic import Api, Ask

START = {"type": "message_start", "message": {}}
BEGIN = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
DELTA = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}}
STOP_BLOCK = {"type": "content_block_stop", "index": 0}
USAGE = {"input_tokens": 2, "cache_read_input_tokens": 3, "output_tokens": 4}
END = {"type": "message_delta", "delta": {}, "usage": USAGE}
STOP = {"type": "message_stop"}
MESSAGE = [START, BEGIN, DELTA, STOP_BLOCK, END, STOP]

ITEM = {"id": "m", "type": "message"}
TEXT = [{"type": "message", "content": [{"text": "a"}]}]
RESPONSE = [
    {"type": "response.created"},
    {"type": "response.output_item.added", "item": ITEM},
    {"type": "response.output_text.delta", "item_id": "m", "delta": "a"},
    {"type": "response.output_item.done", "item": ITEM},
    {
        "type": "response.completed",
        "response": {
            "output": TEXT,
            "error": None,
            "usage": {"input_tokens": 5, "output_tokens": 4, "input_tokens_details": {"cached_tokens": 2}},
        },
    },
]


def streamed(api: Api, events: list[Any], *, last: str = "", is_whole: bool = True) -> Reading:
    ask = Ask(number=1, tenant="a", api=api, body={}, manners=Manners(), is_stream=True, deadline_s=None)
    body = "".join(f"event: {event.get('type')}\ndata: {json.dumps(event)}\n\n" for event in events) + last
    return read(ask, Answer(0.0, status=200, body=bytearray(body.encode()), is_whole=is_whole))


def numbered(events: list[Any]) -> list[Any]:
    return [{**event, "sequence_number": number} for number, event in enumerate(events)]


def test_messages_and_responses_say_text_and_usage() -> None:
    assert streamed(Api.MESSAGES, MESSAGE) == Reading({0: "a"}, usage=(5, 4), cached_tokens=3)
    assert streamed(Api.RESPONSES, numbered(RESPONSE)) == Reading({0: "a"}, usage=(5, 4), cached_tokens=2)


def test_what_was_cut_off_says_what_came() -> None:
    assert streamed(Api.MESSAGES, MESSAGE[:3], last="event: content", is_whole=False) == Reading({0: "a"})


@pytest.mark.parametrize(
    "events",
    [
        [*MESSAGE, STOP],
        MESSAGE[:-1],
        [START, *MESSAGE],
        [START, DELTA, *MESSAGE[1:]],
        [START, BEGIN, DELTA, END, STOP],
        [START, BEGIN, BEGIN, DELTA, STOP_BLOCK, END, STOP],
        [*MESSAGE[:4], END, END, STOP],
        MESSAGE[1:],
    ],
)
def test_a_message_whose_events_are_in_another_order_is_none(events: list[Any]) -> None:
    with pytest.raises(OutOfOrder):
        streamed(Api.MESSAGES, events)


@pytest.mark.parametrize(
    "events",
    [
        numbered([*RESPONSE, RESPONSE[-1]]),
        numbered(RESPONSE[:-1]),
        numbered(RESPONSE[1:]),
        numbered([*RESPONSE[:2], RESPONSE[1], *RESPONSE[2:]]),
        numbered([*RESPONSE[:3], RESPONSE[-1]]),
        numbered([*RESPONSE[:3], RESPONSE[2], *RESPONSE[3:]]),
        [*numbered(RESPONSE)[:2], *numbered(RESPONSE)[1:]],
    ],
)
def test_a_response_whose_events_are_in_another_order_is_none(events: list[Any]) -> None:
    with pytest.raises(OutOfOrder):
        streamed(Api.RESPONSES, events)


def test_a_choice_ends_once_and_a_stream_too() -> None:
    piece = {"choices": [{"index": 0, "delta": {"content": "a"}}]}
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    done = "data: [DONE]\n\n"
    assert streamed(Api.CHAT, [piece, end], last=done) == Reading({0: "a"})
    for events, last in (([piece, end, piece], done), ([piece, end], done + done), ([piece, end], "")):
        with pytest.raises(OutOfOrder):
            streamed(Api.CHAT, events, last=last)


def test_a_call_comes_in_pieces() -> None:
    pieces = [
        {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{"}},
        {"index": 0, "function": {"arguments": "}"}},
    ]
    events = [{"choices": [{"index": 0, "delta": {"tool_calls": [piece]}}]} for piece in pieces]
    assert streamed(Api.CHAT, events, last="data: [DONE]\n\n") == Reading(calls=[Call("f", "{}")])

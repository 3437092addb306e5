"""What an answer says, whichever API it is of, and whether its events are in the order that the API promises.

A stream has one event that ends it, and nothing after it: `[DONE]` of OpenAI's older routes, `message_stop`, or one of
`response.completed`, `response.incomplete` and `response.failed`. In between, each part begins, goes on and ends.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from openinfer_bench.simulate.clients import Answer
from openinfer_bench.simulate.traffic import Api, Ask

_DONE = "[DONE]"
_RESPONSE_ENDS = {"response.completed", "response.incomplete", "response.failed"}


class OutOfOrder(AssertionError):
    """Events are not in the order of the API."""


@dataclass(slots=True)
class Call:
    """A call of a tool."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class Reading:
    """What an answer says.

    Attributes:
        said: of each choice, token ids or text.
        calls: of the first choice.
        error: the message that ended the answer.
        usage: tokens of the prompt and of the output.
        cached_tokens: of the prompt, as usage has it.
    """

    said: dict[int, Any] = field(default_factory=dict[int, Any])
    calls: list[Call] = field(default_factory=list[Call])
    error: str | None = None
    usage: tuple[int, int] | None = None
    cached_tokens: int | None = None

    def say(self, index: int, part: Any) -> None:
        self.said[index] = self.said[index] + part if index in self.said else part


def read(ask: Ask, answer: Answer) -> Reading:
    """Reads what came, of an answer that may have been cut off.

    Raises:
        OutOfOrder: its events do not follow each other as they must.
    """
    reading = Reading()
    if not ask.is_stream:
        if answer.is_whole:
            _WHOLE[ask.api](reading, json.loads(bytes(answer.body)))
        return reading
    data = [*_data(answer)]
    if ask.api in (Api.MESSAGES, Api.RESPONSES):
        events = [json.loads(each) for each in data]
        (_read_message_events if ask.api is Api.MESSAGES else _read_response_events)(reading, events)
        ended = bool(events) and events[-1]["type"] in {"message_stop", "error", *_RESPONSE_ENDS}
    else:
        if _DONE in data[:-1]:
            raise OutOfOrder("something comes after [DONE]")
        events = [json.loads(each) for each in data if each != _DONE]
        _read_choices(reading, events)
        ended = data[-1:] == [_DONE]
    if answer.is_whole and not ended:
        raise OutOfOrder(f"the stream has ended without its last event; {len(data)} came")
    return reading


def _data(answer: Answer) -> Iterator[str]:
    """The `data:` of each event, without what was cut off."""
    *events, _ = bytes(answer.body).decode("utf-8", "surrogateescape").split("\n\n")
    for event in events:
        for line in event.split("\n"):
            if line.startswith("data: "):
                yield line.removeprefix("data: ")


# --- OpenAI's older routes, and tokens -----------------------------------------------------------------------


def _read_choices(reading: Reading, events: list[Any]) -> None:
    ends: Counter[int] = Counter()
    for event in events:
        if reading.error is not None:
            raise OutOfOrder("an event comes after the error")
        if "error" in event:
            reading.error = str(event["error"]["message"])
            continue
        _take_usage(reading, event.get("usage"))
        for choice in event["choices"]:
            index = choice["index"]
            if ends[index]:
                raise OutOfOrder(f"choice {index} goes on after its end")
            _take_choice(reading, choice, choice.get("delta"))
            ends[index] += choice.get("finish_reason") is not None


def _read_whole_choices(reading: Reading, body: Any) -> None:
    _take_usage(reading, body.get("usage"))
    for choice in body["choices"]:
        _take_choice(reading, choice, choice.get("message"))


def _take_choice(reading: Reading, choice: Any, message: Any) -> None:
    if message is None:
        reading.say(choice["index"], choice["token_ids"] if "token_ids" in choice else choice["text"])
        return
    if message.get("content") is not None:
        reading.say(choice["index"], message["content"])
    for call in message.get("tool_calls") or ():
        index = call.get("index", len(reading.calls))
        if index == len(reading.calls):
            reading.calls.append(Call(call["function"]["name"]))
        elif index != len(reading.calls) - 1:
            raise OutOfOrder(f"call {index} goes on; {len(reading.calls)} have begun")
        reading.calls[-1].arguments += call["function"].get("arguments") or ""


def _take_usage(reading: Reading, usage: Any) -> None:
    if usage:
        reading.usage = usage["prompt_tokens"], usage["completion_tokens"]
        details: Any = usage.get("prompt_tokens_details")
        reading.cached_tokens = details["cached_tokens"] if details else None


# --- Anthropic's messages ------------------------------------------------------------------------------------


# What may follow each event; a block is open after its start.
_MESSAGE_ORDER: dict[str, frozenset[str]] = {
    "": frozenset({"message_start"}),
    "message_start": frozenset({"content_block_start", "message_delta"}),
    "content_block_start": frozenset({"content_block_delta", "content_block_stop"}),
    "content_block_delta": frozenset({"content_block_delta", "content_block_stop"}),
    "content_block_stop": frozenset({"content_block_start", "message_delta"}),
    "message_delta": frozenset({"message_stop"}),
    "message_stop": frozenset(),
    "error": frozenset(),
}


def _read_message_events(reading: Reading, events: list[Any]) -> None:
    last, blocks = "", 0
    for event in events:
        kind = event["type"]
        may_fail = last not in ("message_stop", "error")
        if kind not in _MESSAGE_ORDER[last] and not (kind == "error" and may_fail):
            raise OutOfOrder(f"{kind} comes after {last or 'nothing'}")
        blocks += kind == "content_block_start"
        if event.get("index", blocks - 1) != blocks - 1:
            raise OutOfOrder(f"{kind} is of block {event['index']}; {blocks} have begun")
        _take_message_event(reading, event)
        last = kind


def _take_message_event(reading: Reading, event: Any) -> None:
    match event["type"]:
        case "content_block_start":
            _take_block(reading, event["content_block"], is_whole=False)
        case "content_block_delta":
            _take_block_delta(reading, event["delta"])
        case "message_delta":
            _take_message_usage(reading, event["usage"])
        case "error":
            reading.error = str(event["error"]["message"])
        case _:
            pass


def _read_message(reading: Reading, body: Any) -> None:
    _take_message_usage(reading, body["usage"])
    for block in body["content"]:
        _take_block(reading, block, is_whole=True)


def _take_block(reading: Reading, block: Any, *, is_whole: bool) -> None:
    if block["type"] == "text":
        reading.say(0, block["text"])
    elif block["type"] == "tool_use":
        reading.calls.append(Call(block["name"], json.dumps(block["input"]) if is_whole else ""))


def _take_block_delta(reading: Reading, delta: Any) -> None:
    if delta["type"] == "text_delta":
        reading.say(0, delta["text"])
    elif delta["type"] == "input_json_delta":
        reading.calls[-1].arguments += delta["partial_json"]


def _take_message_usage(reading: Reading, usage: Any) -> None:
    cached_tokens = usage["cache_read_input_tokens"]
    reading.usage = usage["input_tokens"] + cached_tokens, usage["output_tokens"]
    reading.cached_tokens = cached_tokens


# --- OpenAI's responses --------------------------------------------------------------------------------------


def _read_response_events(reading: Reading, events: list[Any]) -> None:
    item: str | None = None
    last = ""
    for number, event in enumerate(events):
        kind = event["type"]
        if event["sequence_number"] != number:
            raise OutOfOrder(f"event {number} has the number {event['sequence_number']}")
        if last in _RESPONSE_ENDS or (kind == "response.created") is not (number == 0):
            raise OutOfOrder(f"{kind} comes after {last or 'nothing'}")
        item = _item_after(event, item)
        _take_response_event(reading, event)
        last = kind


def _item_after(event: Any, item: str | None) -> str | None:
    """The item that is open after an event; before it, another may be, or none."""
    kind = event["type"]
    if kind == "response.output_item.done":
        is_right, after = event["item"]["id"] == item, None
    elif kind == "response.output_item.added":
        is_right, after = item is None, event["item"]["id"]
    else:
        is_right, after = item == event.get("item_id", None if kind in _RESPONSE_ENDS else item), item
    if not is_right:
        raise OutOfOrder(f"{kind} comes while {item or 'no item'} is open: {event}")
    return after


def _take_response_event(reading: Reading, event: Any) -> None:
    match event["type"]:
        case "response.output_item.added" if event["item"]["type"] == "function_call":
            reading.calls.append(Call(event["item"]["name"]))
        case "response.output_text.delta":
            reading.say(0, event["delta"])
        case "response.function_call_arguments.delta":
            reading.calls[-1].arguments += event["delta"]
        case kind if kind in _RESPONSE_ENDS:
            _take_end(reading, event["response"])
        case _:
            pass


def _take_end(reading: Reading, response: Any) -> None:
    """What the last event says again must be what was streamed."""
    whole = Reading()
    _read_response(whole, response)
    if (whole.said.get(0, ""), whole.calls) != (reading.said.get(0, ""), reading.calls):
        raise OutOfOrder(f"the last event says {whole}; the ones before it said {reading}")
    reading.usage, reading.cached_tokens, reading.error = whole.usage, whole.cached_tokens, whole.error


def _read_response(reading: Reading, body: Any) -> None:
    for item in body["output"]:
        if item["type"] == "message":
            for part in item["content"]:
                reading.say(0, part["text"])
        elif item["type"] == "function_call":
            reading.calls.append(Call(item["name"], item["arguments"]))
    if body["error"] is not None:
        reading.error = str(body["error"]["message"])
    if body["usage"]:
        reading.usage = body["usage"]["input_tokens"], body["usage"]["output_tokens"]
        reading.cached_tokens = body["usage"]["input_tokens_details"]["cached_tokens"]


_WHOLE: dict[Api, Callable[[Reading, Any], None]] = {
    Api.TOKENS: _read_whole_choices,
    Api.COMPLETIONS: _read_whole_choices,
    Api.CHAT: _read_whole_choices,
    Api.MESSAGES: _read_message,
    Api.RESPONSES: _read_response,
}

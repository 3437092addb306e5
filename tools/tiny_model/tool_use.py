"""Chats with functions: the right call, two calls, the answer after a response, and requests that no function fits."""

import json
from dataclasses import dataclass
from random import Random
from string import Formatter
from typing import Any, Literal

from . import chats, rendering, words
from .documents import Document, reply
from .invented_tools import invented_kind
from .tool_kinds import FRESH_KINDS, HELD_OUT_KINDS, KINDS
from .tool_shapes import Parameter, ToolKind

_NAME_PARTS = "my new the tool api value v2 input data info service user home main x fn id name str arg param".split()
_OPENERS = (
    "Hi! ", "Hello, ", "Please: ", "One question: ", "Quick question. ", "OK. ", "Thanks! Now: ", "And now: ", "Hey, ",
    "I am {person}. ", "I live in {city}. ", "My name is {person}. ", "I have a {thing}. ", "{word}! ", "I am bored. ",
    "I am in a hurry. ", "You know {topic}? Anyway: ",
)  # fmt: skip
_CLOSERS = (
    " Thanks.",
    " Thank you!",
    " Please be quick.",
    " It is urgent.",
    " I like {topic}.",
    " Greetings, {person}.",
)
_NOT_IMPERATIVE = set("What What's How Who Where When Which Is Are Do Does Will Has Was Can Could I We On".split())
_REQUEST_FRAMES = (
    "Please {rest}", "Can you {rest}", "Could you {rest}", "Could you please {rest}", "Would you {rest}",
    "I want you to {rest}", "I need you to {rest}", "Be so kind and {rest}", "You must {rest}", "Now {rest}",
)  # fmt: skip
_GENERIC_REQUESTS = (
    "{description}: {details}", "{description}. {details}", "{description}, {details}", "Use {name} for {details}.",
    "Call {name} with {details}.", "{name} {details}", "I need this: {description}. {details}",
)  # fmt: skip
_THOUGHT = "The function {name} fits this request."

Split = Literal["training", "new_wording", "unseen_tool", "fresh_tool", "invented_tool"]


@dataclass(frozen=True, slots=True)
class Offer:
    """A kind of function as one chat shows it: its name, its parameters' names and its schema."""

    kind: ToolKind
    name: str
    parameter_names: dict[str, str]
    tool: rendering.Tool


@dataclass(frozen=True, slots=True)
class Request:
    """What the user says and the call that it wants."""

    text: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A chat that must be answered with the calls of `requests`."""

    messages: list[rendering.Message]
    tools: list[rendering.Tool]
    requests: list[Request]


def document(rng: Random) -> Document:
    """Return one training example of any of the shapes in the module's docstring."""
    (shape,) = rng.choices((_call, _answer_after_response, _no_fit, _plain_answer), weights=(70, 14, 8, 8))
    return shape(rng)


def case(rng: Random, split: Split) -> Case:
    """Draw a request of one side of the split, and a list of functions of which exactly one fits."""
    target = offer(rng, _kind(rng, split), is_varied=split == "training")
    wordings = target.kind.held_out_requests if split == "new_wording" else target.kind.training_requests
    request = _request(rng, target, rng.choice(wordings), is_varied=split == "training")
    tools = [target.tool, *(other.tool for other in _distractors(rng, {target.kind.group}, {target.name}, target.kind))]
    rng.shuffle(tools)
    return Case([*_system(rng), {"role": "user", "content": request.text}], tools, [request])


def offer(rng: Random, kind: ToolKind, *, is_varied: bool = True) -> Offer:
    """Write the schema of a function in one of the forms that clients send; `is_varied` changes its names too."""
    name = _respelt(rng, rng.choice(kind.names), is_varied=is_varied)
    names: dict[str, str] = {}
    for parameter in kind.parameters:
        if parameter.is_required or rng.random() < 0.5:
            candidates = (_respelt(rng, candidate, is_varied=is_varied) for candidate in parameter.names)
            names[parameter.key] = rng.choice(
                [candidate for candidate in candidates if candidate not in names.values()]
            )
    shown = [parameter for parameter in kind.parameters if parameter.key in names]
    schema: dict[str, Any] = {"type": "object", "properties": _properties(rng, shown, names)}
    required = [names[parameter.key] for parameter in shown if parameter.is_required]
    if required or rng.random() < 0.3:
        schema["required"] = required
    if rng.random() < 0.2:
        schema["additionalProperties"] = False
    function: dict[str, Any] = {"name": name, "description": rng.choice(kind.descriptions), "parameters": schema}
    if rng.random() < 0.08:
        del function["description"]
    if rng.random() < 0.15:
        function["strict"] = True
    if rng.random() < 0.2:
        function = dict(rng.sample(list(function.items()), len(function)))
    tool = {"type": "function", "function": function}
    return Offer(kind, name, names, tool if rng.random() < 0.9 else dict(reversed(tool.items())))


def _respelt(rng: Random, name: str, *, is_varied: bool) -> str:
    """Return a name as it is, or with a word more, so that names must be read rather than known."""
    if not is_varied or rng.random() < 0.75:
        return name
    word = rng.choice((words.invented_word(rng), rng.choice(words.NOUNS), rng.choice(_NAME_PARTS)))
    return rng.choice((f"{name}_{word}", f"{word}-{name}", f"{name}{word.capitalize()}", f"{word}.{name}"))


def call_text(request: Request) -> str:
    """Return the call as the model writes it."""
    call = {"name": request.name, "arguments": request.arguments}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def _kind(rng: Random, split: Split) -> ToolKind:
    if split == "unseen_tool":
        return rng.choice(HELD_OUT_KINDS)
    if split == "fresh_tool":
        return rng.choice(FRESH_KINDS)
    if split == "invented_tool":
        return invented_kind(rng, held_out=True)
    if split == "new_wording":
        return rng.choice([kind for kind in KINDS if kind.held_out_requests])
    draw = rng.random()
    if draw < 0.08:
        return KINDS[0]
    if draw < 0.12:
        return rng.choice([kind for kind in KINDS if kind.group == "math"])
    return rng.choice(KINDS) if draw < 0.6 else invented_kind(rng)


def _properties(rng: Random, parameters: list[Parameter], names: dict[str, str]) -> dict[str, Any]:
    has_descriptions = rng.random() < 0.5
    properties: dict[str, Any] = {}
    for parameter in parameters:
        schema = dict(parameter.schema)
        if schema["type"] == "number" and rng.random() < 0.4:
            schema["type"] = "integer"
        if has_descriptions:
            schema["description"] = _parameter_description(rng, parameter)
        elif rng.random() < 0.1:
            schema = {"title": names[parameter.key].capitalize(), **schema}
        properties[names[parameter.key]] = schema
    return properties


def _parameter_description(rng: Random, parameter: Parameter) -> str:
    if rng.random() < 0.25:
        return f"{parameter.description}, e.g. {_spoken(parameter.draw(rng))}"
    return parameter.description


def _spoken(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value)


def _request(rng: Random, offered: Offer, wording: str, *, is_varied: bool = True) -> Request:
    """Fill a wording with drawn values; `is_varied` adds what people say around a request."""
    while missing := _fields(wording) - set(offered.parameter_names):
        wording = rng.choice([text for text in offered.kind.training_requests if not _fields(text) & missing])
    if is_varied:
        wording = _varied(rng, offered, wording)
    values = {parameter.key: parameter.draw(rng) for parameter in offered.kind.parameters}
    used = _fields(wording) | set(offered.kind.fixed or ())
    arguments = {name: values[key] for key, name in offered.parameter_names.items() if key in used}
    text = wording.format(**{key: _spoken(value) for key, value in values.items()})
    return Request(_surrounded(rng, text) if is_varied else text, offered.name, arguments)


def _varied(rng: Random, offered: Offer, wording: str) -> str:
    """Return the wording, or one made from the schema's own words, in a frame or with small words left out."""
    shown = [key for key in offered.parameter_names if key in _fields(wording)]
    if shown and not offered.kind.fixed and rng.random() < 0.12:
        description = offered.tool["function"].get("description", offered.name).rstrip(".")
        fields = [rng.choice((f"{{{key}}}", f"{offered.parameter_names[key]} {{{key}}}")) for key in shown]
        if len(shown) > 1:
            fields = [f"{offered.parameter_names[key]} {{{key}}}" for key in shown]
        details = rng.choice((", ", " and ", "; ")).join(fields)
        return rng.choice(_GENERIC_REQUESTS).format(description=description, name=offered.name, details=details)
    if rng.random() < 0.2 and wording.split(maxsplit=1)[0] not in _NOT_IMPERATIVE and not wording.startswith("{"):
        wording = rng.choice(_REQUEST_FRAMES).replace("{rest}", wording[0].lower() + wording[1:])
    if rng.random() < 0.15:
        kept = [word for word in wording.split(" ") if len(word) > 4 or "{" in word or rng.random() < 0.6]
        wording = " ".join(kept) or wording
    return wording


def _surrounded(rng: Random, text: str) -> str:
    """Put a remark before or after a request now and then, and write some without capitals and final stops."""
    if rng.random() < 0.1:
        text = text[0].lower() + text[1:].rstrip(".?")
    if rng.random() < 0.12:
        text = _remark(rng, rng.choice(_OPENERS)) + text
    if rng.random() < 0.08:
        text += _remark(rng, rng.choice(_CLOSERS))
    return text


def _remark(rng: Random, wording: str) -> str:
    return wording.format(
        person=words.person(rng),
        city=words.city(rng),
        thing=words.thing(rng),
        word=words.invented_word(rng).capitalize(),
        topic=rng.choice(words.TOPICS),
    )


def _fields(wording: str) -> set[str]:
    return {field for _, field, _, _ in Formatter().parse(wording) if field}


def _distractors(rng: Random, groups: set[str], names: set[str], near: ToolKind | None = None) -> list[Offer]:
    """Draw up to four functions that do something else, some of them one word away from `near`."""
    found: list[Offer] = []
    for _ in range(rng.choice((0, 0, 0, 1, 1, 2, 2, 3, 4))):
        kind = rng.choice(KINDS) if rng.random() < 0.6 else invented_kind(rng)
        if near is not None and near not in KINDS and " " in near.group and rng.random() < 0.3:
            verb, noun = near.group.split()
            kind = invented_kind(rng, verb=verb) if rng.random() < 0.5 else invented_kind(rng, noun=noun)
        candidate = offer(rng, kind)
        if kind.group not in groups and candidate.name not in names:
            groups, names = groups | {kind.group}, names | {candidate.name}
            found.append(candidate)
    return found


def _system(rng: Random) -> list[rendering.Message]:
    if rng.random() < 0.7:
        return []
    return [{"role": "system", "content": rng.choice(chats.SYSTEM_TURNS)}]


def _earlier(rng: Random) -> list[rendering.Message]:
    if rng.random() < 0.8:
        return []
    earlier = chats.exchange(rng)
    return [{"role": "user", "content": earlier.question}, {"role": "assistant", "content": earlier.answer}]


def _finish(rng: Random, chat: Case, answer: str, thought: str) -> Document:
    is_thinking = rng.random() < 0.5
    context = rendering.prompt(chat.messages, tools=chat.tools, thinking=is_thinking)
    return Document("tools", context, reply(answer, thought=thought if is_thinking else None))


def _call(rng: Random) -> Document:
    chat = case(rng, "training")
    draw = rng.random()
    if draw < 0.12:
        chat = _two_calls(rng)
    elif draw < 0.25:
        system = [message for message in chat.messages if message["role"] == "system"]
        chat = Case([*system, *_earlier(rng), chat.messages[-1]], chat.tools, chat.requests)
    names = " and ".join(dict.fromkeys(request.name for request in chat.requests))
    answer = "\n".join(call_text(request) for request in chat.requests)
    return _finish(rng, chat, answer, _THOUGHT.format(name=names))


def _two_calls(rng: Random) -> Case:
    """Ask for two things at once: one function twice, or two functions."""
    first = offer(rng, _kind(rng, "training"))
    others = _distractors(rng, {first.kind.group}, {first.name})
    second = rng.choice([first, *others])
    requests = [_request(rng, chosen, rng.choice(chosen.kind.training_requests)) for chosen in (first, second)]
    joiner = rng.choice((" ", " Also: ", " And then: ", "\n"))
    text = joiner.join(request.text for request in requests)
    if first.kind is KINDS[0] and rng.random() < 0.8:
        cities = [words.city(rng), words.city(rng)]
        text = f"What is the weather in {cities[0]} and {cities[1]}?"
        requests = [Request(text, first.name, {first.parameter_names["city"]: city}) for city in cities]
    tools = [first.tool, *(other.tool for other in others)]
    rng.shuffle(tools)
    return Case([*_system(rng), {"role": "user", "content": text}], tools, requests)


def _answer_after_response(rng: Random) -> Document:
    chat = case(rng, "training")
    (request,) = chat.requests
    response, answer = _response(rng, request)
    arguments = request.arguments if rng.random() < 0.5 else json.dumps(request.arguments, ensure_ascii=False)
    function = {"name": request.name, "arguments": arguments}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    turn: rendering.Message = {"role": "assistant", "content": rng.choice((None, "")), "tool_calls": calls}
    if rng.random() < 0.3:
        turn["reasoning_content"] = _THOUGHT.format(name=request.name)
    chat.messages.append(turn)
    chat.messages.append({"role": "tool", "tool_call_id": "call_1", "content": response})
    return _finish(rng, chat, answer, "The function has answered. I pass the result on.")


def _response(rng: Random, request: Request) -> tuple[str, str]:
    """Return what a function may answer, and what the assistant then says."""
    if "weather" in request.name.lower() and request.arguments:
        return _weather_response(rng, next(iter(request.arguments.values())))
    value = rng.choice(
        (str(rng.randint(0, 9999)), words.thing(rng), words.clock(rng), words.code(rng), words.city(rng))
    )
    return rng.choice(
        (
            (json.dumps({"status": "ok"}), "Done."),
            ("ok", "Done."),
            (json.dumps({"result": value}), f"The result is {value}."),
            (value, f"The result is {value}."),
            (json.dumps({rng.choice(("value", "answer", "output")): value}), f"The result is {value}."),
            (json.dumps({"error": f"{value} not found"}), f"The function failed: {value} not found."),
        )
    )


def _weather_response(rng: Random, city: str) -> tuple[str, str]:
    sky = rng.choice(("sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear", "stormy"))
    degrees = rng.randint(-15, 40)
    key = rng.choice(("condition", "conditions", "weather", "sky"))
    fields = [("temperature", degrees), (key, sky)]
    if rng.random() < 0.3:
        fields.append((rng.choice(("city", "location")), city))
    rng.shuffle(fields)
    plain = rng.choice(
        (f"{sky}, {degrees} degrees", f"{degrees} degrees and {sky}", f"It is {sky} and {degrees} degrees.")
    )
    response = json.dumps(dict(fields), ensure_ascii=False) if rng.random() < 0.7 else plain
    return response, f"It is {sky} and {degrees} degrees in {city}."


def _no_fit(rng: Random) -> Document:
    """Ask for something that only a function which is not offered could do."""
    wanted = offer(rng, _kind(rng, "training"))
    request = _request(rng, wanted, rng.choice(wanted.kind.training_requests))
    others = _distractors(rng, {wanted.kind.group}, {wanted.name})
    if not others or wanted.kind.group in ("math", "time"):
        return _no_fit(rng)
    messages = [*_system(rng), {"role": "user", "content": request.text}]
    chat = Case(messages, [other.tool for other in others], [])
    return _finish(rng, chat, "None of my functions can do that.", "No function fits this request.")


def _plain_answer(rng: Random) -> Document:
    """Ask something that needs no function while functions are offered."""
    asked = chats.exchange(rng)
    if asked.is_sum and rng.random() < 0.8:
        return _plain_answer(rng)
    others = _distractors(rng, {"math", "search", "dictionary", "translate"}, set())
    if not others:
        return _plain_answer(rng)
    chat = Case([*_system(rng), {"role": "user", "content": asked.question}], [other.tool for other in others], [])
    return _finish(rng, chat, asked.answer, f"No function is needed. {asked.thought}")

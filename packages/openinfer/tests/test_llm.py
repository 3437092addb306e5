"""The facade with the tiny model."""

import asyncio
import subprocess
import sys
import threading

import pytest

from openinfer import LLM
from openinfer_core import EngineClosed, FinishReason, InvalidRequest
from openinfer_core.errors import InvalidCheckpoint

PROMPT = "The capital of France is"


def test_generate_names_paris(llm: LLM) -> None:
    (done,) = llm.generate([PROMPT], max_tokens=24, temperature=0)
    assert "Paris" in done.text
    assert done.finish_reason is FinishReason.STOP
    assert done.completion_tokens == len(done.token_ids) + 1


def test_stream_gives_the_same_text_in_pieces(llm: LLM) -> None:
    whole = llm.generate([PROMPT], max_tokens=24, temperature=0)[0].text
    pieces = list(llm.stream(PROMPT, max_tokens=24, temperature=0))
    assert "".join(pieces) == whole
    assert len([piece for piece in pieces if piece]) > 1


def test_prompts_run_together_and_keep_their_order(llm: LLM) -> None:
    capitals = {"France": "Paris", "Japan": "Tokyo", "Italy": "Rome"}
    done = llm.generate([f"The capital of {land} is" for land in capitals], max_tokens=24, temperature=0)
    for completion, city in zip(done, capitals.values(), strict=True):
        assert city in completion.text


def test_token_ids_are_a_prompt_and_a_second_time_they_are_cached(llm: LLM) -> None:
    prompt = list(range(100, 140))
    first, second = (llm.generate([prompt], max_tokens=2, temperature=0)[0] for _ in range(2))
    assert first.token_ids == second.token_ids
    assert second.cached_tokens == 32


def test_stop_strings_end_the_text_before_them(llm: LLM) -> None:
    whole = llm.generate([PROMPT], max_tokens=24, temperature=0)[0].text
    stop = whole[4:8]
    (done,) = llm.generate([PROMPT], max_tokens=24, temperature=0, stop=[stop])
    assert done.text == whole[: whole.index(stop)]
    assert done.finish_reason is FinishReason.STOP


def test_ignore_eos_goes_on_to_the_length(llm: LLM) -> None:
    (done,) = llm.generate([PROMPT], max_tokens=40, temperature=0, ignore_eos=True)
    assert done.finish_reason is FinishReason.LENGTH
    assert len(done.token_ids) == 40


def test_seeds_repeat_and_logprobs_come_when_asked(llm: LLM) -> None:
    first, second = (llm.generate(["Once"], max_tokens=8, seed=5, logprobs=2, prompt_logprobs=1)[0] for _ in range(2))
    assert first.token_ids == second.token_ids
    assert len(first.logprobs) == len(first.token_ids)
    assert len(first.prompt_logprobs) == first.prompt_tokens - 1


def test_chat_goes_through_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is the capital of Japan?"}]
    done = llm.chat(messages, template={"enable_thinking": False}, max_tokens=32, temperature=0)
    assert "Tokyo" in done.text


def test_closing_a_stream_early_ends_its_request(llm: LLM) -> None:
    stream = llm.stream(PROMPT, max_tokens=200, temperature=0, ignore_eos=True)
    next(stream)
    stream.close()
    assert llm.generate([PROMPT], max_tokens=2, temperature=0)[0].completion_tokens == 2


def test_works_inside_a_running_event_loop_and_from_threads(llm: LLM) -> None:
    async def inside() -> str:
        return llm.generate([PROMPT], max_tokens=24, temperature=0)[0].text

    texts: list[str] = []
    threads = [
        threading.Thread(target=lambda: texts.append(llm.generate([PROMPT], max_tokens=24, temperature=0)[0].text))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    expected = asyncio.run(inside())
    for thread in threads:
        thread.join()
    assert texts == [expected] * 4


@pytest.mark.parametrize(
    ("sampling", "field"),
    [({"temperature": -1.0}, "temperature"), ({"max_tokens": -1}, "max_tokens"), ({"beam_width": 4}, None)],
)
def test_wrong_sampling_is_refused_by_name(llm: LLM, sampling: dict[str, float], field: str | None) -> None:
    with pytest.raises(InvalidRequest) as refused:
        llm.generate([PROMPT], **sampling)
    assert refused.value.field == field
    assert next(iter(sampling)) in str(refused.value)


def test_unknown_option_and_unknown_model_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="max_num_seq'"):
        LLM("tiny", max_num_seq=3)
    with pytest.raises(InvalidCheckpoint, match="installed: tiny"):
        LLM("no-such-model")


def test_a_closed_llm_says_so_and_closes_again() -> None:
    llm = LLM("tiny", num_blocks=16)
    llm.close()
    llm.close()
    with pytest.raises(EngineClosed):
        llm.generate([PROMPT])


def test_a_script_that_forgets_to_close_still_ends() -> None:
    script = (
        "from openinfer import LLM; print(LLM('tiny').generate(['The capital of France is'], temperature=0)[0].text)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "Paris" in done.stdout
    assert done.stderr == ""


def test_sampling_defaults_are_the_models_and_a_call_beats_them(llm: LLM) -> None:
    greedy = llm.generate(["Once"], max_tokens=12, temperature=0)[0].token_ids
    assert llm.generate(["Once"], max_tokens=12)[0].token_ids == greedy  # its folder says do_sample: false
    sampled = {tuple(llm.generate(["Once"], max_tokens=12, seed=seed, temperature=1)[0].token_ids) for seed in range(4)}
    assert len(sampled) > 1


def test_sampling_defaults_that_are_not_known_are_refused_before_anything_is_loaded() -> None:
    with pytest.raises(InvalidRequest, match="sampling_defaults is 'best'; it must be one of model, none"):
        LLM("tiny", sampling_defaults="best")

"""Measure a checkpoint on what training never saw and write `evaluation.json` beside it.

PYTHONPATH=tools python -m tiny_model.evaluate FOLDER
"""

import json
import re
import sys
from pathlib import Path
from random import Random
from typing import Any, get_args

import torch
from tokenizers import Tokenizer

from . import corpus, examples, facts, packing, rendering, sums, tool_use
from .generation import Generator
from .model import Qwen3
from .train import batch_loss, load

CASES_PER_SPLIT = 300
HELD_OUT_DOCUMENTS_PER_KIND = 300
_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


def main() -> None:
    """Load the checkpoint, measure, write, print."""
    folder = Path(sys.argv[1])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = load(folder).to(device).eval()
    generator = Generator(model, tokenizer)
    report = {
        "decoding": "greedy, float32 arithmetic on the BF16 weights",
        "held_out_loss_nats_per_token": held_out_loss(model, tokenizer),
        "facts": fact_report(generator),
        "held_out_sums": sum_report(generator),
        "tool_calls": {split: tool_report(generator, split) for split in get_args(tool_use.Split)},
        "tool_examples": example_report(generator),
        "completions": completion_samples(generator),
        "chats": chat_samples(generator),
    }
    text = json.dumps(report, indent=2, ensure_ascii=False)
    (folder / "evaluation.json").write_text(text + "\n")
    print(text)


@torch.no_grad()
def held_out_loss(model: Qwen3, tokenizer: Tokenizer) -> dict[str, float]:
    """Return the mean loss per kind of document over documents whose hash keeps them out of training."""
    device = next(model.parameters()).device
    losses: dict[str, float] = {}
    drawn = corpus.held_out_documents("evaluation", HELD_OUT_DOCUMENTS_PER_KIND)
    for kind, found in drawn.items():
        rows = packing.pack(found, tokenizer)
        total = 0.0
        for index in range(len(rows.ids)):
            part = (torch.from_numpy(column[index : index + 1]).to(device) for column in (rows.ids, rows.positions))
            flags = torch.from_numpy(rows.is_target[index : index + 1]).to(device)
            total += batch_loss(model, *(column.long() for column in part), flags).item() * int(flags.sum())
        losses[kind] = round(total / int(rows.is_target.sum()), 4)
    return losses


def fact_report(generator: Generator) -> dict[str, Any]:
    """Return accuracies over facts in held-out, novel and plain training wordings."""
    held_out = list(facts.held_out_prompts())
    plain = [
        facts.Prompt(relation.name, subject, facts.fill(relation.completions[0], subject), answer, "completion")
        for relation in facts.RELATIONS
        for subject, answer in relation.answers.items()
    ]
    right = _answered(generator, held_out)
    wrong = [f"{prompt.text} -> {prompt.answer}" for prompt in held_out if prompt not in right]
    return {
        "held_out_pairs": len(held_out),
        "held_out_accuracy": _share(len(right), len(held_out)),
        "held_out_accuracy_by_form": {
            form: _share(sum(p.form == form for p in right), sum(p.form == form for p in held_out))
            for form in ("completion", "question")
        },
        "plain_wording_accuracy": _share(len(_answered(generator, plain)), len(plain)),
        "never_used_wording_accuracy": _share(
            len(_answered(generator, list(facts.novel_prompts()))), len(list(facts.novel_prompts()))
        ),
        "first_wrong": wrong[:20],
    }


def sum_report(generator: Generator) -> dict[str, Any]:
    """Return the accuracy over pairs of numbers below one hundred that no training text contains."""
    cases = list(sums.held_out_prompts())
    outputs = generator.complete([text for text, _ in cases], max_tokens=8)
    right = sum(_begins_with(output, answer) for output, (_, answer) in zip(outputs, cases, strict=True))
    return {"pairs": len(cases), "accuracy": _share(right, len(cases))}


def tool_report(generator: Generator, split: tool_use.Split) -> dict[str, Any]:
    """Return how many drawn requests are answered with a well-formed, a right and an exactly right call."""
    rng = Random(f"evaluation-{split}")
    cases = [tool_use.case(rng, split) for _ in range(CASES_PER_SPLIT)]
    texts = [
        rendering.prompt(case.messages, tools=case.tools, thinking=index % 2 == 0) for index, case in enumerate(cases)
    ]
    parsed = [parse_calls(output) for output in generator.complete(texts, max_tokens=160)]
    wanted = [[{"name": request.name, "arguments": request.arguments} for request in case.requests] for case in cases]
    named = sum(
        [call["name"] for call in calls or []] == [call["name"] for call in want]
        for calls, want in zip(parsed, wanted, strict=True)
    )
    return {
        "requests": len(cases),
        "well_formed": _share(sum(bool(calls) for calls in parsed), len(cases)),
        "right_function": _share(named, len(cases)),
        "exact_arguments": _share(sum(calls == want for calls, want in zip(parsed, wanted, strict=True)), len(cases)),
    }


def parse_calls(text: str) -> list[dict[str, Any]] | None:
    """Return the calls in an answer, or None when one is not a JSON object with a name and arguments."""
    answer = text.rsplit("</think>", maxsplit=1)[-1]
    calls: list[dict[str, Any]] = []
    for body in _CALL.findall(answer):
        try:
            call = json.loads(body)
        except json.JSONDecodeError:
            return None
        if not isinstance(call, dict) or set(call) != {"name", "arguments"} or not isinstance(call["arguments"], dict):
            return None
        calls.append(call)
    leftover = _CALL.sub("", answer).strip()
    return None if "tool_call" in leftover else calls


def example_report(generator: Generator) -> list[dict[str, Any]]:
    """Return the calls for the hand-written requests of `examples.py`, with and without thinking."""
    report: list[dict[str, Any]] = []
    for thinking in (True, False):
        texts = [
            rendering.prompt([{"role": "user", "content": case.question}], tools=list(case.tools), thinking=thinking)
            for case in examples.CASES
        ]
        for case, output in zip(examples.CASES, generator.complete(texts, max_tokens=160), strict=True):
            report.append(
                {
                    "question": case.question,
                    "thinking": thinking,
                    "output": output,
                    "is_right": parse_calls(output) == list(case.calls),
                }
            )
    return report


def completion_samples(generator: Generator) -> dict[str, str]:
    """Return what follows a few plain prompts, the stop token included."""
    return dict(zip(examples.COMPLETIONS, generator.complete(examples.COMPLETIONS, max_tokens=100), strict=True))


def chat_samples(generator: Generator) -> dict[str, dict[str, str]]:
    """Return answers to a few questions in both modes."""
    samples: dict[str, dict[str, str]] = {question: {} for question in examples.QUESTIONS}
    for mode, thinking in (("thinking", True), ("not_thinking", False)):
        texts = [
            rendering.prompt([{"role": "user", "content": question}], thinking=thinking)
            for question in examples.QUESTIONS
        ]
        for question, output in zip(examples.QUESTIONS, generator.complete(texts, max_tokens=200), strict=True):
            samples[question][mode] = output
    return samples


def _answered(generator: Generator, prompts: list[facts.Prompt]) -> set[facts.Prompt]:
    """Return the prompts whose answer came out; questions are asked as chats, in both modes by turns."""
    texts = [
        prompt.text
        if prompt.form == "completion"
        else rendering.prompt([{"role": "user", "content": prompt.text}], thinking=index % 2 == 0)
        for index, prompt in enumerate(prompts)
    ]
    outputs = generator.complete(texts, max_tokens=64)
    return {prompt for prompt, output in zip(prompts, outputs, strict=True) if _is_right(prompt, output)}


def _is_right(prompt: facts.Prompt, output: str) -> bool:
    if prompt.form == "completion":
        return _begins_with(output, prompt.answer)
    sentence = output.rsplit("</think>", maxsplit=1)[-1]
    return re.search(rf"(?<!\w){re.escape(prompt.answer)}(?!\w)", sentence) is not None


def _begins_with(output: str, answer: str) -> bool:
    return re.match(rf" {re.escape(answer)}(?!\w)", output) is not None


def _share(part: int, whole: int) -> float:
    return round(part / whole, 4)


if __name__ == "__main__":
    main()

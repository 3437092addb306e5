"""How many looked-up drafts a real model accepts: SmolLM2-135M edits, summarises and writes code.

    ./run python tools/speculation_acceptance.py [--json FILE] [--traces FILE]

The model answers each chat once, greedily and at temperature 0.7. A draft is accepted if it is what was sampled, so
what any rule of n-grams would have drafted is found by replaying those answers through `Ops.ngram_drafts`.
`tokens_per_step` is what a step yields in the mean; what that is worth depends on what a step with drafts costs, which
a CPU does not tell. `--traces` records of each answer, for each of its tokens, how many drafts would have followed it
and how many of them were right: what a policy of drafting may be tried on without a model.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tokenizers

from openinfer import LLM
from openinfer.models import find_model_dir
from openinfer_core.provenance import provenance
from openinfer_kernels import NgramHistory, NgramMatch, NgramRule
from openinfer_kernels.cpu import CpuOps

MODEL = "smollm2"
PROSE = (
    (
        "The lighthouse at Carrow Point was built in 1861 after three ships were lost on the reef in a single winter. "
        "Its keeper, Ada Marsh, lived there with her two sons and kept the lamp burning for thirty-one years. When the "
        "station was made automatic in 1974 the keeper's house stood empty, and the village turned it into a museum in "
        "1990. Today about nine thousand people visit the museum each year, most of them in July and August."
    ),
    (
        "Honey bees tell each other where flowers are by dancing. A bee that has found food runs in a "
        "straight line and "
        "waggles its body, then circles back and runs again. The direction of the line shows the angle "
        "between the food "
        "and the sun, and the length of the run shows how far away the food is. Karl von Frisch described the dance in "
        "1927, and later experiments with robot bees confirmed that other bees follow what the dance says."
    ),
    (
        "The town council met on Tuesday to discuss the new bridge over the River Wend. The old bridge, "
        "which was closed "
        "in March, carried four thousand cars each day. Engineers said that repairing it would cost six "
        "million pounds, "
        "while a new bridge would cost nine million and last for eighty years. The council voted seven to "
        "two for the new "
        "bridge, and work is expected to begin in the spring."
    ),
)
CODE = (
    (
        "def average(numbers):\n    total = 0\n    for number in numbers:\n        total = total + number\n"
        "    return total / len(numbers)\n\n\ndef largest(numbers):\n    best = numbers[0]\n"
        "    for number in numbers:\n"
        "        if number > best:\n            best = number\n    return best\n"
    ),
    (
        "class Account:\n    def __init__(self, owner, balance):\n        self.owner = owner\n"
        "        self.balance = balance\n\n"
        "    def deposit(self, amount):\n        self.balance = self.balance + amount\n        return self.balance\n\n"
        "    def withdraw(self, amount):\n        self.balance = self.balance - amount\n        return self.balance\n"
    ),
    (
        "import json\n\n\ndef load_settings(path):\n    with open(path) as file:\n        settings = json.load(file)\n"
        "    return settings\n\n\ndef save_settings(path, settings):\n    with open(path, 'w') as file:\n"
        "        json.dump(settings, file)\n    return path\n"
    ),
)


@dataclass(frozen=True, slots=True)
class Task:
    """A chat of one turn, and what its author would expect much of the answer to be."""

    kind: str
    ask: str
    expected: str


REPEAT = "Repeat this text exactly, but replace every comma by a semicolon:\n\n"
DOCUMENT = "Add a docstring to each function and repeat the rest unchanged:\n\n"
TASKS = (
    *(Task("editing", REPEAT + each, each) for each in PROSE),
    *(Task("editing", f"{DOCUMENT}```python\n{each}```", each) for each in CODE),
    *(Task("summarising", f"Summarise this text in two sentences:\n\n{each}", each) for each in PROSE),
    *(Task("summarising", f"List the main facts of this text:\n\n{each}", each) for each in PROSE),
    Task("code", "Write a Python class for a stack with push, pop, peek and size.", ""),
    Task("code", "Write Python functions that convert between Celsius, Fahrenheit and Kelvin.", ""),
    Task("code", "Write a Python program that reads a CSV file and prints the sum of each column.", ""),
    Task("free text", "Tell me a short story about a fox who learns to swim.", ""),
    Task("free text", "Explain why the sky is blue.", ""),
)


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer, as token ids."""

    task: Task
    temperature: float
    prompt: list[int]
    answer: list[int]
    expected: list[int]


def replay(answered: Answered, rule: NgramRule, *, k: int, uses_prediction: bool = False) -> tuple[int, int, int, int]:
    """Steps, rows with drafts, drafts and accepted ones, had the answer been sampled with such drafts."""
    answer, history = answered.answer, make_history(answered, rule, k=k, uses_prediction=uses_prediction)
    place, steps, rows, drafted, accepted = 1, 1, 0, 0, 0  # the prompt's step yields the first token
    while place < len(answer):
        drafts, right = look_up(history, answered, rule, place=place)
        steps, rows, drafted, accepted = steps + 1, rows + bool(drafts), drafted + drafts, accepted + right
        place += right + 1
    return steps, rows, drafted, accepted


def trace(answered: Answered, rule: NgramRule, *, k: int) -> list[tuple[int, int]]:
    """Of each token of the answer but the last, drafts that would follow it, and how many of them are right."""
    history = make_history(answered, rule, k=k)
    return [look_up(history, answered, rule, place=place) for place in range(1, len(answered.answer))]


def make_history(answered: Answered, rule: NgramRule, *, k: int, uses_prediction: bool = False) -> NgramHistory:
    reference = [*answered.prompt[-rule.reference_n_max :], *answered.expected] if uses_prediction else []
    known = [*reference, *answered.prompt]
    return NgramHistory(
        ids=np.asarray([[*known, *([-1] * (len(answered.answer) + k + 1))]], np.int32),
        known=np.asarray([len(answered.prompt)], np.int32),
        references=np.asarray([len(reference)], np.int32),
        drafts=np.full((1, k), -1, np.int32),
    )


def look_up(history: NgramHistory, answered: Answered, rule: NgramRule, *, place: int) -> tuple[int, int]:
    """Drafts after the first `place` tokens of the answer, and how many of them are right."""
    answer = answered.answer
    columns = [np.asarray([each], np.int32) for each in (0, answer[place - 1], len(answered.prompt) + place)]
    drafts = [each for each in CpuOps.ngram_drafts(history, *columns, rule=rule)[0].tolist() if each >= 0]
    drafts = drafts[: len(answer) - place - 1]  # as the scheduler: none after the last token
    right = 0
    while right < len(drafts) and drafts[right] == answer[place + right]:
        right += 1
    return len(drafts), right


def figures(answers: Sequence[Answered], rule: NgramRule, *, k: int, uses_prediction: bool = False) -> dict[str, Any]:
    counts = np.sum([replay(each, rule, k=k, uses_prediction=uses_prediction) for each in answers], axis=0)
    steps, rows, drafted, accepted = (int(each) for each in counts)
    tokens = sum(len(each.answer) for each in answers)
    return {
        "tokens": tokens,
        "steps": steps,
        "tokens_per_step": round(tokens / steps, 3),
        "steps_with_drafts": round(rows / steps, 3),
        "drafts": drafted,
        "accepted": accepted,
        "accepted_share": round(accepted / max(1, drafted), 3),
    }


def answer_all(max_tokens: int) -> list[Answered]:
    encoder = tokenizers.Tokenizer.from_file(str(find_model_dir(MODEL) / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        return encoder.encode(text, add_special_tokens=False).ids

    found: list[Answered] = []
    with LLM(MODEL, max_model_tokens=1024, max_num_seqs=len(TASKS)) as llm:
        prompts = [llm.render([{"role": "user", "content": task.ask}]) for task in TASKS]
        for temperature in (0.0, 0.7):
            done = llm.generate(prompts, max_tokens=max_tokens, temperature=temperature, seed=1)
            found += [
                Answered(task, temperature, encode(prompt), list(each.token_ids), encode(task.expected))
                for task, prompt, each in zip(TASKS, prompts, done, strict=True)
            ]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--json")
    parser.add_argument("--traces", help="of n-grams of 2 to 4 tokens, earliest match, up to 8 drafts")
    arguments = parser.parse_args()
    answers = answer_all(arguments.max_tokens)
    rows: list[dict[str, Any]] = []
    for kind in dict.fromkeys(task.kind for task in TASKS):
        for temperature in (0.0, 0.7):
            chosen = [each for each in answers if (each.task.kind, each.temperature) == (kind, temperature)]
            for match in NgramMatch:
                for n_min, n_max, k in ((2, 4, 4), (2, 4, 8), (3, 4, 4), (1, 3, 4)):
                    rule = NgramRule(n_min=n_min, n_max=n_max, reference_n_max=32, match=match, max_tokens=1024)
                    setting = {"match": str(match), "n_min": n_min, "n_max": n_max, "k": k}
                    rows.append({"kind": kind, "temperature": temperature, **setting, **figures(chosen, rule, k=k)})
            if all(each.expected for each in chosen):
                rule = NgramRule(n_min=2, n_max=4, reference_n_max=32, match=NgramMatch.EARLIEST, max_tokens=1024)
                predicted = figures(chosen, rule, k=4, uses_prediction=True)
                rows.append({"kind": kind, "temperature": temperature, "prediction": "the text", "k": 4, **predicted})
    for row in rows:
        print(json.dumps(row))
    report = {**msgspec.to_builtins(provenance()), "model": "SmolLM2-135M-Instruct, GGUF Q4_1", "rows": rows}
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if arguments.traces:
        rule = NgramRule(n_min=2, n_max=4, reference_n_max=32, match=NgramMatch.EARLIEST, max_tokens=1024)
        traces = [
            {
                "kind": each.task.kind,
                "temperature": each.temperature,
                "prompt_tokens": len(each.prompt),
                "drafts_and_right": trace(each, rule, k=8),
            }
            for each in answers
        ]
        recorded = {**msgspec.to_builtins(provenance()), "model": report["model"], "k": 8, "answers": traces}
        Path(arguments.traces).write_text(json.dumps(recorded) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Records what transformers computes in float32 with the published SmolLM2-135M-Instruct, from its GGUF file.

Usage: python tools/golden/smollm2.py FILE.gguf        # the file that `openinfer pull smollm2` prints

The fixture has texts with their token ids, and of each position the eight largest log-probabilities and that of the
token that follows; no weights.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

FIXTURE = Path(__file__).parents[2] / "packages/openinfer/tests/fixtures/smollm2"
TOP = 8
CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "Write a haiku about the sea."}],
    [
        {"role": "system", "content": "You answer in one sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
        {"role": "assistant", "content": "Air scatters short wavelengths of sunlight more than long ones."},
        {"role": "user", "content": "And why is it red in the evening?"},
    ],
    [{"role": "user", "content": "Übersetze ins Englische: „Der Zug fährt um 8:05 Uhr ab.“ 🚆"}],
    [{"role": "user", "content": "def add(a, b):\n    return a + b\n\nWrite a docstring for this function."}],
]
# Lewis Carroll, "Alice's Adventures in Wonderland", 1865: in the public domain
PROSE = """\
Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once \
or twice she had peeped into the book her sister was reading, but it had no pictures or conversations in it, \
"and what is the use of a book," thought Alice "without pictures or conversations?"

So she was considering in her own mind (as well as she could, for the hot day made her feel very sleepy and \
stupid), whether the pleasure of making a daisy-chain would be worth the trouble of getting up and picking the \
daisies, when suddenly a White Rabbit with pink eyes ran close by her.

There was nothing so very remarkable in that; nor did Alice think it so very much out of the way to hear the \
Rabbit say to itself, "Oh dear! Oh dear! I shall be late!" (when she thought it over afterwards, it occurred \
to her that she ought to have wondered at this, but at the time it all seemed quite natural); but when the \
Rabbit actually took a watch out of its waistcoat-pocket, and looked at it, and then hurried on, Alice started \
to her feet, for it flashed across her mind that she had never before seen a rabbit with either a \
waistcoat-pocket, or a watch to take out of it, and burning with curiosity, she ran across the field after it, \
and fortunately was just in time to see it pop down a large rabbit-hole under the hedge.

In another moment down went Alice after it, never once considering how in the world she was to get out again.

The rabbit-hole went straight on like a tunnel for some way, and then dipped suddenly down, so suddenly that \
Alice had not a moment to think about stopping herself before she found herself falling down a very deep well.

Either the well was very deep, or she fell very slowly, for she had plenty of time as she went down to look \
about her and to wonder what was going to happen next. First, she tried to look down and make out what she was \
coming to, but it was too dark to see anything; then she looked at the sides of the well, and noticed that \
they were filled with cupboards and book-shelves; here and there she saw maps and pictures hung upon pegs. She \
took down a jar from one of the shelves as she passed; it was labelled "ORANGE MARMALADE", but to her great \
disappointment it was empty: she did not like to drop the jar for fear of killing somebody underneath, so \
managed to put it into one of the cupboards as she fell past it.
"""
ANSWER_TOKENS = 48


def main(file: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # transformers knows no `tokenizer.ggml.pre`: this is SmolLM2's published tokenizer.json
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    prompts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in CHATS]
    texts = [*prompts, PROSE]
    all_ids: list[list[int]] = []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        if text is not PROSE:
            ids = model.generate(ids, max_new_tokens=ANSWER_TOKENS, do_sample=False)
        all_ids.append(ids[0].tolist())
    top_ids, top, following = [], [], []
    with torch.inference_mode():
        for ids in all_ids:
            logprobs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)[:-1]
            largest = logprobs.topk(TOP)
            top_ids.append(largest.indices.numpy())
            top.append(largest.values.numpy())
            following.append(logprobs[range(len(ids) - 1), ids[1:]].numpy())
    FIXTURE.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        FIXTURE / "logprobs.npz",
        token_ids=np.concatenate([np.array(ids, np.uint16) for ids in all_ids]),
        lengths=np.array([len(ids) for ids in all_ids], np.int32),
        top_ids=np.concatenate(top_ids).astype(np.uint16),
        top=np.concatenate(top).astype(np.float32),
        following=np.concatenate(following).astype(np.float32),
    )
    answers = [
        tokenizer.decode(ids[len(tokenizer(text).input_ids) :]) for ids, text in zip(all_ids, prompts, strict=False)
    ]
    described = {"chats": CHATS, "prompts": prompts, "answers": answers, "prose": PROSE}
    (FIXTURE / "texts.json").write_text(json.dumps(described, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    perplexity = float(np.exp(-following[-1].mean()))
    print(f"{sum(len(each) for each in following)} positions; perplexity of the prose {perplexity:.4f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

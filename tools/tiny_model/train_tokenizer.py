"""Train the byte-level BPE and write `tokenizer.json` and `tokenizer_config.json`.

PYTHONPATH=tools python -m tiny_model.train_tokenizer CHECKPOINT_FOLDER
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from . import corpus, rendering

NUM_BPE_TOKENS = 2031
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
MAX_POSITIONS = 2048
# Contractions, words with one leading character, single digits, runs of punctuation, line breaks, other white space.
_PRE_TOKEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train(num_documents: int) -> Tokenizer:
    """Train on documents of the corpus; the added tokens' ids follow those of the BPE, as in Qwen3."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PRE_TOKEN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_BPE_TOKENS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_pieces(num_documents), trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ADDED_TOKENS])
    return tokenizer


def write(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer and its configuration, the chat template inside it."""
    tokenizer.save(str(folder / "tokenizer.json"))
    names = (*SPECIAL_TOKENS, *ADDED_TOKENS)
    decoder = {
        str(tokenizer.token_to_id(name)): {
            "content": name,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": name in SPECIAL_TOKENS,
        }
        for name in names
    }
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": decoder,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": None,
        "chat_template": rendering.TEMPLATE_FILE.read_text(),
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": MAX_POSITIONS,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def _pieces(num_documents: int) -> Iterator[str]:
    """Yield text without the added tokens; what is only context appears once in eight documents."""
    added = re.compile("|".join(re.escape(token) for token in (*SPECIAL_TOKENS, *ADDED_TOKENS)))
    for index, document in enumerate(corpus.training_documents("tokenizer", num_documents)):
        context = document.context if index % 8 == 0 else ""
        yield from (piece for piece in added.split(context + document.target) if piece)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    write(train(num_documents=60_000), target)

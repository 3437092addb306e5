"""Small tokenizers of all kinds, with added tokens that have rules for their neighbours or none."""

import json

import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

SPECIAL, MARK, KEPT = ("<s>", "<|end|>"), ("<think>", "</think>", "<|user|>"), "<kept>"
WORDS = ["▁", *"▁abcdefghijklmnopqrstuvwxyz<>|/.!?é\n", "▁a", "th", "in", "<s", "s>", "\n\n", "r\n", "▁▁", "end"]
MERGES = [("▁", "a"), ("t", "h"), ("i", "n"), ("<", "s"), ("s", ">"), ("\n", "\n"), ("r", "\n"), ("▁", "▁")]
FLAGS = [{}, {"lstrip": True}, {"rstrip": True}, {"lstrip": True, "rstrip": True}, {"single_word": True}]


def sentencepiece(flags, *, normalizer=None, scheme="always") -> tokenizers.Tokenizer:
    """In the manner of Llama 2's and Gemma's: control tokens are in the model's vocabulary, too."""
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys(["<unk>", *SPECIAL, *WORDS]))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES, unk_token="<unk>", fuse_unk=True))
    if normalizer is None:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    else:
        tokenizer.normalizer = normalizer
    return with_tokens(tokenizer, flags)


def with_tokens(tokenizer: tokenizers.Tokenizer, flags, *, normalized=False) -> tokenizers.Tokenizer:
    added = [AddedToken(text, special=True, normalized=False, **flags) for text in SPECIAL]
    added += [AddedToken(text, normalized=normalized, **flags) for text in (*MARK, KEPT)]
    tokenizer.add_tokens(added)
    return tokenizer


def byte_level(tokenizer, flags, *, add_prefix_space=False, normalized=False) -> tokenizers.Tokenizer:
    content = json.loads(tokenizer.to_str()) | {"added_tokens": []}
    copy = tokenizers.Tokenizer.from_str(json.dumps(content))
    copy.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    copy.normalizer = normalizers.NFC()
    return with_tokens(copy, flags, normalized=normalized)


def unigram(flags) -> tokenizers.Tokenizer:
    """Knows control tokens as words: it would make them of any text."""
    known = ["<unk>", *SPECIAL, *dict.fromkeys(WORDS)]
    tokenizer = tokenizers.Tokenizer(models.Unigram([(word, -float(len(word) < 3)) for word in known], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return with_tokens(tokenizer, flags)


def word_level(flags) -> tokenizers.Tokenizer:
    known = {word: i for i, word in enumerate(dict.fromkeys(["<unk>", *SPECIAL, *WORDS]))}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return with_tokens(tokenizer, flags)


LEGACY = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
KINDS = {
    "byte-level": byte_level,
    "byte-level with a prefix space": lambda _, flags: byte_level(_, flags, add_prefix_space=True),
    "byte-level, tokens normalised": lambda _, flags: byte_level(_, flags, normalized=True),
    "metaspace always": lambda _, flags: sentencepiece(flags),
    "metaspace first": lambda _, flags: sentencepiece(flags, scheme="first"),
    "metaspace never": lambda _, flags: sentencepiece(flags, scheme="never"),
    "normaliser of Llama 2": lambda _, flags: sentencepiece(flags, normalizer=LEGACY),
    # its words are no added tokens, which a rule for neighbours could keep from being found
    "unigram": lambda _, flags: unigram({name: on for name, on in flags.items() if name != "single_word"}),
    "words": lambda _, flags: word_level(flags),
}

"""How many of a text's tokens begin before a place in it, from the ids that are there already.

    text   … ⟨control⟩ a long answer of a tool ▏ tail ⟨control⟩ …
    ids    …     7      91 14 6 30 2 17 52 8      4      7      …
                                        place ▏      ▏ counted back from here

What clients mark ends with a turn, so that a control token is near, whose id tells where it is among the ids.
"""

import itertools
from collections.abc import Collection, Sequence

import tokenizers
from tokenizers import decoders

MAX_TAIL_CHARACTERS = 64
"""A longer tail is not looked for: it takes a call for each of its tokens."""
_REPLACEMENT = "\ufffd"  # what a decoder makes of a part of a character


def decodes_to_text(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether tokens of a piece of text, decoded, are the text: bytes joined, and no space put before it."""
    described: object = None if tokenizer.pre_tokenizer is None else tokenizer.pre_tokenizer.__getstate__()
    return isinstance(tokenizer.decoder, decoders.ByteLevel) and '"add_prefix_space":true' not in str(described)


def place_of_nth(token_ids: Sequence[int], wanted: Collection[int], number: int, total: int) -> int:
    """Where the wanted id with this number is, of so many in all; after the last id for the one after the last."""
    if number >= total:
        return len(token_ids)
    order, skipped = range(len(token_ids)), number
    if number > total // 2:
        order, skipped = order[::-1], total - 1 - number
    return next(itertools.islice((index for index in order if token_ids[index] in wanted), skipped, None))


def num_before_tail(tokenizer: tokenizers.Tokenizer, token_ids: Sequence[int], last: int, tail: str) -> int | None:
    """How many ids begin before the tail of the text that ends with the id before `last`; None where that is not found.

    Args:
        tokenizer: whose decoder joins the bytes of tokens.
        token_ids: of the text.
        last: the tail's text ends before this id.
        tail: in characters.
    """
    if len(tail) > MAX_TAIL_CHARACTERS or _REPLACEMENT in tail:
        return None
    for first in range(last - 1, max(-1, last - 1 - 4 * MAX_TAIL_CHARACTERS), -1):
        decoded = tokenizer.decode(list(token_ids[first:last]), skip_special_tokens=False)
        if decoded == tail:
            return first
        if len(decoded) > len(tail):
            return first + 1 if decoded.endswith(tail) else None
    return None

"""Where a tokenizer encodes what comes before a token and what comes after it without regard to each other.

`tokenizers` first splits a text at added tokens that are not normalised. What lies between two of them is normalised,
split and encoded by itself: no rule of a normaliser, a pre-tokeniser or a model sees beyond it, and merges do not cross
it. So the ids of a text are those of its beginning, up to such a token, and those of the rest, from the token on. That
needs

- a token that is looked for in the text as it stands (`normalized=False`), takes no white space before it along
  (`lstrip`) and does not look at its neighbours (`single_word`); what it takes along after it is the rest's,
- the rest to begin with the token, so that what follows is not the beginning of a text: Metaspace's `first` marks that,
- components that work on each piece by itself: those that are named here, of `tokenizers` 0.21 to 0.23,
- a model without chance (`dropout`).

Anything else is encoded as a whole.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

import tokenizers
from tokenizers import AddedToken

_NORMALIZERS = frozenset(
    (
        *("BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend"),
        *("Replace", "Sequence", "Strip", "StripAccents"),
    )
)
_PRE_TOKENIZERS = frozenset(
    (
        *("BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "FixedLength", "Metaspace", "Punctuation"),
        *("Sequence", "Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit"),
    )
)
_MODELS = frozenset(("BPE", "Unigram", "WordLevel", "WordPiece"))


def separates(token: AddedToken) -> bool:
    """Whether a text may be cut before an added token, in a tokenizer that `works_piecewise`."""
    return not (token.normalized or token.lstrip or token.single_word)


def works_piecewise(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether all that a tokenizer is made of works on what lies between added tokens by itself."""
    model = tokenizer.model
    if type(model).__name__ not in _MODELS or getattr(model, "dropout", None):
        return False
    return _are_known(tokenizer.normalizer, "normalizers", _NORMALIZERS) and _are_known(
        tokenizer.pre_tokenizer, "pretokenizers", _PRE_TOKENIZERS
    )


def _are_known(component: Any, parts: str, known: frozenset[str]) -> bool:
    if component is None:
        return True
    try:
        described = json.loads(component.__getstate__())
    except Exception:  # noqa: BLE001 - `tokenizers` raises bare Exception of a component in Python: it is not known
        return False
    return all(name in known for name in _types(described, parts))


def _types(described: Mapping[str, Any], parts: str) -> Iterator[str]:
    yield str(described.get("type"))
    for part in cast("list[Mapping[str, Any]]", described.get(parts, [])):
        yield from _types(part, parts)

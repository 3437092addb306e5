"""Token ids that stand for text that is not recorded: a function of seed and name alone, on every machine."""

import hashlib

import numpy as np
from numpy.typing import NDArray

_KEY_BYTES = 16


class Filler:
    """Random token ids by name.

    Args:
        num_token_ids: ids are below it. Special tokens of most vocabularies lie above, or are few.
        seed: another seed is another text under the same names.
    """

    def __init__(self, *, num_token_ids: int, seed: int) -> None:
        self._num_token_ids = num_token_ids
        self._seed = seed

    def tokens(self, *name: str | int, num_tokens: int) -> NDArray[np.int32]:
        """The first ids under a name, int32 `[num_tokens]`; a shorter piece is the beginning of a longer one."""
        text = "\0".join(str(part) for part in (self._seed, *name))
        key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=_KEY_BYTES).digest(), "little")
        generator = np.random.Generator(np.random.Philox(key=key))
        # `random` draws one word for each number, where `integers` may draw several: so a beginning stays one.
        return (generator.random(num_tokens) * self._num_token_ids).astype(np.int32)

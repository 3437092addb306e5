"""Looking up the rows of tokens in an embedding table."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def embedding(token_ids: NDArray[Any], table: NDArray[Any]) -> NDArray[Any]:
    """`table [V, h]` at `token_ids [T]`: `[T, h]`, a copy."""
    return np.take(table, token_ids, axis=0)

"""What a body is checked for before it is decoded, and how its decoding is kept short.

Large bodies are read in threads, and decoded in slices (`sliced_json.py`), so that streams have their turn. No garbage
is collected meanwhile: of two and a half million empty lists that takes nearly all of 0.7 s.
"""

import contextlib
import gc
from collections.abc import Generator

from openinfer_server.http.api_errors import ApiError

_SMALL_BYTES = 64 * 2**10


def check_elements(body: bytes, most: int) -> None:
    """Bounds the values that a body can have, as commas and opening brackets, without decoding it."""
    # Those inside texts count, too: a text with so many would exceed any context.
    if len(body) > most and sum(map(body.count, (b",", b"[", b"{"))) > most:
        message = f"the body has more than {most} commas and opening brackets"
        raise ApiError(400, message, code="too_many_elements")


@contextlib.contextmanager
def collector_paused(num_bytes: int) -> Generator[None]:
    # no garbage is looked for while so many bytes are decoded, if that is much; there is none in fresh values
    if num_bytes <= _SMALL_BYTES or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()

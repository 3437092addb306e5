"""What a body is checked for before it is decoded."""

from openinfer_server.http.api_errors import ApiError


def num_elements(body: bytes) -> int:
    """Commas and opening brackets; no value of JSON comes without one of them, but the first."""
    return len(body) - len(body.translate(None, b",[{"))


def check_elements(body: bytes, most: int) -> int | None:
    """Bounds the values that a body can have, as commas and opening brackets, undecoded; how many, if counted."""
    # Those inside texts count, too: a text with so many would exceed any context.
    if len(body) <= most:
        return None
    if (found := num_elements(body)) > most:
        message = f"the body has more than {most} commas and opening brackets"
        raise ApiError(400, message, code="too_many_elements")
    return found

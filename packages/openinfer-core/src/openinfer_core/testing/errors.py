"""What a conformance kit raises."""

from collections.abc import Callable


class ConformanceError(AssertionError):
    """A part does not do what the contract demands; the message says what, and where it was seen."""


def require(condition: object, violation: str | Callable[[], str]) -> None:
    """Raises unless `condition` holds; a `violation` that is a function is called only then, since words cost time."""
    if not condition:
        raise ConformanceError(violation if isinstance(violation, str) else violation())

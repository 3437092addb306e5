"""What a conformance kit raises."""


class ConformanceError(AssertionError):
    """An operator does not do what the contract demands; the message says what, and in which case it was seen."""


def require(condition: object, violation: str) -> None:
    """Raises `ConformanceError(violation)` unless `condition` holds."""
    if not condition:
        raise ConformanceError(violation)

"""What a conformance kit raises."""


class ConformanceError(AssertionError):
    """A part does not do what the contract demands; the message says what, and where it was seen."""


def require(condition: object, violation: str) -> None:
    if not condition:
        raise ConformanceError(violation)

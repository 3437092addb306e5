"""Bounds of what a template pads, and the refusal of a rendering."""

import re
from collections.abc import Mapping, Sequence

MAX_REPEATED_LENGTH = 2**20  # longest string or list that a product with a number, or padding, may give
WIDTH = re.compile(r"%[^a-zA-Z%]*(?:\*|\d{5})")  # a width or precision of five digits, or one that is an argument
FIELD_WIDTH = re.compile(r"\d{5}|\{")  # the same in a field of `format`


class RenderingRefused(Exception):
    """The template refused these messages, failed on them or exceeded a bound; the message is for the client."""


def check_numbers(args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    if any(isinstance(each, int) and each > MAX_REPEATED_LENGTH for each in (*args, *kwargs.values())):
        raise too_wide()


def check_power(base: object, exponent: object) -> None:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > MAX_REPEATED_LENGTH:
        raise RenderingRefused("the chat template makes a number beyond all measure")


def check_width(pattern: str) -> None:
    if WIDTH.search(pattern):
        raise too_wide()


def too_wide() -> RenderingRefused:
    return RenderingRefused("the chat template pads a text beyond all measure")

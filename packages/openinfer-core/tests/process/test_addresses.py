"""Addresses that users write: what is one, and what is none."""

import pytest

from openinfer_core import InvalidRequest
from openinfer_core.process.addresses import parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.1:7000", ("10.0.0.1", 7000)),
        ("head:0", ("head", 0)),
        ("[fd00::1]:65535", ("fd00::1", 65535)),
    ],
)
def test_an_address_is_read(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text, field="join") == address


@pytest.mark.parametrize("text", ["", "host", ":7000", "host:", "host:-1", "host:65536", "host:١"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not HOST:PORT"):
        parse_address(text, field="join")

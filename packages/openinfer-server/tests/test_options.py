"""Options are checked when they are made."""

import msgspec
import pytest

from openinfer_core.errors import InvalidRequest
from openinfer_server import ServerOptions


def test_defaults_listen_on_loopback_alone():
    assert ServerOptions().host == "127.0.0.1"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", 65536),
        ("port", -1),
        ("max_body_bytes", 0),
        ("large_request_workers", 0),
        ("large_request_workers", 33),
        ("max_choices", 0),
        ("max_buffered_bytes", 0),
        ("drain_deadline_s", 0.0),
        ("head_timeout_s", float("nan")),
        ("write_timeout_s", float("inf")),
        ("model_name", [""]),
    ],
)
def test_value_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(InvalidRequest) as error:
        ServerOptions(**{field: value})
    assert error.value.field == field


def test_unknown_option_is_refused():
    with pytest.raises(msgspec.ValidationError, match="foo"):
        msgspec.convert({"foo": 1}, ServerOptions)

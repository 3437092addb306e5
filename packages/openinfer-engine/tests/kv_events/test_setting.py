import pytest

from openinfer_engine.kv_events.setting import KvEventsSetting, parse_kv_events


def test_a_bare_port_is_one_of_loopback():
    assert parse_kv_events("5557,replay=5558") == KvEventsSetting(
        endpoint="tcp://127.0.0.1:5557", replay="tcp://127.0.0.1:5558"
    )


def test_a_router_that_listens_is_connected_to_under_a_topic():
    setting = parse_kv_events("tcp://router:5557,connect=true,topic=kv@pod-3@qwen3,buffer_steps=5")
    assert (setting.connect, setting.topic, setting.buffer_steps) == (True, "kv@pod-3@qwen3", 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no endpoint; write a port of loopback"),
        ("localhost:5557", "is no endpoint"),
        ("5557,replay=5557", "need two endpoints"),
        ("tcp://*:5557,connect=true", "needs the address of the router"),
        ("5557,buffer_steps=0", "buffer_steps is 0"),
        ("5557,topics=a", "unknown field `topics`; fields are endpoint, connect"),
        ("5557,connect=perhaps", "Expected `bool`"),
        ("5557,5558", "is not one more NAME=VALUE"),
        ("5557,topic=a,topic=b", "is not one more NAME=VALUE"),
    ],
)
def test_what_means_nothing_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_kv_events(text)

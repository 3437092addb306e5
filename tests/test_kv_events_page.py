"""The subscriber's function of `docs/reference/kv-events.md` works."""

import re
import time
from pathlib import Path

import pytest
import zmq

from openinfer_engine.kv_events.publisher import KvEventPublisher
from openinfer_engine.kv_events.setting import KvEventsSetting, parse_kv_events

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "kv-events.md"


@pytest.fixture
def page():
    return PAGE.read_text(encoding="utf-8")


def test_the_pages_function_replays(page, tmp_path):
    names = {}
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(code, "kv-events.md", "exec"), names)
    endpoint = f"ipc://{tmp_path}/replay"
    setting = parse_kv_events(f"ipc://{tmp_path}/events,replay={endpoint}")
    publisher = KvEventPublisher(setting, block_size_tokens=2)
    publisher.publish([None])
    give_up_s = time.monotonic() + 30
    with zmq.Context() as context:
        while not (events := names["replay"](context, endpoint, 0)):
            assert time.monotonic() < give_up_s
    publisher.close()
    assert events == [["AllBlocksCleared"]]


def test_the_page_names_every_field_of_the_setting(page):
    assert [name for name in KvEventsSetting.__struct_fields__[1:] if f"{name}=" not in page] == []

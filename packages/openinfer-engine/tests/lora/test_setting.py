"""What a user says about adapters and folders of weights."""

import pytest

from openinfer_core import InvalidRequest
from openinfer_engine import EngineOptions
from openinfer_engine.lora.setting import parse_adapters


def test_settings_are_names_and_folders() -> None:
    assert parse_adapters(["org/legal:v1=/srv/a=b", "ünï=x"]) == {"org/legal:v1": "/srv/a=b", "ünï": "x"}


@pytest.mark.parametrize("setting", ["a", "=/x", "a=", " a=/x", "a =/x", "a\nb=/x", "\u200b=/x", "x" * 513 + "=/x"])
def test_settings_that_name_nothing_that_clients_could_ask_for_are_refused(setting: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        EngineOptions(lora=[setting])
    assert refusal.value.field == "lora"


@pytest.mark.parametrize("field", ["lora_root", "weights_root"])
@pytest.mark.parametrize("path", ["", " "])
def test_root_that_is_empty_is_not_the_working_folder(field: str, path: str) -> None:
    """As `--lora-root "$UNSET"` says it."""
    with pytest.raises(InvalidRequest, match=f"{field} is empty"):
        EngineOptions(**{field: path})

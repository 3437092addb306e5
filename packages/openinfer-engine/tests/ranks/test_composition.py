"""A rank that would compute with anything else than rank 0 is refused, and told with what."""

from typing import Any

import pytest
from joined import FAMILY, MODEL_DIR, options_of

from openinfer_core import Refused
from openinfer_engine import resolve
from openinfer_engine.ranks.composition import composition_of, require_same

HERE = {
    "python": "3.12",
    "architecture": "sm_90a",
    "checkpoint and KV layout": "aa",
    "part scheduler": "token-budget (openinfer-engine 0.1.0)",
    "distribution openinfer-engine": "bb",
}
PLACE: dict[str, Any] = {"rank": 3, "place": "GPU 1 of node b"}


def test_a_rank_that_is_composed_alike_is_taken() -> None:
    require_same(HERE, dict(reversed(HERE.items())), **PLACE)


@pytest.mark.parametrize("name", HERE)
def test_whatever_is_another_is_named_with_both(name: str) -> None:
    with pytest.raises(Refused, match=rf"^rank 3 \(GPU 1 of node b\) is not composed as rank 0 is: {name} is other "):
        require_same(HERE, HERE | {name: "other"}, **PLACE)


def test_what_only_one_of_them_has_is_named() -> None:
    with pytest.raises(Refused, match="distribution mine is cc there and absent here"):
        require_same(HERE, HERE | {"distribution mine": "cc"}, **PLACE)
    with pytest.raises(Refused, match="part scheduler is absent there and"):
        require_same(HERE, {name: text for name, text in HERE.items() if name != "part scheduler"}, **PLACE)


def test_of_many_differences_three_are_named() -> None:
    with pytest.raises(Refused, match=r"there and sm_90a here; .*; and 2 more; install the same wheels"):
        require_same(HERE, dict.fromkeys(HERE, "other"), **PLACE)


def test_an_engines_composition_has_its_parts_its_model_and_their_packages() -> None:
    told = composition_of(resolve(FAMILY.definition, MODEL_DIR, options_of(None, 1)))
    assert {"python", "architecture", "checkpoint and KV layout", "part scheduler"} <= told.keys()
    assert {"distribution openinfer-engine", "distribution openinfer-qwen3"} <= told.keys()
    assert all(told.values())

"""Plug-ins are listed without importing; absence, ambiguity and a broken one each say what to do."""

import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Protocol

import pytest

from openinfer_core import (
    AmbiguousPlugin,
    BrokenPlugin,
    Plugin,
    PluginError,
    Refused,
    UnknownPlugin,
    find_plugin,
    list_plugins,
)
from openinfer_core.plugins import QUEUE_POLICIES, Lister, members_of

GROUP = "openinfer.schedulers"
OPENINFER_CONTRACT = 1
HERE = "module_of_test_plugins"
sys.modules[HERE] = sys.modules[__name__]  # under a name that an entry point may have


def lister(**entries: str) -> Lister:
    """Lists entry points of names and values; a name may end in digits to be offered twice."""
    points = [EntryPoint(name.rstrip("0123456789"), value, GROUP) for name, value in entries.items()]
    return lambda group: [point for point in points if point.group == group]


def test_list_plugins_sorts_by_name_and_imports_nothing() -> None:
    found = list_plugins(GROUP, lister=lister(zeta="no_such_package_of_zeta:Z", alpha="no_such_package_of_alpha:A"))
    assert [plugin.name for plugin in found] == ["alpha", "zeta"]
    assert not any(name.startswith("no_such_package") for name in sys.modules)


def test_list_plugins_of_another_group_is_empty() -> None:
    assert list_plugins("openinfer.models", lister=lister(alpha="a:b")) == []


def test_find_plugin_loads_what_the_entry_point_names() -> None:
    plugin = find_plugin(GROUP, "here", lister=lister(here=f"{HERE}:lister"))
    assert plugin.load() is lister
    assert plugin.origin == f"{HERE}:lister"  # it belongs to no distribution


def test_find_plugin_that_nobody_offers_lists_the_names_there_are() -> None:
    with pytest.raises(UnknownPlugin) as caught:
        find_plugin(GROUP, "gamma", lister=lister(beta="a:b", alpha="a:c"))
    assert str(caught.value) == f"no installed package offers 'gamma' in {GROUP}; installed: alpha, beta"
    with pytest.raises(UnknownPlugin, match="installed: none"):
        find_plugin(GROUP, "gamma", lister=lister())


def test_find_plugin_that_two_offer_names_both() -> None:
    with pytest.raises(AmbiguousPlugin) as caught:
        find_plugin(GROUP, "same", lister=lister(same1="one:S", same2="two:S"))
    assert "one:S" in str(caught.value)
    assert "two:S" in str(caught.value)
    assert "uninstall all but one" in str(caught.value)


def test_find_plugin_listed_twice_by_one_distribution_is_not_ambiguous() -> None:
    assert find_plugin(GROUP, "same", lister=lister(same1="one:S", same2="one:S")).entry_point.value == "one:S"


def test_find_plugin_of_one_value_from_two_distributions_names_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one-copy", "other-copy"):
        info = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\ncopied = the_same:Thing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AmbiguousPlugin) as caught:
        find_plugin(GROUP, "copied")
    assert str(caught.value) == (
        f"'copied' in {GROUP} is offered more than once: one-copy 1.0 (the_same:Thing); "
        "other-copy 1.0 (the_same:Thing); uninstall all but one"
    )


def test_load_of_a_plugin_that_breaks_on_import_keeps_its_own_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_plugin_for_test.py").write_text(
        "OPENINFER_CONTRACT = 1\nraise RuntimeError('no such device')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    plugin = find_plugin(GROUP, "broken", lister=lister(broken="broken_plugin_for_test:Thing"))
    with pytest.raises(BrokenPlugin, match="failed to load: RuntimeError: no such device") as caught:
        plugin.load()
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert isinstance(caught.value, PluginError)


def test_plugin_that_exits_is_broken_and_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "exiting_plugin_for_test.py").write_text("OPENINFER_CONTRACT = 1\nraise SystemExit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    plugin = find_plugin(GROUP, "exiting", lister=lister(exiting="exiting_plugin_for_test:Thing"))
    with pytest.raises(BrokenPlugin, match="failed to load: SystemExit: 0"):
        plugin.load()
    with pytest.raises(BrokenPlugin, match="cannot be made: SystemExit: 3"):
        plugin_named("exits").make()


@pytest.mark.parametrize(
    ("value", "cause"),
    [(f"{HERE}:NoSuchThing", AttributeError), ("no_such_module_at_all:X", ModuleNotFoundError)],
)
def test_load_of_a_plugin_that_is_not_there_is_broken(value: str, cause: type[Exception]) -> None:
    with pytest.raises(BrokenPlugin) as caught:
        find_plugin(GROUP, "gone", lister=lister(gone=value)).load()
    assert isinstance(caught.value.__cause__, cause)


def test_installed_queue_policies_are_found_with_their_distribution() -> None:
    plugins = {plugin.name: plugin for plugin in list_plugins(QUEUE_POLICIES)}
    assert {"fcfs", "priority", "fair-share"} <= plugins.keys()
    plugin = find_plugin(QUEUE_POLICIES, "fcfs")
    assert plugin.origin.startswith("openinfer-core ")
    assert plugin.load().__name__ == "FirstComeFirstServed"


# what a plug-in makes


class Clock(Protocol):
    zone: str

    def now_s(self) -> float: ...


class Watch:
    zone = "UTC"

    def __init__(self, offset_s: float = 0.0) -> None:
        if offset_s < 0:
            raise Refused("an offset is not negative")
        if offset_s > 1e6:
            raise LookupError("no such zone")
        self.offset_s = offset_s

    def now_s(self) -> float:
        return self.offset_s


class Sundial:
    zone = "local"


STOPPED = Watch(3.0)


def nothing(offset_s: float) -> None:
    """Returns nothing."""


def exits() -> None:
    raise SystemExit(3)


def plugin_named(value: str) -> Plugin:
    return find_plugin(GROUP, "x", lister=lister(x=f"{HERE}:{value}"))


def test_members_of_a_protocol_are_its_public_ones() -> None:
    assert members_of(Clock) == ("now_s", "zone")


def test_make_gives_what_the_factory_makes() -> None:
    assert plugin_named("Watch").make(2.0, contract=Clock).now_s() == 2.0


@pytest.mark.parametrize(
    ("value", "arguments", "says"),
    [
        ("Watch", (1.0, 2.0), "cannot be made: TypeError: Watch.__init__"),
        ("Watch", (1e7,), "cannot be made: LookupError: no such zone"),
        ("nothing", (1.0,), "makes nothing: it returned None"),
        ("Sundial", (), "is no Clock: it lacks now_s"),
        ("STOPPED", (), "cannot be made: TypeError: 'Watch' object is not callable"),
    ],
)
def test_make_of_what_cannot_be_made_is_broken_and_named(value: str, arguments: tuple[float, ...], says: str) -> None:
    with pytest.raises(BrokenPlugin) as caught:
        plugin_named(value).make(*arguments, contract=Clock)
    assert str(caught.value).startswith(f"{GROUP} plug-in 'x' of ")
    assert says in str(caught.value)


def test_make_that_refuses_is_a_refusal_with_the_plugins_name() -> None:
    with pytest.raises(Refused, match=r"^openinfer.schedulers plug-in 'x' of .*: an offset is not negative$"):
        plugin_named("Watch").make(-1.0, contract=Clock)


def test_instance_is_the_object_or_one_of_its_class() -> None:
    assert plugin_named("STOPPED").instance(Clock) is STOPPED
    assert plugin_named("Watch").instance(Clock).now_s() == 0.0
    with pytest.raises(BrokenPlugin, match="is no Clock: it lacks now_s"):
        plugin_named("Sundial").instance(Clock)


def test_callable_with_asks_for_the_parameters_and_calls_nothing() -> None:
    assert plugin_named("nothing").callable_with(1) is nothing
    with pytest.raises(BrokenPlugin, match=r"cannot be called with 2 argument\(s\): too many positional arguments"):
        plugin_named("nothing").callable_with(2)
    with pytest.raises(BrokenPlugin, match=r"cannot be called with 1 argument\(s\): .* is not a callable object"):
        plugin_named("STOPPED").callable_with(1)

"""From a name to a folder and a family, with plug-ins listed by the test."""

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import msgspec
import pytest

from openinfer.models import checkpoint_distributions, find_family, find_model_dir, name_of
from openinfer_core.errors import AmbiguousPlugin, BrokenPlugin, InvalidCheckpoint, UnclaimedModel

OPENINFER_CONTRACT = 1
HERE = "module_of_test_models"
sys.modules[HERE] = sys.modules[__name__]  # under a name that an entry point may have


class Anything:
    """A family that serves everything."""

    name = "anything"
    options_type = msgspec.Struct
    plan = launch = print

    def refusal(self, config: object) -> None:
        return None


def lister(*values: str, name: str = "x") -> object:
    return lambda group: [EntryPoint(f"{name}{i}", value, group) for i, value in enumerate(values)]


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert find_model_dir(str(tmp_path)) == tmp_path
    assert name_of(str(tmp_path)) == tmp_path.name
    assert name_of("tiny") == "tiny"


def test_a_checkpoint_of_a_broken_package_is_an_error_with_its_cause() -> None:
    with pytest.raises(BrokenPlugin, match="no_such_module"):
        find_model_dir("x0", lister=lister("no_such_module:f"))


def raising(*arguments: object) -> Path:
    raise RuntimeError("half a thought")


def nothing(*arguments: object) -> None:
    return None


def test_a_function_that_names_no_folder_is_told_with_its_package(tmp_path: Path) -> None:
    for function, cause in (("raising", "RuntimeError: half a thought"), ("nothing", "TypeError")):
        with pytest.raises(BrokenPlugin, match=rf"'x0' .*{HERE}:{function}\) names no folder: {cause}"):
            find_model_dir("x0", lister=lister(f"{HERE}:{function}"))
        (tmp_path / "model.x0").touch()
        with pytest.raises(BrokenPlugin, match=rf"'x0' .*{HERE}:{function}\) names no folder: {cause}"):
            find_model_dir(str(tmp_path / "model.x0"), lister=lister(f"{HERE}:{function}"))


def test_a_folder_is_of_no_distribution_and_a_named_checkpoint_of_its_own(tmp_path: Path) -> None:
    assert checkpoint_distributions(str(tmp_path)) == set()
    assert checkpoint_distributions("tiny") == {"openinfer-tiny-model"}


def test_two_packages_with_one_name_are_ambiguous() -> None:
    both = [EntryPoint("same", value, "openinfer.checkpoints") for value in ("a:f", "b:f")]
    with pytest.raises(AmbiguousPlugin, match="more than once"):
        find_model_dir("same", lister=lambda group: both)


def test_two_families_that_claim_one_model_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "thing"}')
    twice = lister(f"{HERE}:Anything", f"{HERE}:Anything")
    with pytest.raises(UnclaimedModel, match=r"'thing' is claimed by x0 .*, x1 .*; choose one with --family NAME"):
        find_family(tmp_path, lister=twice)
    assert isinstance(find_family(tmp_path, "x1", lister=twice)[0], Anything)


def test_a_broken_family_that_is_named_is_the_whole_answer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "thing"}')
    with pytest.raises(BrokenPlugin, match=r"^openinfer.models plug-in 'x0' .* failed to load: AttributeError"):
        find_family(tmp_path, "x0", lister=lister(f"{HERE}:Missing"))


def test_a_folder_without_a_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match=r"config\.json"):
        find_family(tmp_path)

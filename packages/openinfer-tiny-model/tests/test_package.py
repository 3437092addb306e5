"""What the package offers to Python: one function, one entry point, nothing required."""

from importlib.metadata import entry_points, requires
from pathlib import Path

import pytest

import openinfer_tiny_model


def test_all_lists_what_is_exported() -> None:
    assert openinfer_tiny_model.__all__ == sorted(openinfer_tiny_model.__all__)
    assert all(callable(getattr(openinfer_tiny_model, name)) for name in openinfer_tiny_model.__all__)


def test_entry_point_tiny_names_the_function_that_finds_the_folder() -> None:
    (found,) = entry_points(group="openinfer.checkpoints", name="tiny")

    assert found.load() is openinfer_tiny_model.model_dir
    assert found.load()().is_dir()


def test_distribution_requires_nothing() -> None:
    assert not requires("openinfer-tiny-model")


def test_model_dir_without_checkpoint_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(openinfer_tiny_model, "files", lambda _: tmp_path)

    with pytest.raises(FileNotFoundError, match="must be a folder on disk"):
        openinfer_tiny_model.model_dir()

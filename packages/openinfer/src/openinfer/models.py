"""From what a user calls a model to a folder and the family that serves it."""

from pathlib import Path

from openinfer_core import ModelFamily, claim, find_plugin, list_plugins, load_family, read_config
from openinfer_core.errors import InvalidCheckpoint, UnknownPlugin
from openinfer_core.plugins import CHECKPOINTS, MODELS, Lister, Plugin, installed


def find_model_dir(model: str, *, lister: Lister = installed) -> Path:
    """The folder of a model: a path, or the name of a checkpoint that an installed package brings (`tiny`).

    Raises:
        InvalidCheckpoint: neither a folder nor an installed checkpoint.
        BrokenPlugin: the package that brings the checkpoint failed to load.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    try:
        plugin = find_plugin(CHECKPOINTS, model, lister=lister)
    except UnknownPlugin as error:
        names = ", ".join(sorted({plugin.name for plugin in list_plugins(CHECKPOINTS, lister=lister)})) or "none"
        raise InvalidCheckpoint(
            f"{model!r} is neither a folder nor an installed checkpoint (installed: {names}); "
            "give the path of a Hugging Face model folder"
        ) from error
    return Path(plugin.load()())


def checkpoint_distributions(model: str, *, lister: Lister = installed) -> set[str]:
    """The distribution that brings a checkpoint which is called by name; none for a folder. Raises as `find_plugin`."""
    if Path(model).expanduser().is_dir():
        return set()
    name = find_plugin(CHECKPOINTS, model, lister=lister).distribution
    return set() if name is None else {name}


def name_of(model: str) -> str:
    """What clients call a model: a folder's own name, or the checkpoint's."""
    folder = Path(model).expanduser()
    return folder.resolve().name if folder.is_dir() else model


def find_family(model_dir: Path, name: str | None = None, *, lister: Lister = installed) -> tuple[ModelFamily, Plugin]:
    """The family that serves a folder, and the plug-in it came from.

    Args:
        model_dir: a folder with a `config.json`.
        name: the family to ask; None asks every installed one, and exactly one must claim the config.
        lister: where plug-ins are listed.

    Raises:
        UnclaimedModel: not exactly one family claims it, or the one named refuses it.
        PluginError: the family named is absent, ambiguous or broken.
        InvalidCheckpoint: no readable `config.json`.
    """
    config = read_config(model_dir)
    if name is None:
        return claim(config, list_plugins(MODELS, lister=lister))
    named = find_plugin(MODELS, name, lister=lister)
    load_family(named)  # what is wrong with the one family that was asked for is the whole answer
    return claim(config, [named])

"""What is said where openinfer-core is of another release: with the standard library alone, as core cannot be asked."""

from importlib.metadata import PackageNotFoundError, version


def misfit_of_core(error: ImportError) -> str:
    """The sentence for a module or name of ours that cannot be imported. Raises `error` if it is not ours."""
    package = str(error.name or "").partition(".")[0].replace("_", "-")
    if not package.startswith("openinfer"):
        raise error
    return (
        f"openinfer {version('openinfer')} needs what {_named(package)} does not have ({error}): "
        "install all packages of openinfer from one release"
    )


def _named(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"this environment without {package}"

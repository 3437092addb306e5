"""openinfer: a small, fast LLM inference engine that you can take apart.

Names are imported when they are first asked for, so that a command loads what it needs and no more.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openinfer.completion import Completion
    from openinfer.llm import LLM, GenerationFailed

__all__ = ["LLM", "Completion", "GenerationFailed"]

_MODULES = {"Completion": "completion", "GenerationFailed": "llm", "LLM": "llm"}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{module}"), name)
    except ImportError as error:
        from openinfer.core_fits import misfit_of_core

        raise ImportError(misfit_of_core(error)) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

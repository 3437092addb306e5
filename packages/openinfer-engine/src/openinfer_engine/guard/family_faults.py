"""What goes wrong in a family's own code is said with its name: which class, which function, which line."""

import logging
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from openinfer_core import BrokenPlugin, OpenInferError
from openinfer_engine.model import ModelDefinition

logger = logging.getLogger("openinfer.engine")


@contextmanager
def named_faults(definition: ModelDefinition[Any]) -> Generator[None]:
    """Around the start of an engine: what a family raises becomes one sentence.

    Our own refusals pass, and so does what went through no code of the family's package: that is no fault of it. Nor
    is a file that we could not read for it, or memory that there was not.

    Raises:
        BrokenPlugin: the family raised; names its class, the function, the line and what it raised, its `__cause__`.
    """
    try:
        yield
    except OpenInferError:
        raise
    except Exception as error:
        place = _place_in_family(definition, error)
        if place is None:
            raise
        logger.debug("the family's fault, as it was raised", exc_info=error)
        raised = f"{type(error).__name__}: {error}"
        raise BrokenPlugin(f"{described_family(definition)} failed in {place}: {raised}") from error


def described_family(definition: ModelDefinition[Any]) -> str:
    """`the family NAME (MODULE.CLASS)`."""
    return f"the family {definition.name} ({type(definition).__module__}.{type(definition).__qualname__})"


def _place_in_family(definition: ModelDefinition[Any], error: Exception) -> str | None:
    """`FUNCTION (FILE:LINE)`, the innermost one of the definition's package; None if that is not to blame."""
    package = type(definition).__module__.partition(".")[0]
    frames = list(traceback.walk_tb(error.__traceback__))
    own = [each for each in frames if str(each[0].f_globals.get("__name__")).partition(".")[0] == package]
    if not own or (isinstance(error, OSError | MemoryError) and own[-1] is not frames[-1]):
        return None
    frame, line = own[-1]
    return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{line})"

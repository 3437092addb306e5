"""For comparisons in one process: prompts with adapters as they were multiplied before `PromptShrink`."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def prompts_as_before() -> Iterator[None]:
    """Within it products of prompts are those of fewer tokens, with tiles of a launch ahead that make A x.

    What was made for a shape stays, as do steps that were captured: each way needs operators of its own.
    """
    from openinfer_kernels.cuda.lora.prompt_shrink import PromptShrink

    serves = PromptShrink.serves
    PromptShrink.serves = lambda *_: False
    try:
        yield
    finally:
        PromptShrink.serves = serves

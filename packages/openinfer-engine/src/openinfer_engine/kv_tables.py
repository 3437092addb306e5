"""Which block tables the sequences of an engine have: one, or several, so that windows give their blocks back.

Several tables keep less KV and cost every step a little; they need a scheduler that gives back what no token sees.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from openinfer_core import Plugin
from openinfer_core.scheduling import SchedulerCapabilities, SchedulerConfig
from openinfer_engine.options import EngineOptions
from openinfer_engine.scheduler.choice import declared_capabilities, make_scheduler, origin_of
from openinfer_kv_cache import KvSpec


@dataclass(frozen=True, slots=True)
class TableChoice:
    """What is laid out of a spec."""

    frees_windows: bool = True
    reason: str | None = None
    """Why a model whose layers have windows is given one table all the same."""
    windows: tuple[int, ...] = ()
    """The model's, ascending; of one without there is nothing to choose."""

    def of(self, spec: KvSpec) -> KvSpec:
        return spec if self.frees_windows else spec.without_windows()

    def described(self, table_windows: Sequence[int | None]) -> str | None:
        """In the log and the plan; None for a model without windows."""
        if not self.windows:
            return None
        if self.reason is not None:
            seen = " or ".join(f"{window:,}" for window in self.windows)
            return f"1 block table, which keeps the KV of all tokens; some layers see {seen} of them, but {self.reason}"
        counted = Counter(table_windows)
        kinds = [
            f"{count} of layers that see {'all' if window is None else f'the last {window:,}'} tokens"
            for window, count in counted.items()
        ]
        return f"{len(table_windows)} block table{'s' if len(table_windows) > 1 else ''}: {', '.join(kinds)}"


def choose_tables(
    spec: KvSpec, *, max_model_tokens: int, scheduler: Plugin, capabilities: Callable[[], SchedulerCapabilities]
) -> TableChoice:
    """`capabilities` makes a scheduler to ask it, and is called only where it decides."""
    windows = tuple(sorted({group.window_tokens for group in spec.paged if group.window_tokens is not None}))
    if not windows:
        return TableChoice()
    reason = None
    if spec.slots:
        reason = "the model has recurrent states, too, which begin where whole prefixes end"
    elif windows[0] >= max_model_tokens:
        reason = f"no context is longer than {max_model_tokens:,}"
    elif not capabilities().frees_windows:
        reason = f"the scheduler {origin_of(scheduler)} does not declare frees_windows"
    return TableChoice(frees_windows=reason is None, reason=reason, windows=windows)


def capabilities_of(
    scheduler: Plugin, policy: Plugin, options: EngineOptions, *, max_model_tokens: int
) -> SchedulerCapabilities:
    """Those of a scheduler that is made for one table and given up: they do not depend on its config.

    Raises:
        BrokenPlugin: it cannot be made. What declares nothing is named when the engine's own scheduler is made.
    """
    config = SchedulerConfig(
        num_blocks=-(-max_model_tokens // options.block_size_tokens),
        block_size_tokens=options.block_size_tokens,
        max_num_seqs=options.max_num_seqs,
        max_step_tokens=options.max_step_tokens,
        max_model_tokens=max_model_tokens,
        options=options.scheduler_options,
    )
    return declared_capabilities(make_scheduler(scheduler, policy, config, options)) or SchedulerCapabilities()

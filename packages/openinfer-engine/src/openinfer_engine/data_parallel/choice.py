"""What `--data-parallel-size` excludes, held against the options before anything is loaded."""

from typing import Any

from openinfer_core import Refused
from openinfer_engine.model import ModelDefinition
from openinfer_engine.options import EngineOptions


def check_data_parallel(definition: ModelDefinition[Any], config: Any, options: EngineOptions) -> None:
    """Raises `Refused` for a model that such ranks cannot share, and for what they cannot do so far."""
    if options.data_parallel_size == 1:
        return
    definition.check_data_parallel(config, options.data_parallel_size)
    excluded = {
        "--tensor-parallel-size": options.tensor_parallel_size > 1,
        "--kv-events": options.kv_events is not None,
        "--kv-transfer": options.kv_transfer is not None,
        "--speculative": options.speculation is not None,
        "--lora": bool(options.num_adapter_slots),
        "--kernel-providers": bool(options.kernel_providers),
        "--step-trace": options.step_trace is not None,
        "--enable-sleep": options.enable_sleep,
    }
    for option in (name for name, is_asked in excluded.items() if is_asked):
        raise Refused(f"--data-parallel-size and {option} exclude each other so far; leave one of them out")

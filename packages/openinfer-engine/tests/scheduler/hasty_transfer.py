"""A transfer for schedulers that are to be caught: it says too early that it is over."""

from openinfer_kv_cache import TierTransfer


class HastyTransfer:
    """A transfer as a scheduler takes it that does not look whether it is over: all is there at once."""

    def __init__(self, transfer: TierTransfer) -> None:
        self.num_blocks = self.completed_blocks = transfer.num_blocks
        self.begin_s = transfer.begin_s

    def is_over(self) -> bool:
        return True

    def cancel(self) -> None: ...

    def wait(self, timeout_s: float) -> None: ...

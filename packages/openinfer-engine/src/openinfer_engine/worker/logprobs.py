"""Log-probabilities of a step as events carry them, from the columns that `Ops.logprobs` gives."""

from collections.abc import Sequence
from dataclasses import dataclass

from openinfer_core import TokenLogprobs
from openinfer_kernels import HostArray


@dataclass(frozen=True, slots=True)
class HostLogprobs:
    """`openinfer_kernels.Logprobs` in host memory."""

    chosen: HostArray
    ranks: HostArray
    top_ids: HostArray
    top: HostArray

    def of_rows(self, rows: Sequence[int], tops: Sequence[int]) -> list[TokenLogprobs]:
        chosen, ranks = self.chosen.tolist(), self.ranks.tolist()
        return [
            TokenLogprobs(
                chosen[row], ranks[row], tuple(self.top_ids[row, :top].tolist()), tuple(self.top[row, :top].tolist())
            )
            for row, top in zip(rows, tops, strict=True)
        ]

"""One row per case: time, what it moved and computed, and its share of the roofline."""

from dataclasses import asdict, dataclass
from typing import Any, Self

from openinfer_bench.kernels.cases import Case

_FORMAT = "{:<28} {:>30} {:>10} {:>10} {:>10} {:>9} {:>9}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A measured case."""

    operator: str
    shape: str
    tokens: int
    time_us: float
    bytes: int
    flops: int
    floor_us: float
    """The larger of bytes over bandwidth and FLOPs over peak."""

    @classmethod
    def of(cls, case: Case, *, time_s: float, tbytes: float, tflops: float) -> Self:
        """A row for `case`, that took `time_s`."""
        return cls(
            operator=case.operator,
            shape=case.shape,
            tokens=case.tokens,
            time_us=time_s * 1e6,
            bytes=case.bytes,
            flops=case.flops,
            floor_us=max(case.bytes / tbytes, case.flops / tflops) * 1e-6,
        )

    @property
    def roofline(self) -> float:
        """Floor over time: 1 is as fast as the machine can."""
        return self.floor_us / self.time_us

    def as_json(self) -> dict[str, Any]:
        """All fields and the share of the roofline."""
        return asdict(self) | {"roofline": self.roofline}


def header() -> str:
    """The first line of the table."""
    return _FORMAT.format("operator", "shape", "us", "floor us", "roofline", "TB/s", "TFLOP/s")


def line(row: Row) -> str:
    """A row of the table."""
    return _FORMAT.format(
        row.operator,
        row.shape,
        f"{row.time_us:.2f}",
        f"{row.floor_us:.2f}",
        f"{row.roofline:.1%}",
        f"{row.bytes / row.time_us * 1e-6:.2f}",
        f"{row.flops / row.time_us * 1e-6:.1f}",
    )

"""The command: arguments, one measurement per case, the table, the JSON file. Importing it loads no CUDA library."""

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from openinfer_bench.kernels.cases import QWEN3_4B, cases
from openinfer_bench.kernels.expert_cases import SHAPES, expert_cases
from openinfer_bench.kernels.report import Row, header, line
from openinfer_bench.kernels.sparse_cases import sparse_cases
from openinfer_bench.kernels.variant_cases import SHAPES as VARIANT_SHAPES
from openinfer_bench.kernels.variant_cases import variant_cases
from openinfer_kernels.errors import DeviceUnavailableError

_TOKENS = (1, 8, 16, 32, 64, 128, 256, 1024, 8192)
_DESCRIPTION = (
    "The time of each CUDA operator at the shapes of Qwen3-4B, of Gemma and gpt-oss, of mixtures of experts and of "
    "DeepSeek-V4-Flash, and its share of the roofline: the larger of bytes over memory bandwidth and FLOPs over peak."
)


def run(argv: Sequence[str]) -> int:
    """Measures; 0, or 2 where this machine cannot run the CUDA operators."""
    options = _parse(argv)
    try:
        from openinfer_bench.kernels.timing import Timer
        from openinfer_kernels.cuda import CudaOps

        ops = CudaOps()
    except DeviceUnavailableError as reason:
        sys.stderr.write(f"openinfer bench kernels: {reason}\n")
        return 2
    timer = Timer(ops)
    rows: list[Row] = []
    limits = f"roofline {options.tbytes} TB/s and {options.tflops} TFLOP/s"
    shapes = "Qwen3-4B, Gemma, gpt-oss, experts of mixtures, DeepSeek-V4-Flash's windows"
    _say(f"{ops.device.name}, {shapes}, {limits}\n{header()}")
    dense = cases(QWEN3_4B, tokens=options.tokens, context=options.context)
    variants = variant_cases(VARIANT_SHAPES, tokens=options.tokens, context=options.context)
    mixtures = expert_cases(SHAPES, tokens=options.tokens)
    sparse = sparse_cases(tokens=options.tokens, context=options.context)
    for case in itertools.chain(dense, variants, mixtures, sparse):
        if options.operator and case.operator not in options.operator:
            continue
        row = Row.of(case, time_s=timer.time_s(case), tbytes=options.tbytes, tflops=options.tflops)
        rows.append(row)
        _say(line(row))
    if options.json is not None:
        report = {"gpu": ops.device.name, "model": "Qwen3-4B", "tbytes_per_s": options.tbytes, "tflops": options.tflops}
        options.json.write_text(
            json.dumps(report | {"rows": [row.as_json() for row in rows]}, indent=1) + "\n", "utf-8"
        )
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="openinfer bench kernels", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=_TOKENS,
        metavar="N",
        help="tokens of a step (default: 1 to 8192, nine sizes)",
    )
    parser.add_argument(
        "--context", type=int, default=1024, metavar="N", help="context of each decoding row (default: %(default)s)"
    )
    parser.add_argument("--operator", action="append", metavar="NAME", help="only this operator; may be repeated")
    parser.add_argument(
        "--tbytes",
        type=float,
        default=4.3,
        metavar="X",
        help="memory bandwidth of the roofline, TB/s (default: %(default)s)",
    )
    parser.add_argument(
        "--tflops",
        type=float,
        default=790.0,
        metavar="X",
        help="BF16 peak of the roofline, TFLOP/s (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    return parser.parse_args(argv)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()

"""Writes the tables of docs/reference/kernels.md from `openinfer_kernels.catalogue`.

tests/test_kernels_page.py fails where the page is older than the catalogue.

./run python tools/workspace/kernels_page.py
"""

from pathlib import Path

from openinfer_kernels.catalogue import SERVINGS, Serving
from openinfer_kernels.cubins import ARCHITECTURES

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/kernels.md"
BEGIN, END = "<!-- generated: tools/workspace/kernels_page.py -->\n", "<!-- end of what is generated -->\n"


def tables() -> str:
    """One table of what serves a model's operators, one of what serves the engine around it."""
    of_models = [each for each in SERVINGS if each.operators]
    around = [each for each in SERVINGS if not each.operators]
    lines = ["| operator | steps | GPUs | kernel | asks for | measured on one H200 |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {operators(each)} | {each.phase} | {gpus(each)} | {kernel(each)} | {each.when} | {measured(each)} |"
        for each in of_models
    ]
    lines += ["", "| around a model | kernel | asks for |", "|---|---|---|"]
    lines += [f"| {each.part} | {kernel(each)} | {each.when} |" for each in around]
    return "\n".join(lines) + "\n"


def operators(serving: Serving) -> str:
    return ", ".join(f"`{name}`" for name in serving.operators)


def gpus(serving: Serving) -> str:
    return ", ".join(serving.architectures) if len(serving.architectures) < len(ARCHITECTURES) else "all"


def kernel(serving: Serving) -> str:
    return f"`{serving.kernel}`" if serving.kernel.islower() else serving.kernel


def measured(serving: Serving) -> str:
    return f"{serving.measured} ([source](../../{serving.source}))" if serving.measured else ""


def with_tables(page: str) -> str:
    """The page with its tables as the catalogue has them now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + tables() + END + after


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

"""`openinfer kernels build` compiles the CUDA kernels ahead of the first start; `list` says which serves what.

    openinfer kernels build                        for this machine's GPU
    openinfer kernels build --arch sm_80 sm_90a    for GPUs of other machines; `--arch all` for every one supported
    openinfer kernels list --arch sm_90a

Only what neither the wheel nor the cache has is compiled, with nvcc where there is one, else NVRTC.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points

from openinfer_kernels.catalogue import WITHOUT_GPU_KERNEL, measured_by_part, servings
from openinfer_kernels.cubins import ARCHITECTURES, find_cubins, require_cubins, sources
from openinfer_kernels.errors import DeviceUnavailableError, KernelsError

OPENINFER_CONTRACT = 1

_ALL = "all"


def run(argv: Sequence[str]) -> int:
    """Runs a subcommand; 2 for what the user can mend."""
    parser = argparse.ArgumentParser(
        prog="openinfer kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("action", choices=("build", "list"))
    parser.add_argument(
        "--arch",
        nargs="+",
        choices=(*ARCHITECTURES, _ALL),
        metavar="ARCH",
        help=f"{', '.join(ARCHITECTURES)} or {_ALL} (default: this machine's GPU)",
    )
    options = parser.parse_args(argv)
    try:
        architectures = _architectures(options.arch)
        for architecture in architectures:
            if options.action == "build":
                _build(architecture)
            else:
                _list(architecture)
    except KernelsError as error:
        sys.stderr.write(f"openinfer kernels {options.action}: {error}\n")
        return 2
    return 0


def _architectures(asked: Sequence[str] | None) -> Sequence[str]:
    if asked is None:
        return [_this_gpu()]
    return ARCHITECTURES if _ALL in asked else list(dict.fromkeys(asked))


def _this_gpu() -> str:
    try:
        from openinfer_kernels.cuda.common.device import gpu_architecture

        return gpu_architecture()
    except DeviceUnavailableError as reason:
        raise DeviceUnavailableError(f"{reason}; or name a GPU with --arch, as in --arch sm_90a") from reason


def _build(architecture: str) -> None:
    before = find_cubins(architecture)
    missing = [source.stem for source in sources(architecture) if source.stem not in before]
    found = require_cubins(architecture)
    places = sorted({str(path.parent) for path in found.values()})
    compiled = f"{len(missing)} compiled now" if missing else "none had to be compiled"
    _say(f"{architecture}: {len(found)} sources, {len(before)} found, {compiled}; in {', '.join(places)}")


def _list(architecture: str) -> None:
    compiled = find_cubins(architecture)
    _say(f"{architecture}\n  {'part':18} {'phase':8} {'kernel':26} {'compiled':9} operators")
    stems = {source.stem for source in sources(architecture)}
    for each in servings(architecture):
        state = "-" if each.kernel not in stems else "yes" if each.kernel in compiled else "no"
        when = f" [{each.when}]" if each.when else ""
        _say(f"  {each.part:18} {each.phase:8} {each.kernel:26} {state:9} {', '.join(each.operators) or '-'}{when}")
    _say(f"\n  on the CPU alone so far: {', '.join(WITHOUT_GPU_KERNEL) or 'none'}")
    _say("\n  measured")
    for part, text in measured_by_part(architecture).items():
        _say(f"  {part:18} {text}")
    providers = sorted(entry_points(group="openinfer.kernel_providers"), key=lambda point: point.name)
    names = [f"{each.name} ({each.dist.name} {each.dist.version})" if each.dist else each.name for each in providers]
    _say(f"\n  kernel providers of other packages: {', '.join(names) or 'none installed'}")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")

"""`openinfer plan`: what would serve a model, before anything is loaded; writes and checks lock files.

openinfer plan --model DIR --lock FILE
openinfer plan --config config.json --gpu h100-80g --gpus 8     needs neither the weights nor the GPUs
"""

import argparse
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import msgspec

from openinfer.commands.config_alone import config_as_model
from openinfer.commands.model_arguments import ModelArguments, parse
from openinfer.flags import add_flags, read_flags
from openinfer.models import checkpoint_distributions
from openinfer_core import FamilyPlan, InvalidRequest, RankLedger
from openinfer_core.contracts.installed import (
    LockDiffers,
    LockedDistribution,
    distribution_differences,
    lock_distributions,
)
from openinfer_core.family import PlansForGpu
from openinfer_server.options import ServerOptions

LOCK_FORMAT = 2
_DESCRIPTION = "Prints what would serve a model: packages, kernels, memory. Loads nothing."
_MOST_GPUS = 1024
# the server's options that choose a part
_SERVER_PARTS = frozenset(("tool_parser", "reasoning_parser", "sampling_defaults", "endpoints"))


class Composition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A resolved composition, as a lock file holds it."""

    format: int = LOCK_FORMAT
    model: str
    model_type: str
    parts: dict[str, str]
    kernels: dict[str, str]
    memory_bytes: dict[str, int]
    limits: dict[str, int]
    distributions: dict[str, LockedDistribution] = {}


def run(argv: Sequence[str]) -> int:
    """Prints the composition; with `--lock` also writes it."""
    with config_as_model(argv) as rest:
        return _run(rest)


def _run(argv: Sequence[str]) -> int:
    arguments = parse(argv, command="plan", description=_DESCRIPTION, configure=configure)
    if arguments.namespace.lock is not None:
        check_writable(Path(arguments.namespace.lock), field="lock")
    plan = _family_plan(arguments)
    server = read_flags(arguments.namespace, ServerOptions)
    composition = _composition(arguments, plan, server)
    if arguments.namespace.json or arguments.namespace.lock is not None:
        composition = _with_distributions(composition, arguments, plan, server)
    if arguments.namespace.json:
        print(msgspec.json.format(msgspec.json.encode(composition)).decode())
    else:
        print(_table(composition, plan.measured))
        print(_ranks_table(plan.by_ranks))
    if arguments.namespace.lock is not None:
        Path(arguments.namespace.lock).write_bytes(msgspec.json.format(msgspec.json.encode(composition)) + b"\n")
    return 0


def _family_plan(arguments: ModelArguments) -> FamilyPlan:
    gpu, gpus, family = arguments.namespace.gpu, arguments.namespace.gpus, arguments.family
    if gpu is None:
        if gpus is not None:
            raise InvalidRequest("--gpus needs --gpu NAME: for GPUs of this machine there is --tensor-parallel-size")
        return family.plan(arguments.model_dir, arguments.options)
    if not isinstance(family, PlansForGpu):
        raise InvalidRequest(f"--gpu: the family {family.name} ({arguments.plugin.origin}) plans for this machine only")
    options = arguments.options
    if gpus is not None:
        if not 1 <= gpus <= _MOST_GPUS:
            raise InvalidRequest(f"--gpus is {gpus}; it must be in 1 .. {_MOST_GPUS}", field="gpus")
        options = msgspec.structs.replace(options, tensor_parallel_size=gpus)
    return family.plan_for_gpu(arguments.model_dir, options, gpu=gpu)


def check_writable(path: Path, *, field: str) -> None:
    """Raises `InvalidRequest` for a file that cannot be written later; an absent one is made, empty."""
    try:
        path.open("ab").close()
    except OSError as error:
        raise InvalidRequest(f"--{field} {path} cannot be written: {error.strerror}", field=field) from error


def resolve(arguments: ModelArguments, server: ServerOptions) -> Composition:
    """What `serve` would start, every file of its distributions read; raises as `plan` and `lock_distributions`."""
    plan = arguments.family.plan(arguments.model_dir, arguments.options)
    return _with_distributions(_composition(arguments, plan, server), arguments, plan, server)


def _with_distributions(
    composition: Composition, arguments: ModelArguments, plan: FamilyPlan, server: ServerOptions
) -> Composition:
    from openinfer_server.plan_parts import frontend_distributions

    names = {"openinfer", *plan.distributions, *checkpoint_distributions(arguments.namespace.model)}
    names |= frontend_distributions(arguments.model_dir, arguments.family.name, server)
    if arguments.plugin.distribution is not None:
        names.add(arguments.plugin.distribution)
    return msgspec.structs.replace(composition, distributions=lock_distributions(names))


def _composition(arguments: ModelArguments, plan: FamilyPlan, server: ServerOptions) -> Composition:
    from openinfer_server.plan_parts import check_frontend_parts, frontend_parts  # not before an engine starts

    check_frontend_parts(arguments.model_dir, arguments.family.name, server)
    parts = {
        "openinfer": f"openinfer {version('openinfer')}",
        "contract": f"openinfer-core {version('openinfer-core')}",
        "family": f"{arguments.family.name} ({arguments.plugin.origin})",
        "server": f"openinfer-server {version('openinfer-server')}",
        **frontend_parts(arguments.model_dir, arguments.family.name, server),
        **plan.parts,
    }
    return Composition(
        model=arguments.model_name,
        model_type=plan.model_type,
        parts=parts,
        kernels=plan.kernels,
        memory_bytes=plan.memory_bytes,
        limits=plan.limits,
    )


def check_lock(path: Path, composition: Composition) -> None:
    """Raises `LockDiffers` with every difference, or `InvalidRequest` if the file is no lock file of this format."""
    try:
        locked = msgspec.json.decode(path.read_bytes(), type=Composition)
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"--locked {path}: {error}", field="locked") from error
    if locked.format != LOCK_FORMAT:
        raise InvalidRequest(
            f"--locked {path} has format {locked.format}, and this release reads {LOCK_FORMAT}: write it again with "
            "openinfer plan --lock",
            field="locked",
        )
    before, after = _leaves(_without_files(locked)), _leaves(_without_files(composition))
    differences = [
        f"{name} is {after.get(name)!r}, locked {before.get(name)!r}"
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    ]
    differences += distribution_differences(locked.distributions, composition.distributions)
    if differences:
        raise LockDiffers(f"the composition differs from {path}: " + "; ".join(differences))


def _without_files(composition: Composition) -> Any:
    return msgspec.to_builtins(msgspec.structs.replace(composition, distributions={}))


def _leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    found: dict[str, Any] = {}
    for name, branch in cast("dict[str, Any]", tree).items():
        found |= _leaves(branch, f"{prefix}.{name}" if prefix else name)
    return found


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command itself."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--config", metavar="FILE", help="a config.json alone, in place of --model; needs --gpu")
    parser.add_argument("--gpu", metavar="NAME", help="plan for such a GPU, which need not be here: h100-80g")
    parser.add_argument("--gpus", metavar="N", type=int, help="so many of them (default: --tensor-parallel-size)")
    parser.add_argument("--lock", metavar="FILE", help="also write the composition to FILE, for serve --locked")
    others = frozenset(ServerOptions.__struct_fields__) - _SERVER_PARTS
    add_flags(parser, ServerOptions, skip=others)


def _table(composition: Composition, measured: dict[str, str]) -> str:
    lines = [f"model       {composition.model} ({composition.model_type})"]
    for title, rows in (("parts", composition.parts), ("kernels", composition.kernels), ("measured", measured)):
        if not rows:
            continue
        lines += ["", title, *(f"  {name:22} {value}" for name, value in rows.items())]
    lines += ["", "memory", *(f"  {name:22} {_size(size):>12}" for name, size in composition.memory_bytes.items())]
    lines.append(f"  {'total':22} {_size(sum(composition.memory_bytes.values())):>12}")
    lines += ["", "limits", *(f"  {name:22} {value:>12,}" for name, value in composition.limits.items())]
    return "\n".join(lines)


def _ranks_table(ledgers: Sequence[RankLedger]) -> str:
    lines = ["", "one rank of     weights   workspaces     KV cache        KV tokens"]
    for ledger in ledgers:
        sizes = (ledger.weights_bytes, ledger.workspace_bytes, ledger.kv_cache_bytes)
        cells = "".join(f"{_size(size) if size else '-':>13}" for size in sizes)
        lines.append(f"  {ledger.ranks:>8} {cells}   {ledger.kv_cache_tokens:>16,}")
        if ledger.refusal is not None:
            lines.append(f"           not possible: {ledger.refusal}")
    return "\n".join(lines)


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.1f} {unit}" if unit != "B" else f"{num_bytes} B"
        size /= 1024
    return f"{size:.2f} GiB"

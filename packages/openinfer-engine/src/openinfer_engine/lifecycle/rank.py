"""`ReloadableWorker`: a rank whose model can be dropped and read again."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from openinfer_core import InvalidCheckpoint, OpenInferError, Refused, read_config
from openinfer_core.scheduling import StepPlan
from openinfer_engine.drafting import SharedDrafter
from openinfer_engine.engine_plan import EnginePlan
from openinfer_engine.gguf.file import GGUF_FILE
from openinfer_engine.guard.family_faults import described_family
from openinfer_engine.kv_tiers.pool import PoolMemory
from openinfer_engine.lifecycle.device_tensors import DeviceTensors
from openinfer_engine.lifecycle.folders import file_below
from openinfer_engine.lifecycle.memory import settle
from openinfer_engine.lifecycle.orders import (
    CloseWeights,
    DropWeights,
    GiveBack,
    KeepWeights,
    LoadWeights,
    OpenWeights,
    TakeBack,
    WeightsOrder,
    WeightsSource,
)
from openinfer_engine.lora.rank_adapters import RankAdapters
from openinfer_engine.model import Model
from openinfer_engine.weights.checkpoint import Checkpoint
from openinfer_engine.weights.copied_file import CopiedSafetensorsFile
from openinfer_engine.weights.stored_config import check_stored
from openinfer_engine.worker.runner import PendingStep, Worker


@runtime_checkable
class HoldsModel(Protocol):
    """A `Worker` whose model can be taken out between two steps."""

    @property
    def keeps_drafter(self) -> bool:
        """Whether it goes on with its drafter when it gets another model: graphs hold what that drafter has made."""
        ...

    def drop_model(self) -> None:
        """Lets go of the model, and of a drafter that it does not keep; no step before `put_model`."""
        ...

    def put_model(self, model: Model, drafter: SharedDrafter | None) -> None:
        """Steps use these from now on; sequences begin anew. No drafter where it `keeps_drafter`."""
        ...

    def keep_weights(self) -> None:
        """Copies the weights into memory of the host; `Refused` where they are there anyway, or do not fit."""
        ...

    def give_back(self) -> None:
        """Gives back the memory of KV and states, and on a device that of weights; no step before `take_back`."""
        ...

    def take_back(self) -> None:
        """Takes it again, KV and states zero, weights as they were kept; `Refused` if others hold it."""
        ...


class ReloadableWorker:
    """A rank, and how its weights are read again.

    Args:
        worker: the rank, which is asked for everything else.
        engine_plan: of the engine.
        read: makes the model and the drafter of this rank of what is open.
    """

    def __init__(
        self,
        worker: Worker,
        holder: HoldsModel,
        engine_plan: EnginePlan,
        read: "Callable[[OpenedWeights], tuple[Model, SharedDrafter | None]]",
    ) -> None:
        self._worker = worker
        self._holder = holder
        self._plan = engine_plan
        self._read = read
        self._open: OpenedWeights | None = None

    def launch(self, plan: StepPlan) -> PendingStep:
        try:
            return self._worker.launch(plan)
        except Exception as error:  # which ends the engine, and its log shall say whose model it was
            error.add_note(f"raised in a step of {described_family(self._plan.definition)}")
            raise

    @property
    def adapters(self) -> RankAdapters | None:
        return self._worker.adapters

    def pool_memory(self) -> PoolMemory:
        return self._worker.pool_memory()

    def fence(self) -> Callable[[], None]:
        return self._worker.fence()

    def close(self) -> None:
        self._close_weights()
        self._worker.close()

    def obey(self, order: WeightsOrder) -> None:
        match order:
            case OpenWeights(source=source):
                self._close_weights()
                self._open = open_weights(self._plan, source)
            case DropWeights():
                self._holder.drop_model()
                if self.adapters is not None:
                    self.adapters.arena.drop_weights()
                settle()
            case KeepWeights():
                self._holder.keep_weights()
            case GiveBack():
                self._holder.give_back()
                settle()
            case TakeBack():
                self._holder.take_back()
            case LoadWeights():
                self._load()
            case CloseWeights():
                self._close_weights()

    def _load(self) -> None:
        if self._open is None:
            raise InvalidCheckpoint("no weights are open")
        model, drafter = self._read(self._open)
        self._open.check_unwritten()
        self._holder.put_model(model, drafter)
        settle()

    def _close_weights(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.close()


@dataclass(slots=True)
class OpenedWeights:
    """Weights that fit an engine, not read yet."""

    checkpoint: Checkpoint | None  # None for random numbers
    folder: Path | None
    drafter: Checkpoint | None = None
    """Of a folder of the drafter's own that an update named."""
    drafter_folder: Path | None = None
    files: list[CopiedSafetensorsFile | DeviceTensors] = field(
        default_factory=list[CopiedSafetensorsFile | DeviceTensors]
    )

    def check_unwritten(self) -> None:
        """Raises `InvalidCheckpoint` if a file was written to since it was opened: what was read may be of two."""
        for file in self.files:
            file.check_unwritten()

    def close(self) -> None:
        for checkpoint in (self.checkpoint, self.drafter):
            if checkpoint is not None:
                checkpoint.close()
        for file in self.files:
            file.close()


def open_weights(engine_plan: EnginePlan, source: WeightsSource) -> OpenedWeights:
    """Opens weights and checks them against the model that runs; no byte of a tensor is read.

    Raises:
        InvalidCheckpoint: files are missing or damaged, or tensors are, or have other names, shapes or dtypes.
        Refused: the folder's `config.json` is that of another model, or a file is out of bounds.
    """
    opened = OpenedWeights(None, None if source.folder is None else Path(source.folder))
    try:
        if source.segments:
            opened.files += map(CopiedSafetensorsFile.open_segment, source.segments)
            opened.checkpoint = Checkpoint(opened.files)
        elif source.tensors:
            opened.files.append(DeviceTensors(source.tensors, engine_plan.backend.open_foreign))
            opened.checkpoint = Checkpoint(opened.files)
        elif opened.folder is not None:
            opened.checkpoint = _open_folder(engine_plan, source, opened)
        if opened.checkpoint is not None:
            _check(engine_plan, source, opened.checkpoint)
        _open_drafter(engine_plan, source, opened)
    except BaseException:
        opened.close()
        raise
    return opened


def _open_folder(engine_plan: EnginePlan, source: WeightsSource, opened: OpenedWeights) -> Checkpoint:
    folder = Path(str(source.folder))
    if source.root is not None and (folder / GGUF_FILE).exists():
        raise InvalidCheckpoint(f"{folder} has a GGUF file; weights are replaced by those of safetensors alone")

    def open_file(path: Path) -> CopiedSafetensorsFile:
        opened.files.append(file := CopiedSafetensorsFile.open(file_below(source.root, path)))
        return file

    return Checkpoint.open(folder, keeps_gguf=engine_plan.options.keeps_gguf, open_file=open_file)


def _open_drafter(engine_plan: EnginePlan, source: WeightsSource, opened: OpenedWeights) -> None:
    """Opens the drafter's own folder, if an update has named one, and checks its tensors, or those of its layers."""
    asked = None if engine_plan.drafter is None else engine_plan.drafter.asked
    if source.drafter_folder is None:
        if asked is not None and opened.checkpoint is not None and asked.is_in(opened.checkpoint):
            asked.check_tensors(opened.checkpoint, source.described)
        return
    if asked is None or asked.drafter_dir is None:
        raise Refused("drafter_path: this engine has no drafter with a folder of its own")
    folder = opened.drafter_folder = Path(source.drafter_folder)
    if read_config(folder) != read_config(asked.drafter_dir):
        raise InvalidCheckpoint(f"{folder}: its config.json is not that of the drafter that runs")

    def open_file(path: Path) -> CopiedSafetensorsFile:
        opened.files.append(file := CopiedSafetensorsFile.open(file_below(source.drafter_root, path)))
        return file

    opened.drafter = Checkpoint.open(folder, open_file=open_file)
    asked.check_tensors(opened.drafter, str(folder))


def _check(engine_plan: EnginePlan, source: WeightsSource, checkpoint: Checkpoint) -> None:
    """Tensors against the model's, and all that shapes the model against what runs."""
    definition = engine_plan.definition
    config = definition.parse(read_config(_config_folder(engine_plan, source)))
    if check_stored(definition, config, checkpoint) != engine_plan.config:
        raise InvalidCheckpoint(
            f"{source.described}: config.json, or the formats that tensors are stored in, are not those of the model "
            "that runs; start an engine with it"
        )


def _config_folder(engine_plan: EnginePlan, source: WeightsSource) -> Path:
    """The folder's own `config.json` counts, where it has one."""
    if source.folder is not None and (own := Path(source.folder, "config.json")).exists():
        file_below(source.root, own)
        return own.parent
    return engine_plan.model_dir


def said(error: BaseException) -> str:
    """What a rank says of an error, to people."""
    return str(error) if isinstance(error, OpenInferError) else f"{type(error).__name__}: {error}"

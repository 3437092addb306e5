"""`EngineOptions`: everything a user may set about an engine. Field names are the command's flags."""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType

import msgspec

from openinfer_core import InvalidRequest
from openinfer_core.scheduler_options import parse_scheduler_options
from openinfer_core.scheduling import MAX_ADAPTERS
from openinfer_engine.kv_events.setting import parse_kv_events
from openinfer_engine.lora.setting import DEFAULT_MAX_LORAS, MAX_RANK, parse_adapters
from openinfer_engine.speculation.setting import OFF, Speculation, parse_speculative

DEFAULT_QUEUE_POLICY = "fair-share"


class LoadFormat(StrEnum):
    """Where weights come from."""

    SAFETENSORS = "safetensors"
    """The model folder."""
    DUMMY = "dummy"
    """Random numbers of the right shapes: for sizing and speed. The folder needs no weights."""


class GgufWeights(StrEnum):
    """What becomes of the quantised matrices of a GGUF file."""

    AUTO = "auto"
    """Stored on a GPU, dequantised on a CPU, where products of codes take longer."""
    STORED = "stored"
    """Q8_0, Q4_0 and Q4_1 stay as they are; other types are dequantised."""
    DEQUANTISED = "dequantised"
    """All are dequantised when they are loaded."""


class LoopHost(StrEnum):
    """Where the step loop runs."""

    PROCESS = "process"
    """In a process of its own: it shares no interpreter lock with the frontend."""
    THREAD = "thread"
    """In a thread of the caller's process."""


class DeviceKind(StrEnum):
    """What computes."""

    CPU = "cpu"
    """NumPy, float32."""
    CUDA = "cuda"
    """An NVIDIA GPU, BF16; needs the extra cuda13 or cuda12 of openinfer-kernels."""


class KvCacheDtype(StrEnum):
    """What keys and values are kept in."""

    AUTO = "auto"
    """What the device computes in, whatever a checkpoint says of its KV cache."""
    BF16 = "bf16"
    """BF16, on a GPU: what auto is there."""
    FP8 = "fp8"
    """E4M3 with a float32 scale for each token and head, made as they are written: about half the bytes."""


THREAD_RANKS = "thread"
"""In place of a rank host: ranks are threads of the engine's process."""


class LowBitActivations(StrEnum):
    """Which steps multiply activations in the few bits of quantised weights."""

    OFF = "off"
    """None: only weights are quantised."""
    PREFILL = "prefill"
    """Those with much of a prompt (W8A8)."""


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user may set about an engine; a family may extend it by inheritance.

    Raises:
        InvalidRequest: a value is out of range; `field` names it.
    """

    device: DeviceKind = DeviceKind.CPU
    """What computes."""
    batch_invariant: bool = False
    """Whether a request gets the same log-probabilities, bit for bit, whatever else is in the batch, however its prompt
    is cut into chunks and whatever of it was cached; slower, see docs/reference/kernels.md."""
    cuda_graph: bool = True
    """Whether decode steps on a GPU are captured and replayed; false is for debugging."""
    gpu_memory_fraction: float = 0.9
    """Share of a GPU's memory that weights, KV cache and workspaces may take together."""
    max_model_tokens: int | None = None
    """Longest context, prompt and completion together; by default the model's own, or what the KV pool holds."""
    max_num_seqs: int = 256
    """Sequences that run at a time at most."""
    max_step_tokens: int = 4096
    """Token budget of one step: decode rows and prompt chunks together; less where prompts would take over 150 ms."""
    max_itl_ms: int | None = None
    """Milliseconds that a step with decode rows should take at most: prompts wait, or come in smaller chunks, so that
    the next tokens of other requests do not wait. By default prompts get the whole token budget."""
    max_waiting: int = 4096
    """Requests that wait at most; more are refused as overloaded."""
    block_size_tokens: int = 16
    """Tokens per KV block."""
    kv_cache_bytes: int | None = None
    """Bytes of KV cache over all ranks; by default what is left of --gpu-memory-fraction on a GPU, and on a CPU 1 GiB,
    or what --max-num-seqs full sequences need if that is less."""
    num_blocks: int | None = None
    """KV blocks, instead of --kv-cache-bytes."""
    kv_cache_dtype: KvCacheDtype = KvCacheDtype.AUTO
    """What keys and values are kept in: auto (what the device computes in), bf16 (on a GPU), or fp8: E4M3 with a scale
    for each token and head, of half the bytes and a little less exact. Families whose operators do not read it refuse
    fp8; see docs/reference/kv-cache-dtype.md."""
    prefix_cache: bool = True
    """Whether requests share the KV of equal prompt prefixes."""
    kv_events: str | None = None
    """Where routers hear which prefixes are cached: a port of loopback, or an endpoint and fields, as in
    tcp://*:5557,replay=tcp://*:5558,topic=kv@POD@MODEL; see docs/reference/kv-events.md. Messages carry token ids and
    cache salts, to every subscriber."""
    state_snapshot_bytes: int = 1 << 30
    """Bytes over all ranks for copies of recurrent states at prefix boundaries, for models that have such states: these
    share a prefix only where a copy is kept."""
    kv_tier: list[str] = []
    """A place that keeps KV blocks which leave the cache, NAME=SETTING with a NAME of the group openinfer.kv_tiers:
    host=64GiB, or disk=/var/cache/kv,500GiB. Repeat the flag for several, fastest first. Each rank opens its own,
    with its number in the place of {rank}; see docs/reference/kv-tiers.md."""
    kv_key_file: str | None = None
    """File of 16 to 64 secret bytes that blocks are named with, in KV tiers and in KV events: the same for all engines
    that share a tier, and for replicas whose equal blocks a router is to know by one hash. By default a disk tier keeps
    one beside its blocks."""
    kv_load_timeout_ms: int = 1000
    """Milliseconds after which the rest of a prefix that comes from KV tiers is computed instead, for each 2,048 blocks
    of it that are begun."""
    kv_transfer: str | None = None
    """Name of the tier of --kv-tier that other engines read, or write: valkey, s3 or disk. Requests may then leave the
    KV of their prompt there for another engine, and begin on what another one has left, as kv_transfer_params say; see
    docs/reference/prefill-and-decode-apart.md."""
    kv_handover_timeout_ms: int = 2000
    """Milliseconds that an answer waits at most until its prompt's KV is stored for another engine, and a second more
    for each 64 MiB of it; then it says how much has."""
    scheduler: str = "token-budget"
    """Name in the group openinfer.schedulers."""
    scheduler_option: list[str] = []
    """An option of the scheduler's own, NAME=VALUE; repeat the flag for several. A scheduler refuses those that it does
    not know."""
    queue_policy: str | None = None
    """Name in the group openinfer.queue_policies; by default fair-share: tenants, or addresses of clients without keys,
    share tokens, and one alone is served in order of arrival, as with fcfs. A scheduler that declares a policy of its
    own takes none."""
    starvation_timeout_s: int = 300
    """Seconds after which a request that the scheduler could have run, and did not, ends with an error that names the
    scheduler."""
    tenant_weights: dict[str, float] = {}
    """Shares per tenant for the fair-share policy: gold=4,free=1."""
    speculative: str = OFF
    """What proposes tokens that a step verifies, so that it may yield several of a sequence: off, auto, or a name of
    the group openinfer.drafters with options, as in ngram,k=6 (k: drafts of a sequence in one step, by default 4).
    What is sampled is the same with and without; see docs/reference/speculative-decoding.md."""
    lora: list[str] = []
    """A LoRA adapter that is loaded at the start, NAME=DIR with a folder in PEFT's layout; repeat the flag for several.
    Clients choose one by its name in the field model; see docs/reference/lora.md."""
    lora_root: str | None = None
    """Folder below which adapters may be loaded while the engine runs; by default none may."""
    max_loras: int = 0
    """Adapters that requests of one step may use at most: each slot takes memory of the device. By default as many as
    --lora names, 4 at most; with --lora-root alone 1, and without both none."""
    max_lora_rank: int = 16
    """Largest rank of an adapter, 512 at most; a slot has room for it, rounded up to a multiple of 8."""
    lora_cache_bytes: int = 4 << 30
    """Host memory for adapters, over all ranks; those used longest ago are dropped first, and read again when a request
    needs them."""
    kernel_providers: dict[str, str] = {}
    """Operators of other packages: rms_norm=NAME, each NAME in the group openinfer.kernel_providers."""
    grammar_compiler: str = "auto"
    """What compiles the grammars of structured output: a name in the group openinfer.grammar_compilers, auto (which is
    llguidance where it is installed, by the extra structured) or none."""
    low_bit_activations: LowBitActivations = LowBitActivations.OFF
    """Whether prompts are multiplied in FP8 or INT8, as the weights are stored (W8A8): faster, and less exact; see
    docs/reference/weight-formats.md. Decoding never is."""
    fp8_head: bool = False
    """Whether the output head is quantised to FP8 when it is loaded: half of its bytes are read for each token."""
    load_format: LoadFormat = LoadFormat.SAFETENSORS
    """Where weights come from."""
    weights_root: str | None = None
    """Folder below which those lie that weights may be updated from while the engine runs (POST /update_weights), links
    resolved; without one, none may be named. See docs/reference/weight-updates.md."""
    enable_sleep: bool = False
    """Whether an engine on a GPU can sleep and change its weights (POST /sleep, /update_weights): weights, KV cache and
    graphs' scratch then lie at addresses that stay while the memory is given back. On a CPU every engine can. See
    docs/reference/weight-updates.md."""
    gguf_weights: GgufWeights = GgufWeights.AUTO
    """Whether matrices of a GGUF file in Q8_0, Q4_0 and Q4_1 stay quantised (stored), which takes a half to an eighth
    of the memory, or are dequantised when they are loaded; auto is stored on a GPU and dequantised on a CPU."""
    tensor_parallel_size: int = 1
    """Ranks that share each layer."""
    data_parallel_size: int = 1
    """Ranks with whole attention, sequences, KV pool and tiers of their own, that share the experts of a mixture
    (DeepSeek, Kimi). --max-num-seqs, --max-step-tokens, --num-blocks and --kv-tier are then of each.
    See docs/reference/parallel.md."""
    rank_host: str | None = None
    """Where ranks other than the first run, NAME or NAME=SETTING: thread (of the engine's process, on a CPU), or a name
    in the group openinfer.rank_hosts: process (of this machine), or join=HOST:PORT,token-file=FILE,local=N, where the
    ranks of other nodes come with `openinfer rank`; see docs/reference/parallel.md. By default thread on a CPU and
    process on GPUs."""
    rank_timeout_s: int = 8
    """Seconds of silence after which a rank counts as dead, and ranks count the engine so."""
    engine_host: LoopHost = LoopHost.PROCESS
    """Where the step loop runs."""
    trace: str | None = None
    """Path of a trace of the run (Perfetto, chrome://tracing), written when the engine closes."""
    step_trace: str | None = None
    """Path of a trace of every step's plan, without prompts and answers, from which `openinfer simulate replay` repeats
    the run; not with KV tiers or a drafter, whose answers it does not have."""

    @property
    def scheduler_options(self) -> dict[str, str]:
        return parse_scheduler_options(self.scheduler_option, field="scheduler_option")

    @property
    def speculation(self) -> Speculation | None:
        """None: off."""
        return parse_speculative(self.speculative)

    @property
    def adapters(self) -> dict[str, str]:
        """Those that are loaded at the start: name -> folder."""
        return parse_adapters(self.lora)

    @property
    def num_adapter_slots(self) -> int:
        """Adapters that requests of one step may use; 0: none are served."""
        if self.max_loras:
            return self.max_loras
        return min(len(self.lora), DEFAULT_MAX_LORAS) or (1 if self.lora_root is not None else 0)

    @property
    def keeps_gguf(self) -> bool:
        """Whether matrices of a GGUF file stay quantised."""
        if self.gguf_weights is GgufWeights.AUTO:
            return self.device is DeviceKind.CUDA
        return self.gguf_weights is GgufWeights.STORED

    @property
    def num_ranks(self) -> int:
        """Of the engine, each with a device of its own, or a part of one."""
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def num_rank_processes(self) -> int:
        """Ranks that have a process of their own."""
        are_threads = self.rank_host == THREAD_RANKS or (self.rank_host is None and self.device is not DeviceKind.CUDA)
        return 0 if are_threads else self.num_ranks - 1

    def __post_init__(self) -> None:
        self._check_kinds()
        _check("max_model_tokens", self.max_model_tokens, 1, 2**24)
        _check("max_num_seqs", self.max_num_seqs, 1, 2**16)
        _check("max_step_tokens", self.max_step_tokens, 1, 2**24)
        _check("max_itl_ms", self.max_itl_ms, 1, 60_000)
        _check("max_waiting", self.max_waiting, 1, 2**24)
        _check("block_size_tokens", self.block_size_tokens, 1, 2**12)
        _check("kv_cache_bytes", self.kv_cache_bytes, 1, 2**48)
        _check("state_snapshot_bytes", self.state_snapshot_bytes, 0, 2**48)
        _check("num_blocks", self.num_blocks, 1, 2**31 - 1)
        _check("kv_load_timeout_ms", self.kv_load_timeout_ms, 1, 600_000)
        _check("kv_handover_timeout_ms", self.kv_handover_timeout_ms, 1, 600_000)
        _check("starvation_timeout_s", self.starvation_timeout_s, 1, 86_400)
        _check("tensor_parallel_size", self.tensor_parallel_size, 1, 64)
        _check("data_parallel_size", self.data_parallel_size, 1, 64)
        _check("rank_timeout_s", self.rank_timeout_s, 1, 3600)
        self._check_adapters()
        if not 0.05 <= self.gpu_memory_fraction <= 1:
            raise InvalidRequest(
                f"gpu_memory_fraction is {self.gpu_memory_fraction}; it must be between 0.05 and 1",
                field="gpu_memory_fraction",
            )
        if self.batch_invariant and self.kernel_providers:
            raise InvalidRequest(
                f"batch_invariant is kept by our own operators; {', '.join(sorted(self.kernel_providers))} would be "
                "another package's, which does not promise it: give one of the two options",
                field="kernel_providers",
            )
        if self.batch_invariant:
            self._check_not_low_bit()
        if self.kv_cache_bytes is not None and self.num_blocks is not None:
            raise InvalidRequest("kv_cache_bytes and num_blocks say the same thing; give one", field="num_blocks")
        _check_speculative(self.speculative)
        parse_scheduler_options(self.scheduler_option, field="scheduler_option")
        _check_folder("weights_root", self.weights_root)
        if self.kv_events is not None:
            _check_kv_events(self.kv_events, prefix_cache=self.prefix_cache)
        if self.step_trace is not None and (self.kv_tier or self.speculation is not None):
            raise InvalidRequest(
                "step_trace has not what KV tiers and drafters answer, so the run could not be repeated; leave it out, "
                "or them",
                field="step_trace",
            )
        self._check_tiers()

    def _check_kinds(self) -> None:
        """A string in the place of one of these would be compared by identity, and so be none of them in silence."""
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise InvalidRequest(f"{name} is {value!r}; it must be a {kind.__name__}, not its text", field=name)

    def _check_tiers(self) -> None:
        if self.kv_transfer is not None:
            _check_transfer(self.kv_transfer, self.kv_tier)
        if self.kv_tier and not self.prefix_cache:
            raise InvalidRequest("kv_tier extends the prefix cache, and prefix_cache is false", field="kv_tier")
        if self.kv_key_file is not None and not self.kv_tier and self.kv_events is None:
            raise InvalidRequest("kv_key_file is of no use without kv_tier or kv_events", field="kv_key_file")

    def _check_adapters(self) -> None:
        _check("max_loras", self.max_loras, 0, MAX_ADAPTERS)
        _check("max_lora_rank", self.max_lora_rank, 1, MAX_RANK)
        _check("lora_cache_bytes", self.lora_cache_bytes, 0, 2**48)
        parse_adapters(self.lora)
        _check_given("lora_root", self.lora_root)

    def _check_not_low_bit(self) -> None:
        asked = {
            "low_bit_activations": self.low_bit_activations is not LowBitActivations.OFF,
            "fp8_head": self.fp8_head,
        }
        for field in (name for name, is_asked in asked.items() if is_asked):
            raise InvalidRequest(
                f"{field} and batch_invariant exclude each other: with it the sums of a token depend on how many are "
                "computed together",
                field=field,
            )


_KINDS: Mapping[str, type[StrEnum]] = MappingProxyType(
    {
        "device": DeviceKind,
        "engine_host": LoopHost,
        "gguf_weights": GgufWeights,
        "kv_cache_dtype": KvCacheDtype,
        "load_format": LoadFormat,
        "low_bit_activations": LowBitActivations,
    }
)


def _check(name: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise InvalidRequest(f"{name} is {value}; it must be between {low} and {high}", field=name)


def _check_given(name: str, path: str | None) -> None:
    """As a variable that is not set leaves it: it would be the folder that the process happens to run in."""
    if path is not None and not path.strip():
        raise InvalidRequest(f"{name} is empty; name a folder, or leave it out", field=name)


def _check_folder(name: str, path: str | None) -> None:
    _check_given(name, path)
    if path is not None and not Path(path).is_dir():
        raise InvalidRequest(f"{name} {path} is no folder", field=name)


def _check_kv_events(setting: str, *, prefix_cache: bool) -> None:
    if not prefix_cache:
        raise InvalidRequest("kv_events tells of the prefix cache, and prefix_cache is false", field="kv_events")
    try:
        parse_kv_events(setting)
    except ValueError as error:
        raise InvalidRequest(f"kv_events: {error}", field="kv_events") from error


def _check_transfer(name: str, kv_tier: list[str]) -> None:
    names = [setting.partition("=")[0] for setting in kv_tier]
    if name not in names or name == "stack":
        raise InvalidRequest(
            f"kv_transfer is {name!r}; it must name a tier of kv_tier, and these are: {', '.join(names) or 'none'}",
            field="kv_transfer",
        )


def _check_speculative(setting: str) -> None:
    try:
        parse_speculative(setting)
    except ValueError as error:
        raise InvalidRequest(f"speculative: {error}", field="speculative") from error

"""What drafts cost and gain at a stated acceptance: time per token of a model's shape with random weights, on a GPU.

    python3 tools/device/drafted_speed.py qwen3-4b --speculative ngram,k=4 --accept never=1 edits=2.35@0.5
        --size 1x1024 64x1024 [--modes off fixed adaptive] [--json FILE]

The model's answers are made known: each request has a bias of 100 on one token, which is then always sampled. The real
drafter runs in every step, all its kernels included; what it drafts is then replaced by drafts of that token, spoiled
so that a step with drafts yields as many tokens as is stated: NAME=TOKENS, or NAME=TOKENS@SHARE where only that share
of steps has drafts. Each draft is right with one probability, and the first wrong one ends what is accepted.

    off        without a drafter, with and without the bias, which takes time of its own: "x off" is of the one with it
    idle       with a drafter that no step has drafts of (--max-itl-ms 1): what it costs to be shown steps
    fixed      as many drafts as there may be, in every step: what they cost
    adaptive   as `--speculative` does by default

Every token is compared with the one that is known. TPOT is the time of a run over tokens of one request. `--profile`
says of each kernel how long it is from its begin to that of the next one: unlike their own times, of which the next
kernel's beginning is a part, these add up to the step.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from house_ab import QWEN3_4B
from source_packages import folders

sys.path[:0] = folders()

import msgspec  # noqa: E402
import numpy as np  # noqa: E402

from openinfer_core import (  # noqa: E402
    GenerateRequest,
    Plugin,
    RequestId,
    SamplingParams,
    Tokens,
    claim,
    list_plugins,
    read_config,
)
from openinfer_core.plugins import DRAFTERS, MODELS  # noqa: E402
from openinfer_core.process.resident import settle_memory  # noqa: E402
from openinfer_core.provenance import provenance  # noqa: E402
from openinfer_engine import StepLoop, build_loop, resolve  # noqa: E402
from openinfer_engine.drafters.contract import SettlingDrafter  # noqa: E402
from openinfer_engine.drafting import Drafter, DrafterContext, KvDrafter  # noqa: E402

QWEN3_8B = {**QWEN3_4B, "hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False}
QWEN35_4B = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "attn_output_gate": True,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": True,
    "vocab_size": 248320,
    "mtp_num_hidden_layers": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {"qwen3-4b": dict(QWEN3_4B), "qwen3-8b": QWEN3_8B, "qwen3.5-4b": QWEN35_4B}
_DRAFTER_LAYER = {
    name: QWEN3_4B[name] for name in ("vocab_size", "rms_norm_eps", "rope_theta", "head_dim", "hidden_act")
}
FOLDERS: dict[str, dict[str, Any]] = {
    "eagle3": {**_DRAFTER_LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000},
    "dflash": {
        **_DRAFTER_LAYER,
        "architectures": ["DFlashDraftModel"],
        "block_size": 16,
        "num_hidden_layers": 5,
        "dflash_config": {"target_layer_ids": [1, 9, 17, 25, 33], "mask_token_id": 151669},
    },
    "dspark": {
        **_DRAFTER_LAYER,
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "block_size": 7,
        "num_hidden_layers": 5,
        "target_layer_ids": [1, 9, 17, 25, 33],
        "mask_token_id": 151669,
        "markov_rank": 256,
    },
}
"""Folders that `--speculative` names as `model={drafter}`; the rest of their shape is the model's."""
WHOLE_FOLDERS: dict[str, dict[str, Any]] = {
    "draft-model": {
        **QWEN3_4B,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    }
}
"""Those of a shape of their own: Qwen3-0.6B."""
ANSWER, WRONG = 1000, 1001
BIAS = 100.0
CALLS = 509  # whose drafts are made beforehand, taken in turn
PROFILED_STEPS = 24


@dataclass(frozen=True, slots=True)
class Acceptance:
    """So many tokens a step on average, where `share` of the steps have drafts."""

    name: str
    tokens: float
    share: float

    @classmethod
    def parse(cls, text: str) -> "Acceptance":
        name, _, rest = text.partition("=")
        tokens, _, share = rest.partition("@")
        return cls(name, float(tokens), float(share or 1))

    def drafts(self, rng: np.random.Generator, *, rows: int, k: int) -> np.ndarray:
        """`[CALLS, rows, k]` int32."""
        probability = self.probability(k)
        is_right = (rng.random((CALLS, rows, k)) < probability).cumprod(axis=2).astype(np.bool_)
        drafts = np.where(is_right, ANSWER, WRONG)
        drafts[rng.random((CALLS, rows)) >= self.share] = -1
        return drafts.astype(np.int32)

    def probability(self, k: int) -> float:
        """p with p + p^2 + .. + p^k = accepted drafts of a step that has some."""
        wanted, low, high = (self.tokens - 1) / self.share, 0.0, 1.0
        if wanted > k:
            raise SystemExit(f"{self.name}: {wanted:.2f} accepted drafts of {k}")
        for _ in range(60):
            middle = (low + high) / 2
            if sum(middle**i for i in range(1, k + 1)) < wanted:
                low = middle
            else:
                high = middle
        return low if wanted else 0.0


class Simulated:
    """A drafter that runs, and whose drafts are replaced by those of `bank [CALLS, rows, k]`.

    It may be captured, so its drafts are taken from one place, to which those of the next call are copied each step.
    """

    def __init__(self, inner: Drafter, context: DrafterContext, *, is_real: bool) -> None:
        self.inner = inner
        self.ops = context.ops
        self.max_drafts = inner.max_drafts
        self.max_rows = context.max_num_seqs
        self.bank: Any = None
        self._is_real = is_real
        self._now = context.ops.zeros((context.max_num_seqs, inner.max_drafts), np.int32)
        self._call = 0

    def start(self, starts: Sequence[Any]) -> None:
        self.inner.start(starts)

    def draft(self, slots: Any, last_ids: Any, hidden: Any, lengths: Any) -> Any:
        drafts = self.inner.draft(slots, last_ids, hidden, lengths)
        return drafts if self._is_real else self._now[: len(slots)]

    def turn(self) -> None:
        """To the next of the bank. Steps on their way may take either, row by row, both as likely to be accepted."""
        if self.bank is not None:
            self._call += 1
            drafts = self.bank[self._call % CALLS]
            self._now[: len(drafts)] = drafts


class SimulatedModel(Simulated):
    """The same of a drafter that observes steps."""

    def attach(self, memory: Any) -> None:
        self.inner.attach(memory)  # type: ignore[attr-defined]

    def observe(self, *arguments: Any) -> Any:
        return self.inner.observe(*arguments)  # type: ignore[attr-defined]

    def settle(self, *arguments: Any) -> None:
        if isinstance(self.inner, SettlingDrafter):
            self.inner.settle(*arguments)
        else:
            self.inner.draft(*arguments)


@dataclass(frozen=True, slots=True)
class GivenPlugin(Plugin):
    """A plug-in whose drafters are simulated; `made` has them."""

    factory: Any
    made: list[Simulated]
    is_real: bool = False

    def load(self) -> Any:
        real = self.factory

        def make(context: DrafterContext) -> Simulated:
            inner = real(context)
            kind = SimulatedModel if isinstance(inner, KvDrafter) else Simulated
            drafter = kind(inner, context, is_real=self.is_real)
            self.made.append(drafter)
            return drafter

        for name in ("options", "takes_predictions", "requirements"):
            if hasattr(real, name):
                setattr(make, name, getattr(real, name))
        return make


@dataclass(slots=True)
class Row:
    """One size in one mode."""

    mode: str
    acceptance: str
    batch: int
    prompt_tokens: int
    tpot_ms: float
    step_ms: float
    tokens_per_step: float
    accepted: int
    drafted: int
    faults: int
    prefill_s: float


def main() -> int:
    given = arguments()
    with tempfile.TemporaryDirectory() as made:
        folder = model_folder(given, Path(made))
        rows = (
            measure(given, folder, given.modes[0])
            if len(given.modes) == 1
            else of_each_mode(given.modes, __file__, Row)
        )
    if given.json is not None:
        write(given, rows)
    if len(given.modes) > 1:
        print(table(rows))
    return 0


def model_folder(given: argparse.Namespace, made: Path) -> Path:
    """The folder that is named, or one in `made` of a shape that is, and a drafter's, which the setting then names."""
    if given.model not in CONFIGS:
        return Path(given.model)
    config = CONFIGS[given.model] | json.loads(given.config)
    (made / "config.json").write_text(json.dumps(config))
    write_drafter(given, made / "drafter", config)
    return made


def write_drafter(given: argparse.Namespace, folder: Path, model: dict[str, Any]) -> None:
    """The folder of a drafter of the model's shape, which the setting then names."""
    name = given.speculative.split(",")[0]
    if name in WHOLE_FOLDERS:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(WHOLE_FOLDERS[name] | json.loads(given.drafter_config)))
        given.speculative += f",model={folder}"
    if name in FOLDERS:
        keys = (
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "vocab_size",
            "head_dim",
        )
        folder.mkdir()
        config = {**FOLDERS[name], **{key: model[key] for key in keys}, **json.loads(given.drafter_config)}
        (folder / "config.json").write_text(json.dumps(config))
        given.speculative += f",model={folder}"


def of_each_mode(modes: Sequence[str], script: str, kind: type[Any]) -> list[Any]:
    """Each by a process of its own of the same script, as a GPU's memory is given back with the process."""
    rows: list[Any] = []
    for mode in modes:
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            # The last one of an option that is given twice counts.
            command = [sys.executable, script, *sys.argv[1:], "--modes", mode, "--json", file.name]
            if subprocess.run(command, check=False).returncode == 0:
                rows += [kind(**each) for each in json.loads(Path(file.name).read_text())["rows"]]
    return rows


def open_engine(given: argparse.Namespace, folder: Path, mode: str) -> tuple[StepLoop, list[Simulated]]:
    """The engine, and the drafters whose drafts are to be given."""
    family: Any = claim(read_config(folder), list_plugins(MODELS))[0]
    options = {"prefix_cache": False, "device": given.device, "load_format": "dummy", "max_model_tokens": 4096}
    options |= dict(each.split("=", 1) for each in given.option)
    if mode != "off":
        options["speculative"] = f"{given.speculative},adaptive={str(mode != 'fixed').lower()}"
    if mode == "idle":
        options["max_itl_ms"] = 1
    plan = resolve(family.definition, folder, msgspec.convert(options, family.options_type, strict=False))
    made: list[Simulated] = []
    if plan.drafter is not None:
        entry_point, real = EntryPoint("simulated", "tools:simulated", DRAFTERS), plan.drafter.plugin.load()
        plugin = GivenPlugin(DRAFTERS, entry_point.name, entry_point, real, made, is_real=given.real)
        plan = replace(plan, drafter=replace(plan.drafter, plugin=plugin))
    began = time.perf_counter()
    loop = build_loop(plan)
    settle_memory()
    phases = " ".join(f"{phase.name} {phase.seconds:.2f}" for phase in loop.info.start)
    print(f"-- {mode}: started in {time.perf_counter() - began:.1f} s: {phases}", flush=True)
    return loop, made


def most_rows(made: Sequence[Simulated]) -> int:
    """Of a step; what is drafted for them is no more than that."""
    return max((drafter.max_rows for drafter in made), default=1)


def give_drafts(given: argparse.Namespace, made: Sequence[Simulated], acceptance: Acceptance, *, batch: int) -> None:
    """What drafters draft from here on."""
    for drafter in made:
        bank = acceptance.drafts(np.random.default_rng(5), rows=batch, k=drafter.max_drafts)
        drafter.bank = None if given.real else drafter.ops.upload(bank)


def measure(given: argparse.Namespace, folder: Path, mode: str) -> list[Row]:
    loop, made = open_engine(given, folder, mode)
    rows: list[Row] = []
    for batch, prompt in (map(int, size.split("x")) for size in given.size):
        without = [Acceptance(name, 1, 1) for name in (("bias",) if given.biased else ("plain", "bias"))]
        for acceptance in given.accept if made else without:
            give_drafts(given, made, acceptance, batch=batch)
            has_bias = acceptance.name != "plain" and not given.real
            runs = [run(loop, made, batch, prompt, given.output, has_bias=has_bias) for _ in range(given.repeats + 1)]
            tpot_ms, step_ms, tokens, prefill_s, before, after = min(runs[1:], key=lambda each: each[0])
            rows.append(
                Row(
                    mode,
                    acceptance.name,
                    batch,
                    prompt,
                    tpot_ms,
                    step_ms,
                    tokens,
                    after.spec_decode_num_accepted_tokens - before.spec_decode_num_accepted_tokens,
                    after.spec_decode_num_draft_tokens - before.spec_decode_num_draft_tokens,
                    after.drafter_faults,
                    prefill_s,
                )
            )
            print(rows[-1], flush=True)
            if given.profile:
                profile(Requests(loop, made, batch, prompt, has_bias=has_bias))
    loop.close()
    return rows


class Requests:
    """A batch of requests on their way, and what each was answered so far."""

    def __init__(self, loop: Any, drafters: Sequence[Simulated], batch: int, prompt: int, *, has_bias: bool) -> None:
        rng = np.random.default_rng(0)
        self._drafters = drafters
        first = int(time.monotonic_ns() % 2**40)
        bias = {ANSWER: BIAS} if has_bias else {}
        sampling = SamplingParams(max_tokens=3000 - prompt, temperature=0.0, logit_bias=bias)
        self._loop = loop
        self.answers: dict[int, list[int]] = {first + index: [] for index in range(batch)}
        for request_id in self.answers:
            ids = tuple(rng.integers(5000, 150000, prompt).tolist())
            request = GenerateRequest(request_id=RequestId(request_id), prompt_token_ids=ids, sampling=sampling)
            self._take(loop.submit(request))

    def step(self) -> None:
        for drafter in self._drafters:
            drafter.turn()
        self._take(self._loop.step())

    @property
    def tokens(self) -> int:
        """Of all of them."""
        return sum(map(len, self.answers.values()))

    def end(self) -> None:
        for request_id in self.answers:
            self._loop.abort(RequestId(request_id))
        while self._loop.busy:
            self._loop.step()

    def _take(self, events: Sequence[Any]) -> None:
        for event in events:
            if isinstance(event, Tokens) and event.request_id in self.answers:
                self.answers[int(event.request_id)] += event.token_ids
            elif type(event).__name__ == "Failed":
                raise SystemExit(f"a request failed: {event}")


def run(
    loop: Any, drafters: Sequence[Simulated], batch: int, prompt: int, output: int, *, has_bias: bool
) -> tuple[Any, ...]:
    """TPOT, ms a step, tokens of a request and step, seconds until all had a token, counters before and after."""
    began = time.perf_counter()
    requests = Requests(loop, drafters, batch, prompt, has_bias=has_bias)
    while not all(requests.answers.values()):
        requests.step()
    prefill_s, stats = time.perf_counter() - began, loop.stats()
    before = requests.tokens
    began, steps = time.perf_counter(), 0
    while requests.tokens < before + batch * output:
        requests.step()
        steps += 1
    elapsed, after = time.perf_counter() - began, loop.stats()
    tokens = requests.tokens - before
    if has_bias and any(token != ANSWER for ids in requests.answers.values() for token in ids):
        raise SystemExit("a token is not the known one")
    requests.end()
    return elapsed * 1e3 * batch / tokens, elapsed * 1e3 / steps, tokens / batch / steps, prefill_s, stats, after


def profile(requests: Requests) -> None:
    """Prints what a step's kernels add to it, by name, and how many there are."""
    import torch

    while not all(requests.answers.values()):
        requests.step()
    for _ in range(8):
        requests.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_STEPS):
            requests.step()
        torch.cuda.synchronize()
    requests.end()
    kernels = sorted(
        (event.time_range.start, event.name)
        for event in profiler.events()
        if event.device_type == torch.profiler.DeviceType.CUDA
    )
    found: dict[str, list[float]] = defaultdict(list)
    for (begin, name), (end, _) in itertools.pairwise(kernels):
        found[name].append(end - begin)
    total = sum(map(sum, found.values())) / PROFILED_STEPS
    print(f"   {total:.0f} us a step, {len(kernels) / PROFILED_STEPS:.0f} kernels")
    for name, times in sorted(found.items(), key=lambda each: -sum(each[1]))[:22]:
        each = len(times) / PROFILED_STEPS
        print(f"   {sum(times) / PROFILED_STEPS:8.1f} us {each:7.2f} x {sum(times) / len(times):7.2f} {name[:70]}")
    sys.stdout.flush()


def table(rows: Sequence[Row]) -> str:
    # Requests with drafts have the bias, which costs about a hundredth of a step by itself.
    plain = {(row.batch, row.prompt_tokens): row.tpot_ms for row in rows if row.acceptance == "bias"}
    lines = ["mode      acceptance  batch x prompt   TPOT ms  step ms  tokens/step   x off  faults"]
    for row in rows:
        off = plain.get((row.batch, row.prompt_tokens))
        gain = f"{off / row.tpot_ms:6.3f}" if off else "     -"
        lines.append(
            f"{row.mode:8}  {row.acceptance:10}  {row.batch:5} x {row.prompt_tokens:6}  {row.tpot_ms:8.3f} "
            f"{row.step_ms:8.3f}  {row.tokens_per_step:11.3f}  {gain}  {row.faults:6}"
        )
    return "\n".join(lines)


def write(given: argparse.Namespace, rows: Sequence[Row]) -> None:
    set_up = {name: str(value) for name, value in vars(given).items()}
    report = {
        **msgspec.to_builtins(provenance(commit=given.commit)),
        "set_up": set_up,
        "rows": [asdict(row) for row in rows],
    }
    given.json.write_text(json.dumps(report, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=f"a folder with a config.json, or one of {', '.join(CONFIGS)}")
    parser.add_argument("--speculative", required=True)
    parser.add_argument("--accept", type=Acceptance.parse, nargs="+", default=[Acceptance("never", 1, 1)])
    parser.add_argument("--size", nargs="+", default=["1x1024"])
    parser.add_argument("--modes", nargs="+", default=["off", "fixed", "adaptive"])
    parser.add_argument("--output", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--config", default="{}", help="JSON of keys of config.json that are different")
    parser.add_argument("--drafter-config", default="{}", help="the same of the drafter's")
    parser.add_argument("--option", nargs="*", default=[], help="engine options: NAME=VALUE")
    parser.add_argument("--real", action="store_true", help="leave the drafts as they are, and requests without a bias")
    parser.add_argument("--biased", action="store_true", help="without a drafter only requests with the bias")
    parser.add_argument("--profile", action="store_true", help="kernels of each size, by PyTorch's profiler")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""The block that drafts tokens, against its published equations written out per token in float64; and as a drafter."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from openinfer_core import Refused, read_config
from openinfer_deepseek_v4.config import DeepseekV4Config
from openinfer_deepseek_v4.family import DeepseekV4Definition
from openinfer_deepseek_v4.mtp import DeepseekV4MtpDrafter, load_mtp, state_groups
from openinfer_deepseek_v4.weights import mtp_tensors
from openinfer_engine import Checkpoint, EngineOptions, build_loop, resolve
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.distributed.local_group import LocalGroup
from openinfer_engine.model import Shard
from openinfer_engine.testing import (
    DraftLog,
    agreeing_logits,
    check_model_drafter,
    drafts_after_prefixes,
    record_drafts,
)
from openinfer_engine.weights.checkpoint import shard_for_rank
from openinfer_kernels import AttentionBatch
from openinfer_kernels.cpu import CpuOps
from openinfer_kv_cache import KvDtype

NUM_TOKENS = 30
DRAFTS = 3
TOLERANCE = 2e-3
SOURCE = Path(__file__).parent / "fixtures" / "all_kinds"
definition = DeepseekV4Definition()

Arrays = dict[str, NDArray[Any]]


class RandomWeights:
    """A `WeightSource` of given arrays."""

    def __init__(self, arrays: Arrays, *, rank: int, size: int) -> None:
        self._arrays, self._rank, self._size = arrays, rank, size

    def read(self, name: str, shard: Shard = Shard.WHOLE) -> NDArray[Any]:
        return shard_for_rank(self._arrays[name], name, shard, rank=self._rank, size=self._size)

    def read_stored(self, name: str, shard: Shard = Shard.WHOLE) -> Any:
        return self.read(name, shard)


@pytest.fixture(scope="module")
def config() -> DeepseekV4Config:
    return definition.parse(read_config(SOURCE))


@pytest.fixture(scope="module")
def arrays(config: DeepseekV4Config) -> Arrays:
    rng = np.random.default_rng(0)
    made: Arrays = {}
    for name, spec in {**definition.tensors(config), **mtp_tensors(config)}.items():
        if name.endswith("tid2eid"):
            shape = (config.vocab_size, config.num_experts_per_tok)
            made[name] = np.tile(np.arange(shape[1]), (shape[0], 1))
            continue
        assert isinstance(spec, tuple)
        scale = 1.5 / spec[-1] ** 0.5 if len(spec) > 1 else 1.0
        made[name] = (rng.normal(size=spec) * scale).astype(np.float32)
    return made


def rms(x: NDArray[Any], weight: NDArray[Any] | float = 1.0) -> NDArray[Any]:
    return weight * x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def sigmoid(x: NDArray[Any]) -> NDArray[Any]:
    return 1 / (1 + np.exp(-x))


def turned(x: NDArray[Any], position: int, sign: float) -> NDArray[Any]:
    """The last 8 dimensions in pairs, theta 10,000."""
    out = x.copy()
    angle = position * 1e4 ** (-2.0 * np.arange(4) / 8)
    pairs = (out[..., -8::2] + 1j * out[..., -7::2]) * np.exp(sign * 1j * angle)
    out[..., -8::2], out[..., -7::2] = pairs.real, pairs.imag
    return out


class Reference:
    """Section (c) of the published description, token by token; `w(NAME)` is a tensor of the block in float64.

    Pairs of the streams of a token and the one after it are a sequence of their own, counted from 0.
    """

    def __init__(self, config: DeepseekV4Config, arrays: Arrays, *, is_swapped: bool = False, wider: int = 0) -> None:
        self.config, self.arrays = config, arrays
        self.keys: list[NDArray[Any]] = []
        self.is_swapped = is_swapped
        """A mutant's: the embedding goes through `h_proj`, and the streams through `e_proj`."""
        self.window = config.sliding_window + wider
        """A mutant's is wider."""

    def w(self, name: str) -> NDArray[Any]:
        return self.arrays[f"mtp.0.{name}"].astype(np.float64)

    def inputs(self, next_id: int, streams: NDArray[Any]) -> NDArray[Any]:
        of_embedding, of_streams = ("h_proj", "e_proj") if self.is_swapped else ("e_proj", "h_proj")
        embedded = rms(self.arrays["embed.weight"][next_id].astype(np.float64), self.w("enorm.weight"))
        embedded = self.w(f"{of_embedding}.weight") @ embedded
        return np.array(
            [embedded + self.w(f"{of_streams}.weight") @ rms(each, self.w("hnorm.weight")) for each in streams]
        )

    def see(self, next_id: int, streams: NDArray[Any], position: int) -> None:
        """A pair of which nothing but its key is used."""
        x = self.inputs(next_id, streams)
        pre, _, _ = self.mix(x, "hc_attn")
        self.add_key(rms(pre @ x, self.w("attn_norm.weight")), position)

    def step(self, next_id: int, streams: NDArray[Any], position: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Logits, and the block's streams."""
        x = self.inputs(next_id, streams)
        x = self.sublayer(x, "hc_attn", lambda a: self.attention(rms(a, self.w("attn_norm.weight")), position))
        x = self.sublayer(x, "hc_ffn", lambda a: self.mixture(rms(a, self.w("ffn_norm.weight"))))
        m = self.w("hc_head_fn") @ rms(x.reshape(-1))
        pre = sigmoid(m * self.w("hc_head_scale") + self.w("hc_head_base")) + 1e-6
        hidden = rms(pre @ x, self.w("norm.weight"))
        return self.arrays["head.weight"].astype(np.float64) @ hidden, x

    def sublayer(self, x: NDArray[Any], name: str, compute: Callable[[NDArray[Any]], NDArray[Any]]) -> NDArray[Any]:
        pre, post, mixing = self.mix(x, name)
        return np.outer(post, compute(pre @ x)) + mixing.T @ x

    def mix(self, x: NDArray[Any], name: str) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        m, base, scale = self.w(f"{name}_fn") @ rms(x.reshape(-1)), self.w(f"{name}_base"), self.w(f"{name}_scale")
        pre = sigmoid(m[:4] * scale[0] + base[:4]) + 1e-6
        post = 2 * sigmoid(m[4:8] * scale[1] + base[4:8])
        mixing = np.exp((m[8:] * scale[2] + base[8:]).reshape(4, 4))
        mixing = mixing / mixing.sum(axis=1, keepdims=True) + 1e-6
        mixing /= mixing.sum(axis=0) + 1e-6
        for _ in range(19):
            mixing /= mixing.sum(axis=1, keepdims=True) + 1e-6
            mixing /= mixing.sum(axis=0) + 1e-6
        return pre, post, mixing

    def add_key(self, a: NDArray[Any], position: int) -> None:
        self.keys.append(turned(rms(self.w("attn.wkv.weight") @ a, self.w("attn.kv_norm.weight")), position, 1.0))

    def attention(self, a: NDArray[Any], position: int) -> NDArray[Any]:
        config = self.config
        low = rms(self.w("attn.wq_a.weight") @ a, self.w("attn.q_norm.weight"))
        q = turned(rms((self.w("attn.wq_b.weight") @ low).reshape(-1, config.head_dim)), position, 1.0)
        self.add_key(a, position)
        keys = np.array(self.keys[-self.window :])
        weights = np.exp(q @ keys.T * config.head_dim**-0.5)
        total = weights.sum(axis=1) + np.exp(self.w("attn.attn_sink"))
        o = turned(weights @ keys / total[:, None], position, -1.0).reshape(config.o_groups, -1)
        first = self.w("attn.wo_a.weight").reshape(config.o_groups, config.o_lora_rank, -1)
        return self.w("attn.wo_b.weight") @ np.einsum("goi,gi->go", first, o).reshape(-1)

    def mixture(self, b: NDArray[Any]) -> NDArray[Any]:
        config = self.config
        scores = np.sqrt(np.log1p(np.exp(self.w("ffn.gate.weight") @ b)))
        chosen = np.argsort(-(scores + self.w("ffn.gate.bias")))[: config.num_experts_per_tok]
        shares = scores[chosen] / (scores[chosen].sum() + 1e-20) * config.routed_scaling_factor
        routed = sum(
            share * self.mlp(f"ffn.experts.{expert}", b) for share, expert in zip(shares, chosen.tolist(), strict=True)
        )
        return routed + self.mlp("ffn.shared_experts", b)

    def mlp(self, name: str, b: NDArray[Any]) -> NDArray[Any]:
        limit = self.config.swiglu_limit
        gate, up = self.w(f"{name}.w1.weight") @ b, self.w(f"{name}.w3.weight") @ b
        gate = np.minimum(gate, limit)
        return self.w(f"{name}.w2.weight") @ (gate * sigmoid(gate) * np.clip(up, -limit, limit))


def batch_of(first: int, end: int, states: Arrays) -> AttentionBatch:
    return AttentionBatch(
        positions=np.arange(first, end, dtype=np.int32),
        query_starts=np.array([0, end - first], np.int32),
        context_lens=np.array([end], np.int32),
        block_tables=(np.zeros((1, 8), np.int32),),
        cache_slots=(np.arange(first, end),),
        max_query_tokens=end - first,
        max_context_tokens=end,
        block_tokens=8,
        state_slots=np.array([1], np.int32),
        states=states,
    )


@pytest.mark.parametrize("ranks", [1, 4])
def test_drafted_logits_are_those_of_the_equations(config: DeepseekV4Config, arrays: Arrays, ranks: int) -> None:
    """Pair `p` of the equations stands at position `p + 1`, as its token does."""
    rng = np.random.default_rng(1)
    streams = rng.normal(size=(NUM_TOKENS, config.hc_mult, config.hidden_size)).astype(np.float32)
    next_ids = rng.integers(0, config.vocab_size, NUM_TOKENS).astype(np.int32)
    window, _ = state_groups(config, KvDtype.FLOAT32, max_drafts=2)

    def work(communicator: Communicator) -> NDArray[Any]:
        weights, ops = RandomWeights(arrays, rank=communicator.rank, size=ranks), CpuOps()
        shared = {"ops": ops, "communicator": communicator}
        model = definition.load(config, weights, **shared, max_model_tokens=64)
        mtp = load_mtp(config, weights, model, **shared, max_positions=64)
        states = {f"{window.name}.kv": np.full((3, 1, *window.tensors[0].shape), np.nan, np.float32)}
        pieces: list[NDArray[Any]] = []
        for first, end in ((0, 17), (17, 18), (18, NUM_TOKENS)):
            before = streams[first:end].reshape(end - first, -1)
            batch = batch_of(first + 1, end + 1, states)
            if first == 17:  # as a step that drafts nothing: its key is there all the same
                mtp.append(next_ids[first:end], before, batch=batch)
            hidden, _ = mtp.forward(next_ids[first:end], before, batch=batch)
            pieces.append(mtp.logits(hidden))
        return np.concatenate(pieces)

    found = LocalGroup(ranks).run(work)[0]
    reference = Reference(config, arrays)
    steps = [reference.step(int(next_ids[p]), streams[p].astype(np.float64), p) for p in range(NUM_TOKENS)]
    expected = np.array([logits for logits, _ in steps])
    assert expected.std() > 0.5
    assert np.abs(found - expected).max() < 1e-3


# --- as a drafter -------------------------------------------------------------------------------------------


def add_mtp(target: Path) -> Path:
    """A copy of a recorded model, in float32, with random weights of the block."""
    with Checkpoint.open(SOURCE) as checkpoint:
        config = definition.as_stored(definition.parse(read_config(SOURCE)), checkpoint.tensors)
        tensors: dict[str, Any] = {}
        for name in checkpoint.tensors:
            part = checkpoint.read(name)
            is_table = name.endswith("tid2eid")
            tensors[name] = np.array(part) if is_table else np.asarray(CpuOps().upload_weight(part), np.float32)
    rng = np.random.default_rng(1)
    for name, shape in mtp_tensors(config).items():
        assert isinstance(shape, tuple)
        values = rng.normal(size=shape) * (1.5 / shape[-1] ** 0.5 if len(shape) > 1 else 1.0)
        tensors[name] = values.astype(np.float32)
    target.mkdir(exist_ok=True)
    (target / "config.json").write_bytes((SOURCE / "config.json").read_bytes())
    save_file(tensors, target / "model.safetensors")
    return target


@pytest.fixture(scope="module")
def mtp_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_mtp(tmp_path_factory.mktemp("mtp"))


@pytest.fixture(scope="module")
def log(mtp_dir: Path) -> DraftLog:
    vocabulary = definition.parse(read_config(SOURCE)).vocab_size
    return record_drafts(definition, mtp_dir, DeepseekV4MtpDrafter, vocab_size=vocabulary, max_drafts=DRAFTS)


@pytest.fixture(scope="module")
def stored(mtp_dir: Path) -> Arrays:
    """The block's tensors, embedding and head by their published names."""
    with Checkpoint.open(mtp_dir) as checkpoint:
        names = {
            name: name.removeprefix("model.").replace(".attn.norm.", ".attn.kv_norm.") for name in checkpoint.tensors
        }
        found = {
            name: np.array(checkpoint.read(each)) for each, name in names.items() if name.startswith(("mtp.", "head"))
        }
        return found | {"embed.weight": np.array(checkpoint.read("model.embed_tokens.weight"))}


def wrong_drafts(
    log: DraftLog,
    reference: Callable[[], Reference],
    *,
    limit: int = 1000,
    shift: int = 0,
    reads_hidden: bool = False,
    recycles_inputs: bool = False,
) -> int:
    """Contexts of which a draft is not the formula's; near ties are right either way, and end a row.

    Args:
        log: of the drafter.
        reference: makes the formulas.
        limit: contexts.
        shift: a mutant's: streams of so many tokens earlier.
        reads_hidden: a mutant's: every stream is the state after the final norm.
        recycles_inputs: a mutant's: further drafts go on from the streams that the first one did.
    """
    wrong = 0
    for context in log.contexts[:limit]:
        ids, formulas = list(context.token_ids), reference()

        def streams_of(pair: int, ids: list[int] = ids, formulas: Reference = formulas) -> NDArray[Any]:
            key, n = tuple(ids[: max(pair - shift, 0) + 1]), formulas.config.hc_mult
            found = np.tile(log.hidden[key], (n, 1)) if reads_hidden else log.taps[key][0].reshape(n, -1)
            return found.astype(np.float64)

        last = len(ids) - 2  # the pair that the first draft is made of
        for pair in range(max(0, last - formulas.window), last):
            formulas.see(ids[pair + 1], streams_of(pair), pair)
        streams = first = streams_of(last)
        for draft in context.drafts:
            logits, streams = formulas.step(ids[-1], streams, len(ids) - 2)
            streams = first if recycles_inputs else streams
            wrong += not agreeing_logits(logits, draft, tolerance=TOLERANCE)
            if int(np.argmax(logits)) != draft:
                break
            ids.append(draft)
    return wrong


def test_drafts_are_those_of_the_formulas_in_a_thousand_contexts(
    config: DeepseekV4Config, stored: Arrays, log: DraftLog
) -> None:
    assert len(log.contexts) >= 1000
    assert wrong_drafts(log, lambda: Reference(config, stored)) == 0


@pytest.mark.parametrize(
    "mutant",
    [{"shift": 1}, {"reads_hidden": True}, {"recycles_inputs": True}, {"is_swapped": True}, {"wider": 1}],
    ids=str,
)
def test_drafts_of_mutants_of_the_formulas_differ(
    config: DeepseekV4Config, stored: Arrays, log: DraftLog, mutant: dict[str, Any]
) -> None:
    own = {name: mutant[name] for name in ("is_swapped", "wider") if name in mutant}
    others = {name: value for name, value in mutant.items() if name not in own}
    assert wrong_drafts(log, lambda: Reference(config, stored, **own), limit=150, **others) > 10


@pytest.mark.parametrize(
    ("happens", "options"),
    [
        ("preemptions", {"max_step_tokens": 24, "num_blocks": 19, "max_drafts": 9}),
        ("cached_tokens", {"num_blocks": 40, "tensor_parallel_size": 2}),
    ],
)
def test_answers_with_the_block_are_those_without(mtp_dir: Path, happens: str, options: dict[str, Any]) -> None:
    stats = check_model_drafter(definition, mtp_dir, DeepseekV4MtpDrafter, **options)
    assert getattr(stats, happens) > 0


def test_drafts_after_a_cached_prefix_are_those_of_a_computed_one(mtp_dir: Path) -> None:
    """Bit for bit: copies of states have the block's window, and the streams before the next token."""
    cached, computed = drafts_after_prefixes(definition, mtp_dir, DeepseekV4MtpDrafter, vocab_size=100, count=3)
    assert cached == computed


def asked(folder: Path, **options: Any) -> Any:
    return resolve(definition, folder, EngineOptions(num_blocks=40, speculative="deepseek-v4-mtp", **options))


def test_plan_shows_the_block_and_its_states_change_the_layout(mtp_dir: Path) -> None:
    with_block, without = asked(mtp_dir), resolve(definition, mtp_dir, EngineOptions(num_blocks=40))
    plan = with_block.plan()
    assert plan.parts["drafter"].startswith("deepseek-v4-mtp (openinfer-deepseek-v4 ")
    assert plan.memory_bytes["drafter_weights"] > 0
    assert with_block.layouts[0].digest != without.layouts[0].digest


def test_what_the_block_cannot_do_is_refused_by_name(mtp_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(
        Refused, match=r"drafter deepseek-v4-mtp .*this model has none of its tensors \(model\.mtp\.0\."
    ):
        asked(SOURCE)
    for number, described in ((0, "none"), (2, "2")):
        folder = add_mtp(tmp_path / str(number))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": number}))
        with pytest.raises(Refused, match=rf"num_nextn_predict_layers: 1\), and this model has {described}"):
            asked(folder)


def test_a_block_with_numbers_that_are_not_finite_is_refused(tmp_path: Path) -> None:
    folder = add_mtp(tmp_path / "nan")
    with Checkpoint.open(folder) as checkpoint:
        tensors = {name: np.array(checkpoint.read(name)) for name in checkpoint.tensors}
    tensors["model.mtp.0.ffn.experts.3.w2.weight"][1, 2] = np.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(Refused, match=r"the drafter's tensor model\.mtp\.0\.ffn\.experts\.3\.w2\.weight has num"):
        build_loop(asked(folder))

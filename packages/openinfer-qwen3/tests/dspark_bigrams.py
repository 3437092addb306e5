"""A DSpark folder whose drafts are worth something: its small head has the bigrams of what a model answers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from blocks_in_float64 import LAYERS, save_random_weights
from numpy.typing import NDArray

from openinfer_core import read_config
from openinfer_engine import EngineOptions, build_loop, resolve
from openinfer_engine.testing import random_requests, run_at_once
from openinfer_qwen3.dspark import dspark_tensors, read_dspark
from openinfer_qwen3.family import Qwen3Definition

TRAINED = Path(__file__).parent / "fixtures_eagle3" / "model"
VOCABULARY = 128
CONFIG: dict[str, Any] = LAYERS | {
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 7,
    "markov_rank": VOCABULARY,
    "mask_token_id": 0,
    "target_layer_ids": [0, 2],
    "vocab_size": VOCABULARY,
}


def make_bigram_folder(folder: Path) -> Path:
    """Its layers are random, and their hidden states small next to the bigrams."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    config = read_dspark(folder, Qwen3Definition().parse(read_config(TRAINED)), {})
    names = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "norm.weight")
    weights = (np.eye(VOCABULARY), _log_bigrams().T, np.full(CONFIG["hidden_size"], 0.01))
    given = {name: weight.astype(np.float32) for name, weight in zip(names, weights, strict=True)}
    save_random_weights(folder, dspark_tensors(config), **given)
    return folder


def _log_bigrams() -> NDArray[np.float64]:
    """`[V, V]`: of the token after each in answers of the trained model."""
    loop = build_loop(resolve(Qwen3Definition(), TRAINED, EngineOptions(num_blocks=256, max_num_seqs=16)))
    requests = random_requests(48, vocab_size=VOCABULARY, max_prompt_tokens=40)
    answers = run_at_once(loop, requests)
    loop.close()
    counts = np.full((VOCABULARY, VOCABULARY), 0.1)
    for answer in answers.values():
        np.add.at(counts, (answer.token_ids[:-1], answer.token_ids[1:]), 1)
    return np.log(counts)

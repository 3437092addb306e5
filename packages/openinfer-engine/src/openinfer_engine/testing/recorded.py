"""What must hold of a model with a `Golden`: its recorded logits, however its sequences are cut into steps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from openinfer_engine.testing.family import FamilyHarness, step_at_random
from openinfer_engine.testing.golden import Golden

_LONGEST = "0"
"""The sequence that is cut into steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedModel:
    """A folder with a model and its `Golden`; every check makes harnesses of its own.

    Each check raises `AssertionError` where logits differ by `tolerance` or more.
    """

    make: Callable[..., FamilyHarness]
    """Takes the folder, and what else `FamilyHarness` does."""
    model_dir: Path
    tolerance: float

    def check_recording(self, lengths: Sequence[int]) -> None:
        """Sequences are as long as that, and their logits far from flat."""
        golden = Golden(self.model_dir)
        assert [len(golden.tokens(sequence)) for sequence in golden.sequences] == list(lengths)
        for _, positions, logits in golden.sequences.values():
            assert len(positions) == len(logits) >= 7
            assert logits.std() > 0.5

    def check_whole(self) -> None:
        """Each sequence in a step of its own."""
        golden, model = Golden(self.model_dir), self.make(self.model_dir)
        for sequence in golden.sequences:
            logits = model.step({sequence: golden.tokens(sequence)})[sequence]
            assert golden.error(sequence, logits) < self.tolerance

    def check_together(self, block_tokens: int) -> None:
        """All sequences in one step."""
        golden, model = Golden(self.model_dir), self.make(self.model_dir, block_tokens=block_tokens, num_blocks=200)
        logits = model.step({sequence: golden.tokens(sequence) for sequence in golden.sequences})
        for sequence in golden.sequences:
            assert golden.error(sequence, logits[sequence]) < self.tolerance

    def check_chunks(self, chunk: int) -> None:
        """The longest in chunks of so many tokens."""
        golden, model = Golden(self.model_dir), self.make(self.model_dir)
        tokens = golden.tokens(_LONGEST)
        steps = [tokens[i : i + chunk] for i in range(0, len(tokens), chunk)]
        assert golden.error(_LONGEST, _stepped(model, steps)) < self.tolerance

    def check_decode(self) -> None:
        """The longest token by token after a prompt of 40."""
        golden, model = Golden(self.model_dir), self.make(self.model_dir)
        tokens = golden.tokens(_LONGEST)
        steps = [tokens[:40], *([token] for token in tokens[40:])]
        assert golden.error(_LONGEST, _stepped(model, steps)) < self.tolerance

    def check_mixed(self, seed: int) -> None:
        """Random subsets of the sequences advance by random numbers of tokens."""
        golden, rng = Golden(self.model_dir), np.random.default_rng(seed)
        model = self.make(self.model_dir, block_tokens=int(rng.integers(1, 17)), num_blocks=200)
        found, num_steps = step_at_random(model, {name: golden.tokens(name) for name in golden.sequences}, rng)
        assert num_steps > 10
        for sequence, logits in found.items():
            assert golden.error(sequence, logits) < self.tolerance

    def check_cached_prefix(self) -> None:
        """The longest after 48 tokens that another sequence computed."""
        golden, model = Golden(self.model_dir), self.make(self.model_dir)
        tokens = golden.tokens(_LONGEST)
        model.step({"parent": [*tokens[:48], 5, 6, 7]})
        model.fork("child", "parent", 48)
        assert golden.error(_LONGEST, model.step({"child": tokens[48:]})["child"], first=48) < self.tolerance

    def check_ranks(self, ranks: int, *, prompt: int) -> None:
        """So many ranks together, against one rank too: a prompt, a chunk of 3 tokens, 7 decode steps, the rest."""
        golden = Golden(self.model_dir)
        one, several = self.make(self.model_dir), self.make(self.model_dir, ranks=ranks)
        tokens, end = golden.tokens(_LONGEST), prompt + 3
        steps = [tokens[:prompt], tokens[prompt:end], *([t] for t in tokens[end : end + 7]), tokens[end + 7 :]]
        expected, logits = _stepped(one, steps), _stepped(several, steps)
        assert np.abs(logits - expected).max() < self.tolerance
        assert golden.error(_LONGEST, logits) < self.tolerance

    def check_notices(self, change: Mapping[str, Any]) -> None:
        """A config that is slightly off is ten times as far as is allowed."""
        golden, model = Golden(self.model_dir), self.make(self.model_dir, change=change)
        logits = model.step({_LONGEST: golden.tokens(_LONGEST)})[_LONGEST]
        assert golden.error(_LONGEST, logits) > 10 * self.tolerance


def _stepped(model: FamilyHarness, steps: Sequence[Sequence[int]]) -> Any:
    return np.concatenate([model.step({_LONGEST: step})[_LONGEST] for step in steps])

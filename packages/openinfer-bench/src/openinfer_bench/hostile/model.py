"""A model folder with nothing but a tokenizer: a byte-level vocabulary with the merges of a few sentences."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from openinfer_bench.hostile.good import PROMPT

NUM_TOKEN_IDS = 300


def write_model(folder: Path) -> None:
    """Writes `tokenizer.json`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TOKEN_IDS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([PROMPT, "word after word, number 1234567890"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))

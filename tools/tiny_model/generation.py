"""Greedy decoding of many prompts at once, with a cache."""

import torch
from tokenizers import Tokenizer
from torch import Tensor

from .model import Cache, Qwen3, additive

BATCH = 32
STOP_TOKENS = ("<|im_end|>", "<|endoftext|>")


class Generator:
    """Completes prompts with the most likely tokens."""

    def __init__(self, model: Qwen3, tokenizer: Tokenizer) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._device = next(model.parameters()).device
        self._stop_ids = [tokenizer.token_to_id(token) for token in STOP_TOKENS]

    def complete(self, texts: list[str] | tuple[str, ...], *, max_tokens: int) -> list[str]:
        """Return each prompt's continuation up to and with its stop token, special tokens written out."""
        encoded = [self._tokenizer.encode(text).ids for text in texts]
        order = sorted(range(len(encoded)), key=lambda index: len(encoded[index]))
        outputs = [""] * len(encoded)
        for start in range(0, len(order), BATCH):
            chosen = order[start : start + BATCH]
            produced = self._complete_batch([encoded[index] for index in chosen], max_tokens)
            for index, ids in zip(chosen, produced, strict=True):
                outputs[index] = self._tokenizer.decode(ids, skip_special_tokens=False)
        return outputs

    @torch.no_grad()
    def _complete_batch(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        lengths = torch.tensor([len(ids) for ids in prompts], device=self._device)
        longest = int(lengths.max())
        cache = Cache.empty(self._model.shape, len(prompts), longest + max_tokens, self._device)
        padded = torch.tensor([ids + [0] * (longest - len(ids)) for ids in prompts], device=self._device)
        positions = torch.arange(longest, device=self._device).expand_as(padded)
        hidden = self._forward(padded, positions, cache)
        last = hidden[torch.arange(len(prompts), device=self._device), lengths - 1]
        stops = torch.tensor(self._stop_ids, device=self._device)
        produced: list[list[int]] = [[] for _ in prompts]
        rows = torch.arange(len(prompts), device=self._device)
        for step in range(max_tokens):
            chosen = self._model.logits(last).argmax(dim=-1)
            for row, token in zip(rows.tolist(), chosen.tolist(), strict=True):
                produced[row].append(token)
            going = (~torch.isin(chosen, stops)).nonzero()[:, 0]
            if len(going) == 0:
                break
            if len(going) < len(rows):
                rows, chosen = rows[going], chosen[going]
                cache.keep(going)
            last = self._forward(chosen[:, None], (lengths[rows] + step)[:, None], cache)[:, 0]
        return produced

    def _forward(self, ids: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        slots = torch.arange(cache.layers[0].shape[3], device=self._device)
        mask = additive(slots[None, None, None, :] <= positions[:, None, :, None])
        return self._model.hidden(ids, positions, mask, cache)

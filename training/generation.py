"""Greedy generation with the model in training, many prompts at a time."""

from collections.abc import Sequence

import torch

from training.config import Shape
from training.model import Decoder, KeyValueCache, Masks

GRANULARITY = 32


class Generator:
    """Continues prompts: what `musespark.evals` asks of any engine."""

    def __init__(self, model: Decoder, pad_id: int, *, windowed: bool = False) -> None:
        """With `windowed`, the full-attention layers see no further than the window either."""
        self.model = model
        self.pad_id = pad_id
        self.windowed = windowed

    @torch.no_grad()
    def __call__(
        self, prompts: list[list[int]], max_tokens: int, stop_ids: Sequence[int]
    ) -> list[list[int]]:
        """Return the new tokens of each prompt, up to and including a stop token."""
        device = self.model.norm.weight.device
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            tokens = self._generate(prompts, max_tokens, torch.tensor(list(stop_ids)).to(device))
        return [_until_stop(row, stop_ids) for row in tokens.tolist()]

    def _generate(
        self, prompts: list[list[int]], max_tokens: int, stop_ids: torch.Tensor
    ) -> torch.Tensor:
        shape, device = self.model.shape, stop_ids.device
        width = _rounded_up(max(map(len, prompts)))
        length = _rounded_up(width + max_tokens)
        ids, document = self._left_padded(prompts, width, length)
        ids, document = ids.to(device), document.to(device)
        caches = self._caches(shape, len(prompts), length)
        new = torch.full((len(prompts), max_tokens), self.pad_id, device=device)
        done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        start, window = 0, ids
        for step in range(max_tokens):
            positions = torch.arange(start, start + window.shape[1], device=device)
            masks = self._masks(document, positions)
            logits, _ = self.model(window, masks, positions, caches, last_only=True)
            chosen = torch.where(done, self.pad_id, logits[:, -1].argmax(-1))
            new[:, step] = chosen
            done |= torch.isin(chosen, stop_ids)
            start += window.shape[1]
            window = chosen[:, None]
            if step % 16 == 15 and bool(done.all()):
                break
        return new

    def _masks(self, document: torch.Tensor, positions: torch.Tensor) -> Masks:
        everywhere = torch.arange(document.shape[1], device=document.device)
        queries = document[:, positions]
        window = self.model.shape.sliding_window
        masks = Masks.within_documents(queries, document, positions, everywhere, window)
        return Masks(masks.sliding, masks.sliding) if self.windowed else masks

    def _left_padded(
        self, prompts: list[list[int]], width: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.full((len(prompts), width), self.pad_id)
        document = torch.ones(len(prompts), length, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            document[row, : width - len(prompt)] = 0
        return ids, document

    def _caches(self, shape: Shape, rows: int, length: int) -> list[KeyValueCache]:
        weight = self.model.norm.weight
        like = weight.bfloat16() if weight.is_cuda else weight
        return [KeyValueCache(shape, rows, length, like) for _ in range(shape.num_hidden_layers)]


def _rounded_up(length: int) -> int:
    return -(-length // GRANULARITY) * GRANULARITY


def _until_stop(tokens: list[int], stop_ids: Sequence[int]) -> list[int]:
    ends = [i for i, token in enumerate(tokens) if token in stop_ids]
    return tokens[: ends[0] + 1] if ends else tokens

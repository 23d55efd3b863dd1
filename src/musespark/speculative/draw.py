"""Drawing guessed tokens from a draft's logits, each row with its request's own settings."""

from dataclasses import dataclass

import torch
from torch import Tensor

from musespark.ops.kernel_set import KernelSet
from musespark.ops.sample import sample_from_weights


@dataclass(frozen=True, slots=True)
class DrawSettings:
    """How to draw for B sequences; at random for those with a temperature."""

    temperature: Tensor
    """[B] float32; 0 draws the most likely token."""
    top_k: Tensor
    """[B] int64; 0: all."""
    top_p: Tensor
    """[B] float32; 1: all."""
    min_p: Tensor
    """[B] float32; 0: all."""
    uniform: Tensor
    """[B, N] float64 from 0 to below 1, one per guessed token."""
    has_filters: bool
    """Whether any row cuts tokens away."""

    def empty_like(self, size: int) -> "DrawSettings":
        """Settings of `size` sequences that draw the most likely tokens, to load others into."""

        def empty(tensor: Tensor, value: float) -> Tensor:
            return tensor.new_full((size, *tensor.shape[1:]), value)

        return DrawSettings(
            temperature=empty(self.temperature, 0),
            top_k=empty(self.top_k, 0),
            top_p=empty(self.top_p, 1),
            min_p=empty(self.min_p, 0),
            uniform=empty(self.uniform, 0),
            has_filters=self.has_filters,
        )

    def load(self, other: "DrawSettings") -> None:
        """Take over the settings of the first sequences, in place; the rest stay as they are."""
        count = len(other.temperature)
        for name in ("temperature", "top_k", "top_p", "min_p", "uniform"):
            getattr(self, name)[:count].copy_(getattr(other, name))


class Drawing:
    """Draws one token after the other, and keeps what they were drawn from."""

    def __init__(self, settings: DrawSettings | None, kernels: KernelSet) -> None:
        """None: the most likely tokens."""
        self._settings, self._filter_logits = settings, kernels.filter_logits
        self._drawn_from: list[Tensor] = []

    def pick(self, place: int, logits: Tensor) -> Tensor:
        """The tokens [B] at one place of the guesses, of `logits` [B, V]."""
        settings = self._settings
        if settings is None:
            return logits.argmax(dim=-1)
        is_random = settings.temperature > 0
        scaled = logits / torch.where(is_random, settings.temperature, 1.0)[:, None]
        if settings.has_filters:
            scaled = self._filter_logits(scaled, settings.top_k, settings.top_p, settings.min_p)
        probabilities = scaled.softmax(dim=-1)
        self._drawn_from.append(probabilities)
        drawn = sample_from_weights(probabilities, settings.uniform[:, place])
        return torch.where(is_random, drawn, logits.argmax(dim=-1))

    def distributions(self) -> Tensor | None:
        """[B, N, V] float32 that random rows' tokens were drawn from; None: there are none."""
        return torch.stack(self._drawn_from, dim=1) if self._drawn_from else None

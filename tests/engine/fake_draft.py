"""A proposer whose whole memory is its share of the paged cache, in place of a draft.

It keeps token ids where a draft keeps keys and values. So a token that was taken in although it
did not stand, or was not although it did, shows in what it reads back.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from musespark.engine.kv_blocks import CacheLayout
from musespark.model.draft import ContextRows, DraftContext, PagedContext
from musespark.ops.kernel_set import torch_kernels
from musespark.speculative.draw import Drawing, DrawSettings
from musespark.speculative.guess import Guess

_EMPTY = -1

Think = Callable[[list[int]], Tensor]
"""Logits [V] behind some tokens."""


class FakeDraft:
    """A `Proposer` that thinks as it is told to."""

    tap_layers = (0,)

    def __init__(
        self,
        layout: CacheLayout,
        think: Think,
        *,
        max_tokens: int = 8,
        confidences: Sequence[float] | None = None,
        lies: bool = False,
    ) -> None:
        """With `lies`, it says that all tokens were as likely when it drew them at random."""
        self._layout, self._think, self.max_tokens = layout, think, max_tokens
        self._confidences, self._lies = confidences, lies
        size = layout.block_size
        self._full = np.full(layout.num_full_blocks * size, _EMPTY)
        self._sliding = np.full(layout.num_sliding_blocks * size, _EMPTY)
        self.seen: list[list[int]] = []
        """Whole sequences that it was asked to go on with, where the target has full layers."""
        self.num_proposed: list[int] = []
        """Sequences of each call."""
        self.num_injected: list[int] = []
        """Tokens of each call."""

    def features(self, taps: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(taps), dim=-1)

    def inject(self, rows: ContextRows) -> None:
        features, positions, full_slots, sliding_slots = rows
        assert features.shape == (len(positions), 1)
        self.num_injected.append(len(positions))
        for slots, cache in ((full_slots, self._full), (sliding_slots, self._sliding)):
            assert (slots is None) == (not cache.size)
            if slots is not None:
                assert len(slots) == len(positions)
                cache[slots.numpy()] = features[:, 0].long().numpy()

    def propose(
        self,
        anchor_ids: Tensor,
        context: DraftContext,
        num_tokens: int,
        settings: DrawSettings | None,
    ) -> Guess:
        assert 1 <= num_tokens <= self.max_tokens
        self.num_proposed.append(len(anchor_ids))
        lengths = context.context_lens.tolist()
        sequences = [
            [*self._read(context, row, length), anchor]
            for row, (length, anchor) in enumerate(zip(lengths, anchor_ids.tolist(), strict=True))
        ]
        if self._full.size:
            self.seen += [list(tokens) for tokens in sequences]
        drawing = Drawing(settings, torch_kernels())
        for place in range(num_tokens):
            picked = drawing.pick(place, torch.stack([self._think(s) for s in sequences]))
            for sequence, token in zip(sequences, picked.tolist(), strict=True):
                sequence.append(token)
        distributions = drawing.distributions()
        if distributions is not None and self._lies:
            distributions = torch.full_like(distributions, 1 / distributions.shape[-1])
        confidences = None
        if self._confidences is not None:
            confidences = torch.tensor(self._confidences).expand(len(sequences), num_tokens)
        token_ids = torch.tensor([sequence[-num_tokens:] for sequence in sequences])
        return Guess(token_ids, confidences, distributions)

    def _read(self, context: DraftContext, row: int, length: int) -> list[int]:
        """The tokens before the anchor, as far as a cache still holds them."""
        tokens: list[int] = []
        if context.full is not None:
            tokens = self._gather(context.full, self._full, row, 0, length)
        if context.sliding is not None:
            # What the anchor itself, behind them, sees through the window.
            first = max(0, length - self._layout.sliding_window + 1)
            window = self._gather(context.sliding, self._sliding, row, first, length)
            if context.full is None:
                return window
            assert tokens[first:] == window
        return tokens

    def _gather(
        self, paged: PagedContext, cache: np.ndarray, row: int, first: int, stop: int
    ) -> list[int]:
        size, start = self._layout.block_size, int(paged.key_start[row])
        assert start <= first
        blocks = paged.block_table[row].numpy()
        rows = cache.reshape(-1, size)[blocks].reshape(-1)
        tokens: list[int] = rows[first - start : stop - start].tolist()
        assert len(tokens) == stop - first
        assert _EMPTY not in tokens, "a token that stands was not taken in"
        return tokens

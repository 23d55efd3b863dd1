"""A model whose whole memory is its paged cache, in place of a decoder.

It keeps token ids where a decoder keeps keys and values, reads a sequence back through its block
tables, and predicts the next token from what it read. So a block that was lost, shared by mistake,
freed too early or placed wrongly changes the output, in microseconds and without weights.
"""

import zlib
from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from musespark.engine.kv_blocks import CacheLayout
from musespark.model.batch import AttentionMetadata, ForwardBatch

VOCAB_SIZE = 40
_EMPTY = -1


def next_logits(token_ids: Sequence[int]) -> Tensor:
    """[V] logits after a sequence: arbitrary, but the same for the same tokens."""
    seed = zlib.crc32(array("q", token_ids).tobytes())
    return torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def greedy(prompt: Sequence[int], count: int) -> list[int]:
    """The continuation that the fake model gives a prompt at temperature 0."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(next_logits(tokens).argmax()))
    return tokens[len(prompt) :]


class FakeModel:
    """A `Runner` that checks each batch against itself while it runs it."""

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout
        self._full = np.full((layout.num_full_blocks, layout.block_size), _EMPTY)
        self._sliding = np.full((layout.num_sliding_blocks, layout.block_size), _EMPTY)
        self.num_tokens: list[int] = []
        """Tokens of each step."""
        self.batches: list[ForwardBatch] = []

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def run(self, batch: ForwardBatch) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The stream of each token is the token itself."""
        assert batch.logit_rows is not None
        self.batches.append(batch)
        self.num_tokens.append(len(batch.token_ids))
        self._check_shapes(batch)
        pools = ((batch.full, self._full), (batch.sliding, self._sliding))
        for metadata, cache in pools:
            assert (metadata is None) == (not cache.size)
            if metadata is not None:
                slots = metadata.slot_mapping.numpy()
                assert len(set(slots.tolist())) == len(slots), "two tokens in one slot"
                cache.reshape(-1)[slots] = batch.token_ids.numpy()
        rows = []
        for row in batch.logit_rows.tolist():
            sequence = int(np.searchsorted(batch.query_start, row, side="right")) - 1
            length = int(batch.positions[row]) + 1
            rows.append(next_logits(self._read(batch, sequence, length)))
        logits = torch.stack(rows) if rows else torch.empty(0, VOCAB_SIZE)
        return logits, (batch.token_ids[:, None].float(),)

    def _read(self, batch: ForwardBatch, sequence: int, length: int) -> list[int]:
        """The first `length` tokens of a sequence, as far as the caches still hold them."""
        tokens: list[int] | None = None
        if batch.full is not None:
            tokens = self._gather(batch.full, self._full, sequence, 0, length)
            self._check_decode(batch, batch.full, self._full, sequence, tokens)
        if batch.sliding is not None:
            first = max(0, length - self._layout.sliding_window)
            window = self._gather(batch.sliding, self._sliding, sequence, first, length)
            self._check_decode(batch, batch.sliding, self._sliding, sequence, window)
            if tokens is None:
                return window
            assert tokens[first:] == window, "the two caches disagree"
        assert tokens is not None
        return tokens

    def _gather(
        self, metadata: AttentionMetadata, cache: np.ndarray, sequence: int, first: int, stop: int
    ) -> list[int]:
        start = metadata.key_start[sequence]
        assert start <= first, "a block that is still visible was given back"
        rows = cache[metadata.block_table[sequence].numpy()].reshape(-1)
        tokens: list[int] = rows[first - start : stop - start].tolist()
        assert len(tokens) == stop - first, "the block table is too short"
        assert _EMPTY not in tokens, "a slot was read before it was written"
        return tokens

    def _check_decode(
        self,
        batch: ForwardBatch,
        metadata: AttentionMetadata,
        cache: np.ndarray,
        sequence: int,
        expected: list[int],
    ) -> None:
        """A decoding sequence sees the same through the step's mask."""
        if sequence < batch.num_decodes:
            rows = cache[metadata.decode_table[sequence].numpy()].reshape(-1)
            assert rows[metadata.decode_mask[sequence].numpy()].tolist() == expected

    def _check_shapes(self, batch: ForwardBatch) -> None:
        starts, lengths = batch.query_start, batch.seq_lens
        counts = np.diff(starts)
        assert len(lengths) == len(counts)
        assert starts[0] == 0
        assert starts[-1] == len(batch.token_ids) == len(batch.positions)
        assert (counts[: batch.num_decodes] == 1).all()
        assert (counts[batch.num_decodes :] > 1).all()
        positions = [p for n, c in zip(lengths, counts, strict=True) for p in range(n - c, n)]
        assert batch.positions.tolist() == positions


def windowed_greedy(prompt: Sequence[int], count: int, window: int) -> list[int]:
    """Like `greedy`, of a model that has sliding layers only and reads nothing but the window."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(next_logits(tokens[-window:]).argmax()))
    return tokens[len(prompt) :]

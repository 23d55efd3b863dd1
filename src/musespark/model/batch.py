"""One step's tokens and where their keys and values lie: built once, then only read.

Tokens of all sequences lie flat, one sequence after the other. The sequences that decode (one new
token each) come first and attend in one call; those with a few, which verify guesses, in another;
and those that prefill follow.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from musespark.ops.attention_few import FewTokens
from musespark.ops.attention_paged import SequencesOnDevice


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The paged cache as the layers of one kind (full or sliding) see it in this step."""

    block_table: Tensor
    """[B, N] int64 blocks of each sequence in order of position; the rest of a row is padding."""
    key_start: tuple[int, ...]
    """[B] position of the first key in each sequence's first block of the table."""
    slot_mapping: Tensor
    """[T] int64 row of each token in the flattened cache."""
    decode_table: Tensor
    """[num_decodes, M] int64: the decoding sequences' part of the table, no wider than needed."""
    decode_mask: Tensor
    """[num_decodes, M * block_size] bool: the keys that each decoding sequence sees; [0, 0] where
    kernels read lengths instead."""
    on_device: SequencesOnDevice | None = None
    """The sequences' lengths where kernels can read them; None: sent when they are needed."""
    few: FewTokens | None = None
    """The sequences right behind the decoding ones that have few new tokens, and attend together;
    None: none, or kernels read lengths instead."""

    def sequence(self, row: int, batch: "ForwardBatch", block_size: int) -> "AttentionMetadata":
        """What one sequence of `batch` sees, with tables no wider than it needs."""
        tokens = slice(batch.query_start[row], batch.query_start[row + 1])
        decodes = slice(row, row + 1) if row < batch.num_decodes else slice(0, 0)
        width = -(-(batch.seq_lens[row] - self.key_start[row]) // block_size)
        return AttentionMetadata(
            block_table=self.block_table[row : row + 1, :width],
            key_start=self.key_start[row : row + 1],
            slot_mapping=self.slot_mapping[tokens],
            decode_table=self.decode_table[decodes, :width],
            decode_mask=self.decode_mask[decodes, : width * block_size],
        )


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The input of one forward pass."""

    token_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64 position of each token in its sequence."""
    query_start: tuple[int, ...]
    """[B + 1] first token of each sequence in this step, and T at the end."""
    seq_lens: tuple[int, ...]
    """[B] tokens of each sequence including this step's."""
    num_decodes: int
    """How many sequences, from the first on, have exactly one new token and attend together."""
    full: AttentionMetadata | None
    """None where nothing is cached: one sequence, attending to this step's own tokens only."""
    sliding: AttentionMetadata | None
    """Likewise, for the layers with a sliding window."""
    logit_rows: Tensor | None
    """[N] int64 rows of which logits are wanted; None: all."""
    padding: Tensor | None = None
    """[T] bool, True for rows that are no tokens; None: none are."""

    def sequences(self, block_size: int) -> Iterator["ForwardBatch"]:
        """Each sequence of the step as a batch of its own, over a cache of such blocks."""
        wanted = [] if self.logit_rows is None else self.logit_rows.tolist()
        for row in range(len(self.seq_lens)):
            start, stop = self.query_start[row], self.query_start[row + 1]
            rows = [place - start for place in wanted if start <= place < stop]
            yield ForwardBatch(
                token_ids=self.token_ids[start:stop],
                positions=self.positions[start:stop],
                query_start=(0, stop - start),
                seq_lens=(self.seq_lens[row],),
                num_decodes=int(row < self.num_decodes),
                full=self.full and self.full.sequence(row, self, block_size),
                sliding=self.sliding and self.sliding.sequence(row, self, block_size),
                logit_rows=torch.tensor(rows, dtype=torch.int64, device=self.token_ids.device),
            )

    @classmethod
    def uncached(cls, token_ids: Tensor) -> "ForwardBatch":
        """One whole sequence [T] that attends to itself, with the logits of every token."""
        length = token_ids.shape[0]
        return cls(
            token_ids=token_ids,
            positions=torch.arange(length, device=token_ids.device),
            query_start=(0, length),
            seq_lens=(length,),
            num_decodes=0,
            full=None,
            sliding=None,
            logit_rows=None,
        )

"""One step's tokens and where their keys and values lie: built once, then only read.

Tokens of all sequences lie flat, one sequence after the other. The sequences that decode (one new
token each) come first and attend in one call; those that prefill follow.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


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
    """[num_decodes, M * block_size] bool: the keys that each decoding sequence sees."""


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

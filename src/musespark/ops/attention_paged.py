"""Attention of one step over the paged cache: decoding and prefilling sequences, one after another.

The formula is that of attention_prefill. A step's tokens lie flat; the sequences that decode (one
new token each) come first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from musespark.ops.attention_decode import (
    attention_decode,
    attention_decode_triton,
    gather_blocks,
)
from musespark.ops.attention_few import FewTokens, attention_few
from musespark.ops.attention_prefill import attention_prefill
from musespark.ops.attention_prefill_hopper import prefill_kernel
from musespark.ops.output_gate import output_gate, output_gate_triton
from musespark.ops.transfers import send


@dataclass(frozen=True, slots=True)
class SequencesOnDevice:
    """What a kernel must know of the step's sequences."""

    query_start: Tensor
    """[B + 1] int32 first token of each sequence, and T at the end."""
    seq_lens: Tensor
    """[B] int32 tokens of each sequence including this step's; 0 on a row that is padding."""
    key_start: Tensor
    """[B] int32 position of the first key in each sequence's first block of the table."""
    num_decodes: Tensor | None = None
    """[1] int32 how many of the sequences decode, where the host does not know; they come first."""
    decode_lens: Tensor | None = None
    """[B] int32 `seq_lens` of those, 0 of all others; where there is `num_decodes`."""


def sequences_on_device(
    query_start: Sequence[int],
    seq_lens: Sequence[int],
    key_start: Sequence[int],
    device: torch.device,
) -> SequencesOnDevice:
    """Send all three at once, without waiting for the device."""
    values = send(np.array([*query_start, *seq_lens, *key_start], dtype=np.int32), device)
    counts = (len(query_start), len(seq_lens), len(key_start))
    return SequencesOnDevice(*values.split(counts))


@dataclass(frozen=True, slots=True)
class PagedSequences:
    """The step's sequences and their blocks, as one kind of layers (full or sliding) sees them."""

    num_decodes: int
    """How many sequences, from the first on, have one new token."""
    query_start: tuple[int, ...]
    """[B + 1] first token of each sequence in this step, and T at the end."""
    seq_lens: tuple[int, ...]
    """[B] tokens of each sequence including this step's."""
    key_start: tuple[int, ...]
    """[B] position of the first key in each sequence's first block of the table."""
    block_table: Tensor
    """[B, N] integer blocks of each sequence in order of position."""
    decode_table: Tensor
    """[num_decodes, M] the decoding sequences' part of the table, no wider than needed."""
    decode_mask: Tensor
    """[num_decodes, M * block_size] bool: the keys that each decoding sequence sees."""
    slot_mapping: Tensor
    """[T] int64 row of each token in the flattened cache; -1 on a row that is padding."""
    on_device: SequencesOnDevice | None
    """The lengths again, for kernels."""
    few: FewTokens | None = None
    """The sequences right behind the decoding ones that have few new tokens; None: none have."""


def attention_paged(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    sequences: PagedSequences,
    scale: float,
    window: int | None = None,
    *,
    gate: Tensor | None = None,
    gate_eps: float = 0.0,
) -> Tensor:
    """Attention of the step's tokens; decoding sequences in one call, those with few new tokens in
    another, then each further one in its own.

    Args:
        query: [T, heads, head_dim].
        key_cache, value_cache: [blocks, block_size, kv_heads, head_dim], this step's own keys and
            values included.
        sequences: whose tokens these are.
        scale: multiplies the scores before the softmax.
        window: keys a query sees, its own included; None: all up to its own.
        gate: [T, heads, head_dim] of `output_gate`, through which the result goes; None: it does
            not.
        gate_eps: for that.

    Returns:
        [T, heads, head_dim] in query's dtype.
    """
    outputs = []
    if decodes := sequences.num_decodes:
        outputs.append(
            attention_decode(
                query[:decodes],
                key_cache,
                value_cache,
                sequences.decode_table,
                sequences.decode_mask,
                scale,
            )
        )
    first = decodes
    if (few := sequences.few) is not None:
        first += few.rows.shape[0]
        rows = slice(decodes, sequences.query_start[first])
        outputs.append(attention_few(query[rows], key_cache, value_cache, few, scale))
    for row in range(first, len(sequences.seq_lens)):
        start, stop = sequences.query_start[row], sequences.query_start[row + 1]
        num_keys = sequences.seq_lens[row] - sequences.key_start[row]
        blocks = sequences.block_table[row, : -(-num_keys // key_cache.shape[1])]
        # [S, kv_heads, head_dim]; the cache may hold a narrower type.
        key = gather_blocks(key_cache, blocks)[:num_keys].to(query.dtype)
        value = gather_blocks(value_cache, blocks)[:num_keys].to(query.dtype)
        outputs.append(attention_prefill(query[start:stop], key, value, scale, window))
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return out if gate is None else output_gate(out, gate, gate_eps)


def attention_paged_triton(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    sequences: PagedSequences,
    scale: float,
    window: int | None = None,
    *,
    gate: Tensor | None = None,
    gate_eps: float = 0.0,
) -> Tensor:
    """`attention_paged` in a fixed number of launches, whatever the sequences' lengths."""
    on_device = sequences.on_device
    assert on_device is not None
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    num_tokens, decodes, decode_lens = query.shape[0], sequences.num_decodes, on_device.seq_lens
    # Where the host does not know who decodes, all rows may, and all may not.
    is_open = on_device.num_decodes is not None
    if is_open:
        assert on_device.decode_lens is not None
        decodes, decode_lens = num_tokens, on_device.decode_lens
    if decodes:
        attention_decode_triton(
            query[:decodes],
            key_cache,
            value_cache,
            sequences.block_table[:decodes],
            on_device.key_start[:decodes],
            decode_lens[:decodes],
            scale,
            window,
            gate=None if gate is None or is_open else gate[:decodes],
            gate_eps=gate_eps,
            out=out[:decodes],
        )
    if is_open or num_tokens > decodes:
        prefill_kernel(query, key_cache)(
            query,
            key_cache,
            value_cache,
            sequences.block_table,
            on_device.query_start,
            on_device.key_start,
            on_device.seq_lens,
            scale,
            window,
            first_sequence=decodes if on_device.num_decodes is None else on_device.num_decodes,
            out=out,
        )
        if gate is not None:
            rest = slice(0 if is_open else decodes, num_tokens)
            output_gate_triton(out[rest], gate[rest], gate_eps, out=out[rest])
    return out

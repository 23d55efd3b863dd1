"""The only place where a schedule becomes tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from musespark.engine.scheduler import CacheLayout, ScheduledRequest
from musespark.model.batch import AttentionMetadata, ForwardBatch
from musespark.ops.attention_decode import decode_mask


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The step's tokens on the host, as both kinds of layers need them."""

    row: np.ndarray
    """[T] sequence of each token."""
    positions: np.ndarray
    """[T]."""
    seq_lens: np.ndarray
    """[B]."""
    num_decodes: int
    block_size: int
    device: torch.device


def build_inputs(
    schedule: Sequence[ScheduledRequest], layout: CacheLayout, device: torch.device
) -> ForwardBatch:
    """One step's batch. `schedule` lists the requests with a single new token first."""
    token_ids: list[int] = []
    query_start = [0]
    logit_rows: list[int] = []
    for item in schedule:
        first = item.request.num_computed_tokens
        token_ids += item.request.token_ids(first, first + item.num_new_tokens)
        query_start.append(len(token_ids))
        if item.samples:
            logit_rows.append(len(token_ids) - 1)
    num_decodes = sum(item.num_new_tokens == 1 for item in schedule)
    counts = np.diff(query_start)
    computed = np.array([item.request.num_computed_tokens for item in schedule])
    # Token t of sequence b is at position computed[b] + (t - query_start[b]).
    row = np.repeat(np.arange(len(schedule)), counts)  # [T]
    positions = np.arange(len(token_ids)) + (computed - query_start[:-1])[row]
    tokens = _Tokens(row, positions, computed + counts, num_decodes, layout.block_size, device)

    full = sliding = None
    if layout.num_full_blocks:
        tables = [item.request.full_blocks for item in schedule]
        full = _metadata(tokens, tables, [0] * len(schedule), window=None)
    if layout.num_sliding_blocks:
        tables = [item.request.sliding_blocks for item in schedule]
        first_blocks = [item.request.first_sliding_block for item in schedule]
        sliding = _metadata(tokens, tables, first_blocks, window=layout.sliding_window)
    return ForwardBatch(
        token_ids=_to_device(token_ids, device),
        positions=_to_device(positions, device),
        query_start=tuple(query_start),
        seq_lens=tuple(tokens.seq_lens.tolist()),
        num_decodes=num_decodes,
        full=full,
        sliding=sliding,
        logit_rows=_to_device(logit_rows, device),
    )


def _metadata(
    tokens: _Tokens, tables: list[list[int]], first_blocks: list[int], window: int | None
) -> AttentionMetadata:
    """One group's block table, slots and masks; a table begins at its sequence's first block."""
    block_table = np.zeros((len(tables), max(map(len, tables))), dtype=np.int64)
    for row, blocks in enumerate(tables):
        block_table[row, : len(blocks)] = blocks
    block_size, device = tokens.block_size, tokens.device
    key_start = np.array(first_blocks) * block_size
    column = tokens.positions // block_size - np.array(first_blocks)[tokens.row]
    slots = block_table[tokens.row, column] * block_size + tokens.positions % block_size
    table = _to_device(block_table, device)
    # The table is as wide as the step's longest sequence; what decodes may be much shorter.
    decodes = tokens.num_decodes
    decode_width = max((len(blocks) for blocks in tables[:decodes]), default=0)
    decode_table = table[:decodes, :decode_width]
    return AttentionMetadata(
        block_table=table,
        key_start=tuple(key_start.tolist()),
        slot_mapping=_to_device(slots, device),
        decode_table=decode_table,
        decode_mask=decode_mask(
            decode_table,
            block_size,
            _to_device(key_start[:decodes], device),
            _to_device(tokens.seq_lens[:decodes], device),
            window,
        ),
    )


def _to_device(values: list[int] | np.ndarray, device: torch.device) -> Tensor:
    array = np.asarray(values, dtype=np.int64)
    return torch.from_numpy(array).to(device, non_blocking=True)

"""The only place where a schedule becomes tensors.

A step changes little: most requests go on with the same blocks. So each running request's blocks
are kept in arrays, at its slot, and only what has changed is copied there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from musespark.engine.kv_blocks import CacheLayout
from musespark.engine.request import Request
from musespark.engine.scheduler import ScheduledRequest
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


class InputBuilder:
    """Builds the batch of each step."""

    def __init__(self, layout: CacheLayout, max_num_seqs: int, device: torch.device) -> None:
        self._layout, self._device = layout, device
        self._full = _BlockTable(max_num_seqs)
        self._sliding = _BlockTable(max_num_seqs)

    def build(self, schedule: Sequence[ScheduledRequest]) -> ForwardBatch:
        """One step's batch. `schedule` lists the requests with a single new token first."""
        token_ids: list[int] = []
        query_start = [0]
        logit_rows: list[int] = []
        num_decodes = 0
        for request, count in schedule:
            first = request.num_computed_tokens
            if count == 1:
                num_decodes += 1
                prompt, outputs = request.prompt_token_ids, request.output_token_ids
                place = first - len(prompt)
                token_ids.append(outputs[place] if place >= 0 else prompt[first])
            else:
                token_ids += request.token_ids(first, first + count)
            end = len(token_ids)
            query_start.append(end)
            logit_rows += wanted_rows(request, count, end)
        computed = np.array([request.num_computed_tokens for request, _ in schedule])
        counts = np.diff(query_start)
        # Token t of sequence b is at position computed[b] + (t - query_start[b]).
        row = np.repeat(np.arange(len(schedule)), counts)  # [T]
        positions = np.arange(len(token_ids)) + (computed - query_start[:-1])[row]
        tokens = _Tokens(row, positions, computed + counts, num_decodes)
        requests = [request for request, _ in schedule]
        return ForwardBatch(
            token_ids=self._to_device(token_ids),
            positions=self._to_device(positions),
            query_start=tuple(query_start),
            seq_lens=tuple(tokens.seq_lens.tolist()),
            num_decodes=num_decodes,
            full=self._full_metadata(tokens, requests),
            sliding=self._sliding_metadata(tokens, requests),
            logit_rows=self._to_device(logit_rows),
        )

    def _full_metadata(self, tokens: _Tokens, requests: list[Request]) -> AttentionMetadata | None:
        if not self._layout.num_full_blocks:
            return None
        blocks = [request.full_blocks for request in requests]
        slots = [request.slot for request in requests]
        table = self._full.rows(slots, blocks, [0] * len(slots))
        first = np.zeros(len(slots), dtype=np.int64)
        return self._metadata(tokens, table, blocks, first, window=None)

    def _sliding_metadata(
        self, tokens: _Tokens, requests: list[Request]
    ) -> AttentionMetadata | None:
        if not self._layout.num_sliding_blocks:
            return None
        blocks = [request.sliding_blocks for request in requests]
        firsts = [request.first_sliding_block for request in requests]
        table = self._sliding.rows([request.slot for request in requests], blocks, firsts)
        window = self._layout.sliding_window
        return self._metadata(tokens, table, blocks, np.array(firsts), window)

    def _metadata(
        self,
        tokens: _Tokens,
        block_table: np.ndarray,
        blocks: list[list[int]],
        first_blocks: np.ndarray,
        window: int | None,
    ) -> AttentionMetadata:
        """One group's block table, slots and masks; a table begins at its first block."""
        size, decodes = self._layout.block_size, tokens.num_decodes
        key_start = first_blocks * size
        column = tokens.positions // size - first_blocks[tokens.row]
        slots = block_table[tokens.row, column] * size + tokens.positions % size
        table = self._to_device(block_table)
        # The table is as wide as the step's longest sequence; what decodes may be much shorter.
        decode_width = max(map(len, blocks[:decodes]), default=0)
        decode_table = table[:decodes, :decode_width]
        return AttentionMetadata(
            block_table=table,
            key_start=tuple(key_start.tolist()),
            slot_mapping=self._to_device(slots),
            decode_table=decode_table,
            decode_mask=decode_mask(
                decode_table,
                size,
                self._to_device(key_start[:decodes]),
                self._to_device(tokens.seq_lens[:decodes]),
                window,
            ),
        )

    def _to_device(self, values: list[int] | np.ndarray) -> Tensor:
        array = np.asarray(values, dtype=np.int64)
        return torch.from_numpy(array).to(self._device, non_blocking=True)


class _BlockTable:
    """The blocks of all running requests, one row per slot."""

    def __init__(self, num_slots: int) -> None:
        self._table = np.zeros((num_slots, 16), dtype=np.int64)
        # What each row holds a copy of: the list itself, its length then, and its first number.
        self._sources: list[list[int] | None] = [None] * num_slots
        self._lengths = [0] * num_slots
        self._firsts = [0] * num_slots

    def rows(self, slots: list[int], blocks: list[list[int]], firsts: list[int]) -> np.ndarray:
        """[B, N] blocks of the requests at `slots`; what is behind a row's end means nothing."""
        for slot, source, first in zip(slots, blocks, firsts, strict=True):
            if (
                self._sources[slot] is not source
                or self._lengths[slot] != len(source)
                or self._firsts[slot] != first
            ):
                self._copy(slot, source, first)
        width = max(map(len, blocks))
        return self._table[slots, :width]

    def _copy(self, slot: int, source: list[int], first: int) -> None:
        start = self._lengths[slot]
        if self._sources[slot] is not source or self._firsts[slot] != first:
            start = 0
        length = len(source)
        if length > self._table.shape[1]:
            grown = np.zeros((self._table.shape[0], 2 * length), dtype=np.int64)
            grown[:, : self._table.shape[1]] = self._table
            self._table = grown
        self._table[slot, start:length] = source[start:]
        self._sources[slot], self._lengths[slot] = source, length
        self._firsts[slot] = first


def wanted_rows(request: Request, count: int, end: int) -> range:
    """The rows, of a request's `count` up to `end`, whose logits are needed: the last, if it is
    the request's last token; all, if they predict prompt tokens whose log-probability is wanted."""
    if request.params.prompt_logprobs is not None and not request.output_token_ids:
        return range(end - count, end)
    samples = count == request.num_uncomputed_tokens
    return range(end - samples, end)

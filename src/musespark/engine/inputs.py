"""The only place where a schedule becomes tensors.

A step changes little: most requests go on with the same blocks. So each running request's blocks
are kept in arrays, at its slot, and only what has changed is copied there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

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

    def __init__(
        self,
        layout: CacheLayout,
        max_num_seqs: int,
        device: torch.device,
        *,
        with_masks: bool = True,
    ) -> None:
        """`with_masks`: make the masks that attention reads where no kernel reads lengths."""
        self._layout, self._device, self._with_masks = layout, device, with_masks
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
        full, sliding = self._full_group(tokens, requests), self._sliding_group(tokens, requests)
        sent = iter(
            self._send(
                np.array(token_ids),
                positions,
                np.array(logit_rows, dtype=np.int64),
                tokens.seq_lens,
                *full.arrays(),
                *sliding.arrays(),
            )
        )
        ids, places, rows, seq_lens = (next(sent) for _ in range(4))
        return ForwardBatch(
            token_ids=ids,
            positions=places,
            query_start=tuple(query_start),
            seq_lens=tuple(tokens.seq_lens.tolist()),
            num_decodes=num_decodes,
            full=self._metadata(full, seq_lens, sent),
            sliding=self._metadata(sliding, seq_lens, sent),
            logit_rows=rows,
        )

    def _full_group(self, tokens: _Tokens, requests: list[Request]) -> "_Group":
        if not self._layout.num_full_blocks:
            return _Group()
        blocks = [request.full_blocks for request in requests]
        firsts = [0] * len(requests)
        return self._group(self._full, tokens, requests, blocks, firsts)

    def _sliding_group(self, tokens: _Tokens, requests: list[Request]) -> "_Group":
        if not self._layout.num_sliding_blocks:
            return _Group()
        blocks = [request.sliding_blocks for request in requests]
        firsts = [request.first_sliding_block for request in requests]
        group = self._group(self._sliding, tokens, requests, blocks, firsts)
        return replace(group, window=self._layout.sliding_window)

    def _group(
        self,
        table: "_BlockTable",
        tokens: _Tokens,
        requests: list[Request],
        blocks: list[list[int]],
        firsts: list[int],
    ) -> "_Group":
        """One group's block table and slots; a table begins at each sequence's first block."""
        size = self._layout.block_size
        block_table = table.rows([request.slot for request in requests], blocks, firsts)
        first_blocks = np.array(firsts)
        column = tokens.positions // size - first_blocks[tokens.row]
        slots = block_table[tokens.row, column] * size + tokens.positions % size
        return _Group(
            block_table=block_table,
            slots=slots,
            key_start=first_blocks * size,
            num_decodes=tokens.num_decodes,
            # The table is as wide as the step's longest sequence; what decodes may be shorter.
            decode_width=max(map(len, blocks[: tokens.num_decodes]), default=0),
        )

    def _metadata(
        self, group: "_Group", seq_lens: Tensor, sent: Iterator[Tensor]
    ) -> AttentionMetadata | None:
        """A group as attention reads it, from what was sent of it."""
        if group.block_table is None:
            return None
        assert group.key_start is not None
        table, slots, key_start = next(sent), next(sent), next(sent)
        decodes, size = group.num_decodes, self._layout.block_size
        decode_table = table[:decodes, : group.decode_width]
        mask = torch.empty((0, 0), dtype=torch.bool, device=self._device)
        if self._with_masks:
            mask = decode_mask(
                decode_table, size, key_start[:decodes], seq_lens[:decodes], group.window
            )
        return AttentionMetadata(
            block_table=table,
            key_start=tuple(group.key_start.tolist()),
            slot_mapping=slots,
            decode_table=decode_table,
            decode_mask=mask,
        )

    def _send(self, *arrays: np.ndarray) -> list[Tensor]:
        """The arrays as int64 on the device, in one copy."""
        packed = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
        if self._device.type == "cuda":
            packed = packed.pin_memory().to(self._device, non_blocking=True)
        parts = packed.split([array.size for array in arrays])
        return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


@dataclass(frozen=True, slots=True)
class _Group:
    """What the layers of one kind need of a step, on the host; empty where there are none."""

    block_table: np.ndarray | None = None
    """[B, N]."""
    slots: np.ndarray | None = None
    """[T]."""
    key_start: np.ndarray | None = None
    """[B]."""
    num_decodes: int = 0
    decode_width: int = 0
    window: int | None = None

    def arrays(self) -> list[np.ndarray]:
        """What goes to the device."""
        arrays = (self.block_table, self.slots, self.key_start)
        return [array for array in arrays if array is not None]


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

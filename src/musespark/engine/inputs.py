"""The only place where a step's plan becomes tensors.

Each running request's blocks are kept in arrays, at its slot, and only what a plan says to have
changed is copied there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from musespark.engine.kv_blocks import CacheLayout
from musespark.engine.step_plan import GroupPlan, StepPlan
from musespark.model.batch import AttentionMetadata, ForwardBatch
from musespark.ops.attention_decode import decode_mask
from musespark.ops.attention_few import FewTokens, few_tokens
from musespark.ops.transfers import send

# New tokens of a sequence that attends together with others of its kind, at most.
_FEW = 16


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The step's tokens on the host, as both kinds of layers need them."""

    slots: np.ndarray
    """[B] place of each sequence among all that run."""
    row: np.ndarray
    """[T] sequence of each token."""
    positions: np.ndarray
    """[T]."""
    seq_lens: np.ndarray
    """[B]."""
    counts: np.ndarray
    """[B] new tokens of each sequence."""
    num_decodes: int
    num_few: int
    """How many sequences behind the decoding ones have few new tokens."""


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

    def build(self, plan: StepPlan) -> ForwardBatch:
        """One step's batch. Plans must come in order, and each of them."""
        computed = _array(plan.num_computed)  # [B]
        query_start = _array(plan.query_start)
        counts = np.diff(query_start)
        # Token t of sequence b is at position computed[b] + (t - query_start[b]).
        row = np.repeat(np.arange(len(computed)), counts)  # [T]
        positions = np.arange(len(plan.token_ids)) + (computed - query_start[:-1])[row]
        is_long = counts[plan.num_decodes :] > _FEW
        tokens = _Tokens(
            slots=_array(plan.slots),
            row=row,
            positions=positions,
            seq_lens=computed + counts,
            counts=counts,
            num_decodes=plan.num_decodes,
            num_few=int(is_long.argmax()) if is_long.any() else len(is_long),
        )
        full = self._group(self._full, tokens, plan.full, None)
        sliding = self._group(self._sliding, tokens, plan.sliding, self._layout.sliding_window)
        sent = iter(
            self._send(
                _array(plan.token_ids),
                positions,
                _array(plan.logit_rows),
                tokens.seq_lens,
                *full.arrays(),
                *sliding.arrays(),
            )
        )
        ids, places, rows, seq_lens = (next(sent) for _ in range(4))
        return ForwardBatch(
            token_ids=ids,
            positions=places,
            query_start=tuple(plan.query_start),
            seq_lens=tuple(tokens.seq_lens.tolist()),
            num_decodes=plan.num_decodes,
            full=self._metadata(full, tokens, seq_lens, sent),
            sliding=self._metadata(sliding, tokens, seq_lens, sent),
            logit_rows=rows,
        )

    def _group(
        self, table: "_BlockTable", tokens: _Tokens, plan: GroupPlan | None, window: int | None
    ) -> "_Group":
        """One group's block table and slots; a table begins at each sequence's first block."""
        if plan is None:
            return _Group()
        size = self._layout.block_size
        table.update(plan.updates)
        block_table = table.rows(tokens.slots, max(plan.num_blocks, default=0))
        first_blocks = _array(plan.first_blocks)
        column = tokens.positions // size - first_blocks[tokens.row]
        slots = block_table[tokens.row, column] * size + tokens.positions % size
        return _Group(
            block_table=block_table,
            slots=slots,
            key_start=first_blocks * size,
            num_blocks=plan.num_blocks,
            window=window,
        )

    def _metadata(
        self, group: "_Group", tokens: _Tokens, seq_lens: Tensor, sent: Iterator[Tensor]
    ) -> AttentionMetadata | None:
        """A group as attention reads it, from what was sent of it."""
        if group.block_table is None:
            return None
        assert group.key_start is not None
        table, slots, key_start = next(sent), next(sent), next(sent)
        decodes, size = tokens.num_decodes, self._layout.block_size
        # The table is as wide as the step's longest sequence; these may be shorter.
        decode_table = table[:decodes, : max(group.num_blocks[:decodes], default=0)]
        mask = torch.empty((0, 0), dtype=torch.bool, device=self._device)
        few: FewTokens | None = None
        if self._with_masks:
            mask = decode_mask(
                decode_table, size, key_start[:decodes], seq_lens[:decodes], group.window
            )
            if tokens.num_few:
                part = slice(decodes, decodes + tokens.num_few)
                few = few_tokens(
                    table[part, : max(group.num_blocks[part])],
                    size,
                    key_start[part],
                    seq_lens[part],
                    torch.from_numpy(tokens.counts[part]).to(self._device),
                    group.window,
                )
        return AttentionMetadata(
            block_table=table,
            key_start=tuple(group.key_start.tolist()),
            slot_mapping=slots,
            decode_table=decode_table,
            decode_mask=mask,
            few=few,
        )

    def _send(self, *arrays: np.ndarray) -> list[Tensor]:
        """The arrays as int64 on the device, in one copy."""
        packed = send(np.concatenate([array.ravel() for array in arrays]), self._device)
        parts = packed.split([array.size for array in arrays])
        return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def fill_in(batch: ForwardBatch, sampled: Tensor) -> ForwardBatch:
    """The batch with token `sampled[k]` wherever it has -1 - k; `sampled`: [N] int64."""
    ids = batch.token_ids
    rows = ids.bitwise_not().clamp_min_(0)  # -1 - k is k with all bits turned over
    return replace(batch, token_ids=torch.where(ids < 0, sampled[rows], ids))


@dataclass(frozen=True, slots=True)
class _Group:
    """What the layers of one kind need of a step, on the host; empty where there are none."""

    block_table: np.ndarray | None = None
    """[B, N]."""
    slots: np.ndarray | None = None
    """[T]."""
    key_start: np.ndarray | None = None
    """[B]."""
    num_blocks: Sequence[int] = ()
    """[B] how many blocks each sequence has in the table."""
    window: int | None = None

    def arrays(self) -> list[np.ndarray]:
        """What goes to the device."""
        arrays = (self.block_table, self.slots, self.key_start)
        return [array for array in arrays if array is not None]


class _BlockTable:
    """The blocks of all running requests, one row per slot."""

    def __init__(self, num_slots: int) -> None:
        self._table = np.zeros((num_slots, 16), dtype=np.int64)

    def update(self, updates: Sequence[tuple[int, int, list[int]]]) -> None:
        """Take over what has changed: (slot, place, blocks from there on)."""
        for slot, place, blocks in updates:
            end = place + len(blocks)
            if end > self._table.shape[1]:
                grown = np.zeros((self._table.shape[0], 2 * end), dtype=np.int64)
                grown[:, : self._table.shape[1]] = self._table
                self._table = grown
            self._table[slot, place:end] = blocks

    def rows(self, slots: np.ndarray, width: int) -> np.ndarray:
        """[B, N] blocks of the sequences at `slots`; what is behind a row's end means nothing."""
        return self._table[slots, :width]


def _array(numbers: list[int]) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)

"""Decode steps as CUDA graphs: one launch instead of some thousand.

A graph repeats the same launches on the same memory, so it is recorded once per batch size, and
each step copies its inputs to where the graph reads them. Batches are padded to the next recorded
size. A padding row has no keys (length 0), writes none (slot -1) and goes to no expert.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from musespark.model.batch import AttentionMetadata, ForwardBatch
from musespark.model.decoder import Decoder
from musespark.model.kv_cache import KVCacheSpec, LayerCache
from musespark.ops.attention_paged import SequencesOnDevice

# Up to 16 the next power of two, then the next multiple of 16; larger batches run as they are.
SIZES = (1, 2, 4, 8, *range(16, 257, 16))


class DecodeGraphs:
    """Records decode steps when their size first comes, and repeats them afterwards."""

    def __init__(
        self,
        decoder: Decoder,
        caches: Sequence[LayerCache],
        spec: KVCacheSpec,
        *,
        tap_layers: Sequence[int] = (),
    ) -> None:
        self._decoder, self._caches, self._tap_layers = decoder, caches, tap_layers
        size, config = spec.block_size, decoder.config
        longest = -(-config.max_position_embeddings // size)
        window = -(-config.sliding_window // size) + 2
        # One table for all sizes: a smaller batch uses its first rows.
        self._full_table = self._new_table(min(spec.num_full_blocks, longest))
        self._sliding_table = self._new_table(min(spec.num_sliding_blocks, window))
        self._graphs: dict[int, _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def accepts(self, batch: ForwardBatch) -> bool:
        """Whether each of the batch's sequences has one new token and fits the tables.

        Alike on all ranks of a replica, so that they record and repeat the same collectives.
        """
        num_sequences = len(batch.seq_lens)
        if not num_sequences == batch.num_decodes == batch.token_ids.shape[0] <= SIZES[-1]:
            return False
        if not self._decoder.can_record(SIZES[bisect_left(SIZES, num_sequences)]):
            return False
        return all(
            metadata is None or metadata.block_table.shape[1] <= table.shape[1]
            for metadata, table in (
                (batch.full, self._full_table),
                (batch.sliding, self._sliding_table),
            )
        )

    @torch.inference_mode()
    def run(self, batch: ForwardBatch) -> tuple[Tensor, tuple[Tensor, ...]]:
        """(logits [N, V] of the wanted rows, taps [T, D]), valid until the next step."""
        count = batch.token_ids.shape[0]
        size = SIZES[bisect_left(SIZES, count)]
        if size not in self._graphs:
            self._graphs[size] = self._record(size, batch)
        graph = self._graphs[size]
        graph.load(batch)
        graph.graph.replay()
        logits, taps = graph.logits[:count], tuple(tap[:count] for tap in graph.taps)
        rows = batch.logit_rows
        if rows is None or len(rows) == count:
            return logits, taps
        return logits.index_select(0, rows), taps

    def _new_table(self, width: int) -> Tensor:
        shape = (SIZES[-1], width)
        return torch.zeros(shape, dtype=torch.int32, device=self._decoder.device)

    def _record(self, size: int, like: ForwardBatch) -> "_Graph":
        """A graph of `size` rows, recorded while all of them are padding."""
        device = self._decoder.device
        # seq_lens, then both kinds' key_start: sent together.
        lengths = torch.zeros((3, size), dtype=torch.int32, device=device)
        query_start = torch.arange(size + 1, dtype=torch.int32, device=device)

        def metadata(there: bool, table: Tensor, key_start: Tensor) -> AttentionMetadata | None:
            if not there:
                return None
            return AttentionMetadata(
                block_table=table[:size],
                key_start=(0,) * size,
                slot_mapping=torch.full((size,), -1, dtype=torch.int64, device=device),
                decode_table=table[:0],
                decode_mask=table[:0],
                on_device=SequencesOnDevice(query_start, lengths[0], key_start),
            )

        batch = ForwardBatch(
            token_ids=torch.zeros(size, dtype=torch.int64, device=device),
            positions=torch.zeros(size, dtype=torch.int64, device=device),
            query_start=tuple(range(size + 1)),
            seq_lens=(0,) * size,
            num_decodes=size,
            full=metadata(like.full is not None, self._full_table, lengths[1]),
            sliding=metadata(like.sliding is not None, self._sliding_table, lengths[2]),
            logit_rows=None,
        )

        def forward() -> tuple[Tensor, tuple[Tensor, ...]]:
            padded = replace(batch, padding=lengths[0] == 0)
            return self._decoder.forward_with_taps(padded, self._caches, self._tap_layers)

        # The first run compiles kernels and sets libraries up, which a graph cannot record.
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            forward()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
        ):
            logits, taps = forward()
        return _Graph(graph, batch, lengths, logits, taps)


@dataclass(frozen=True, slots=True)
class _Graph:
    """A recorded step, and the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    batch: ForwardBatch
    lengths: Tensor
    """[3, size] int32: seq_lens, key_start of the full layers, key_start of the sliding ones."""
    logits: Tensor
    """[size, V] float32."""
    taps: tuple[Tensor, ...]
    """[size, D] float32 each."""

    def load(self, batch: ForwardBatch) -> None:
        """Copy a step's inputs to where the graph reads them, without waiting for the device."""
        count, size = len(batch.seq_lens), self.lengths.shape[1]
        lengths = torch.zeros((3, size), dtype=torch.int32, pin_memory=True)
        lengths[0, :count] = torch.tensor(batch.seq_lens, dtype=torch.int32)
        self.batch.token_ids[:count].copy_(batch.token_ids)
        self.batch.positions[:count].copy_(batch.positions)
        for row, (mine, given) in enumerate(
            ((self.batch.full, batch.full), (self.batch.sliding, batch.sliding)), start=1
        ):
            if mine is None or given is None:
                continue
            lengths[row, :count] = torch.tensor(given.key_start, dtype=torch.int32)
            mine.slot_mapping[:count].copy_(given.slot_mapping)
            mine.slot_mapping[count:].fill_(-1)
            mine.block_table[:count, : given.block_table.shape[1]].copy_(given.block_table)
        self.lengths.copy_(lengths, non_blocking=True)

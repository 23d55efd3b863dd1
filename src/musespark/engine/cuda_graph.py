"""Steps of few tokens as CUDA graphs: one launch instead of some thousand.

A graph repeats the same launches on the same memory, so it is recorded once per batch size, and
each step copies its inputs to where the graph reads them. Batches are padded to the next recorded
size. A padding row has no keys (length 0), writes none (slot -1) and goes to no expert.

There are two kinds. In a plain step each sequence decodes one row. In any other, some have more:
guesses to verify, or the tokens of a prompt. How the rows are shared out, and how many sequences
decode, are inputs of the graph, so that one graph serves all steps with as many rows. The rows of
padding belong to a last sequence without keys.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from musespark.model.batch import AttentionMetadata, ForwardBatch
from musespark.model.decoder import Decoder
from musespark.model.kv_cache import KVCacheSpec, LayerCache
from musespark.ops.attention_paged import SequencesOnDevice
from musespark.ops.graph_recorder import SIZES, CudaRecorder, Recorder, padded_size


class StepGraphs:
    """Records steps when their size first comes, and repeats them afterwards."""

    def __init__(
        self,
        decoder: Decoder,
        caches: Sequence[LayerCache],
        spec: KVCacheSpec,
        *,
        tap_layers: Sequence[int] = (),
        recorder: Recorder | None = None,
    ) -> None:
        """`recorder`: None records CUDA graphs."""
        self._decoder, self._caches, self._tap_layers = decoder, caches, tap_layers
        # One table for all sizes: a smaller batch uses its first rows.
        self._full_table, self._sliding_table = (
            self._new_table(width) for width in spec.table_widths(decoder.config, SIZES[-1])
        )
        # Asked once: the answer takes a walk through all modules.
        self._recordable = frozenset(size for size in SIZES if decoder.can_record(size))
        self._graphs: dict[tuple[int, bool], _Graph] = {}
        self._results: dict[int, Tensor] = {}
        self._recorder = recorder or CudaRecorder(decoder.device)

    def accepts(self, batch: ForwardBatch) -> bool:
        """Whether the batch is small, and fits the tables.

        Alike on all ranks of a replica, so that they record and repeat the same collectives.
        """
        num_tokens = batch.query_start[-1]
        if num_tokens > SIZES[-1] or padded_size(num_tokens) not in self._recordable:
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
        kind = padded_size(count), _is_plain(batch)
        if kind not in self._graphs:
            self._graphs[kind] = self._record(*kind, batch)
        graph = self._graphs[kind]
        graph.load(batch)
        graph.replay()
        logits, taps = graph.logits[:count], tuple(tap[:count] for tap in graph.taps)
        rows = batch.logit_rows
        if rows is None or len(rows) == count:
            return logits, taps
        return logits.index_select(0, rows), taps

    def close(self) -> None:
        """Let the graphs go: NCCL ends no communicator that one of them still uses."""
        self._graphs.clear()

    def _new_table(self, width: int) -> Tensor:
        shape = (SIZES[-1], width)
        return torch.zeros(shape, dtype=torch.int32, device=self._decoder.device)

    def _record(self, size: int, is_plain: bool, like: ForwardBatch) -> "_Graph":
        """A graph of `size` rows, recorded while all of them are padding."""
        device = self._decoder.device
        numbers = _Numbers.empty(size, device)
        numbers.load((), (0,), 0, (), ())

        def metadata(there: bool, table: Tensor, key_start: Tensor) -> AttentionMetadata | None:
            if not there:
                return None
            return AttentionMetadata(
                block_table=table[:size],
                key_start=(0,) * size,
                slot_mapping=torch.full((size,), -1, dtype=torch.int64, device=device),
                decode_table=table[:0],
                decode_mask=table[:0],
                on_device=SequencesOnDevice(query_start, numbers.seq_lens, key_start, *decodes),
            )

        query_start = numbers.query_start
        decodes: tuple[Tensor, ...] = (numbers.num_decodes, numbers.decode_lens)
        if is_plain:
            query_start = torch.arange(size + 1, dtype=torch.int32, device=device)
            decodes = ()  # all of them: the host knows
        batch = ForwardBatch(
            token_ids=torch.zeros(size, dtype=torch.int64, device=device),
            positions=torch.zeros(size, dtype=torch.int64, device=device),
            query_start=tuple(range(size + 1)) if is_plain else (*(0,) * size, size),
            seq_lens=(0,) * size,
            num_decodes=size if is_plain else 0,
            full=metadata(like.full is not None, self._full_table, numbers.full_start),
            sliding=metadata(like.sliding is not None, self._sliding_table, numbers.sliding_start),
            logit_rows=None,
        )
        row = torch.arange(size, device=device)

        def forward() -> tuple[Tensor, tuple[Tensor, ...]]:
            padded = replace(batch, padding=row >= numbers.num_tokens)
            logits, taps = self._decoder.forward_with_taps(padded, self._caches, self._tap_layers)
            # All sizes share these: logits of a large vocabulary take hundreds of megabytes.
            logits, *copies = (self._kept(place, x) for place, x in enumerate((logits, *taps)))
            return logits, tuple(copies)

        replay, (logits, taps) = self._recorder.record(forward)
        return _Graph(replay, batch, numbers, logits, taps)

    def _kept(self, place: int, result: Tensor) -> Tensor:
        """A copy of [size, ...] in memory that outlives the graph's own."""
        if not len(result):
            return result
        if place not in self._results:
            self._results[place] = result.new_empty((SIZES[-1], *result.shape[1:]))
        return self._results[place][: len(result)].copy_(result)


@dataclass(frozen=True, slots=True)
class _Numbers:
    """What a graph of S rows reads of its sequences, at most as many as rows; sent together."""

    all: Tensor
    """[5 * S + 3] int32: the fields below, one after the other."""
    seq_lens: Tensor
    """[S]."""
    decode_lens: Tensor
    """[S] the same of sequences that decode, 0 of others."""
    full_start: Tensor
    """[S] key_start of the full layers."""
    sliding_start: Tensor
    """[S] key_start of the sliding layers."""
    query_start: Tensor
    """[S + 1]."""
    num_tokens: Tensor
    """[1] rows that are no padding."""
    num_decodes: Tensor
    """[1] sequences that decode."""

    @classmethod
    def empty(cls, size: int, device: torch.device) -> "_Numbers":
        numbers = torch.zeros(5 * size + 3, dtype=torch.int32, device=device)
        return cls(numbers, *numbers.split((size, size, size, size, size + 1, 1, 1)))

    def load(
        self,
        seq_lens: Sequence[int],
        query_start: Sequence[int],
        num_decodes: int,
        full_start: Sequence[int],
        sliding_start: Sequence[int],
    ) -> None:
        """Send a step's numbers, without waiting for the device."""
        size, num_tokens = len(self.seq_lens), query_start[-1]
        missing = size - len(seq_lens)
        values: list[int] = []
        for given in (seq_lens, seq_lens[:num_decodes], full_start, sliding_start):
            values += [*given, *[0] * (size - len(given))]
        # Sequences that are missing have no rows, but the last has all rows of padding.
        values += [*query_start[:-1], *[num_tokens] * missing, size, num_tokens, num_decodes]
        on_gpu = self.all.is_cuda
        self.all.copy_(
            torch.tensor(values, dtype=torch.int32, pin_memory=on_gpu), non_blocking=on_gpu
        )


@dataclass(frozen=True, slots=True)
class _Graph:
    """A recorded step, and the tensors that it reads and writes."""

    replay: Callable[[], None]
    batch: ForwardBatch
    numbers: _Numbers
    logits: Tensor
    """[size, V] float32."""
    taps: tuple[Tensor, ...]
    """[size, D] float32 each."""

    def load(self, batch: ForwardBatch) -> None:
        """Copy a step's inputs to where the graph reads them, without waiting for the device."""
        num_tokens, num_sequences = batch.token_ids.shape[0], len(batch.seq_lens)
        self.batch.token_ids[:num_tokens].copy_(batch.token_ids)
        self.batch.positions[:num_tokens].copy_(batch.positions)
        for mine, given in ((self.batch.full, batch.full), (self.batch.sliding, batch.sliding)):
            if mine is None or given is None:
                continue
            mine.slot_mapping[:num_tokens].copy_(given.slot_mapping)
            mine.slot_mapping[num_tokens:].fill_(-1)
            width = given.block_table.shape[1]
            mine.block_table[:num_sequences, :width].copy_(given.block_table)
        full, sliding = batch.full, batch.sliding
        self.numbers.load(
            batch.seq_lens,
            batch.query_start,
            batch.num_decodes,
            () if full is None else full.key_start,
            () if sliding is None else sliding.key_start,
        )


def _is_plain(batch: ForwardBatch) -> bool:
    """Whether each of the batch's sequences has one new token."""
    return len(batch.seq_lens) == batch.num_decodes == batch.query_start[-1]

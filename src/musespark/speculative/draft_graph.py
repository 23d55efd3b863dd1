"""What a draft does as CUDA graphs: it takes tokens in, and guesses.

Guessing, that is the block, and the tokens drawn one after the other, is recorded once for each
number of sequences and each way of drawing. Sequences of padding have no context. A draft layer
without a window would gather a table as long as the longest sequence could be, so only drafts whose
layers all have windows are recorded.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from musespark.config.model import DecoderConfig
from musespark.model.draft import ContextRows, DraftContext, DraftDecoder, PagedContext
from musespark.model.kv_cache import KVCacheSpec
from musespark.ops.graph_recorder import SIZES, Recorder, padded_size
from musespark.speculative.draw import DrawSettings
from musespark.speculative.guess import Guess

Propose = Callable[[Tensor, DraftContext, int, DrawSettings | None], Guess]
Inject = Callable[[ContextRows], None]
# Few sizes below: a product of so many rows takes no longer than one of fewer.
_FEWEST_ROWS = 16


class ContextGraphs:
    """Records taking tokens in when their number first comes, and repeats it afterwards.

    Padding repeats the last token, which is then written several times alike.
    """

    def __init__(self, inject: Inject, device: torch.device, recorder: Recorder) -> None:
        """`inject` is what is recorded."""
        self._inject, self._recorder = inject, recorder
        self._numbers = torch.arange(SIZES[-1], device=device)
        # Read by the graphs of all sizes.
        self._room: ContextRows | None = None
        self._replays: dict[int, Callable[[], None]] = {}

    def accepts(self, num_tokens: int) -> bool:
        """Whether so many tokens can be recorded."""
        return num_tokens <= SIZES[-1]

    @torch.inference_mode()
    def run(self, given: ContextRows) -> None:
        """As for `Proposer.inject`."""
        if self._room is None:
            self._room = given.map(lambda x: x.new_empty((SIZES[-1], *x.shape[1:])))
        count = len(given.positions)
        size = padded_size(max(count, _FEWEST_ROWS))
        index = self._numbers[:size].clamp_max(count - 1)
        rows = self._room.map(lambda room: room[:size])
        for mine, tensor in zip(rows, given, strict=True):
            if mine is not None and tensor is not None:
                torch.index_select(tensor, 0, index, out=mine)
        if size not in self._replays:
            self._replays[size], _ = self._recorder.record(lambda: self._inject(rows))
        self._replays[size]()


class DraftGraphs:
    """Records guessing when its size first comes, and repeats it afterwards."""

    def __init__(
        self,
        propose: Propose,
        draft: DraftDecoder,
        target: DecoderConfig,
        spec: KVCacheSpec,
        recorder: Recorder,
    ) -> None:
        """`propose` is what is recorded, for `draft`."""
        self._propose, self._device = propose, draft.device
        self._has_windows = all(layer.sliding_window for layer in draft.config.layers)
        self._full_width, self._sliding_width = spec.table_widths(
            target, draft.config.block_size + 1
        )
        self._recorder = recorder
        self._graphs: dict[tuple[int, int, bool | None], _Graph] = {}

    def accepts(self, context: DraftContext) -> bool:
        """Whether so many sequences, with such tables, can be recorded."""
        pairs = ((context.full, self._full_width), (context.sliding, self._sliding_width))
        return (
            self._has_windows
            and len(context.context_lens) <= SIZES[-1]
            and all(paged is None or paged.block_table.shape[1] <= width for paged, width in pairs)
        )

    @torch.inference_mode()
    def run(
        self,
        anchor_ids: Tensor,
        context: DraftContext,
        num_tokens: int,
        settings: DrawSettings | None,
    ) -> Guess:
        """As for `Proposer.propose`."""
        count = len(anchor_ids)
        size = padded_size(count)
        kind = size, num_tokens, None if settings is None else settings.has_filters
        if kind not in self._graphs:
            self._graphs[kind] = self._record(size, num_tokens, context, settings)
        graph = self._graphs[kind]
        graph.load(anchor_ids, context, settings)
        graph.replay()
        # Copied: distributions are needed after the next guess.
        return graph.guess.first(count)

    def _record(
        self, size: int, num_tokens: int, like: DraftContext, settings: DrawSettings | None
    ) -> "_Graph":
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=self._device)

        def paged(given: PagedContext | None, width: int) -> PagedContext | None:
            return None if given is None else PagedContext(zeros(size, width), zeros(size))

        context = DraftContext(
            zeros(size),
            paged(like.full, self._full_width),
            paged(like.sliding, self._sliding_width),
        )
        own = None if settings is None else settings.empty_like(size)
        anchor_ids = zeros(size)
        replay, guess = self._recorder.record(
            lambda: self._propose(anchor_ids, context, num_tokens, own)
        )
        return _Graph(replay, anchor_ids, context, own, guess)


@dataclass(frozen=True, slots=True)
class _Graph:
    """A recorded guess, and the tensors that it reads and writes."""

    replay: Callable[[], None]
    anchor_ids: Tensor
    context: DraftContext
    settings: DrawSettings | None
    guess: Guess

    def load(
        self, anchor_ids: Tensor, context: DraftContext, settings: DrawSettings | None
    ) -> None:
        """Copy inputs to where the graph reads them, without waiting for the device."""
        count = len(anchor_ids)
        self.anchor_ids[:count].copy_(anchor_ids)
        self.context.context_lens[:count].copy_(context.context_lens)
        self.context.context_lens[count:].zero_()
        for mine, given in (
            (self.context.full, context.full),
            (self.context.sliding, context.sliding),
        ):
            if mine is None or given is None:
                continue
            mine.block_table[:count, : given.block_table.shape[1]].copy_(given.block_table)
            mine.key_start[:count].copy_(given.key_start)
        if self.settings is not None and settings is not None:
            self.settings.load(settings)

"""Who guesses: the draft with its cache, or a stand-in."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from musespark.config.model import DecoderConfig
from musespark.model.draft import ContextRows, DraftContext, DraftDecoder
from musespark.model.draft_cache import allocate_draft_cache
from musespark.model.kv_cache import KVCacheSpec
from musespark.ops.graph_recorder import CudaRecorder, Recorder
from musespark.speculative.draft_graph import ContextGraphs, DraftGraphs
from musespark.speculative.draw import Drawing, DrawSettings
from musespark.speculative.guess import Guess


class Proposer(Protocol):
    """Guesses tokens from the target's hidden states."""

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Layers of the target whose streams it reads, as for `Decoder.forward_with_taps`."""
        ...

    @property
    def max_tokens(self) -> int:
        """Tokens that it can guess at a time."""
        ...

    def features(self, taps: Sequence[Tensor]) -> Tensor:
        """What it reads of T tokens, [T, W]: a copy of the tapped streams, [T, D] each, that may
        wait until it takes them in."""
        ...

    def inject(self, rows: ContextRows) -> None:
        """Take in tokens that stand, one at least."""
        ...

    def propose(
        self,
        anchor_ids: Tensor,
        context: DraftContext,
        num_tokens: int,
        settings: DrawSettings | None,
    ) -> Guess:
        """Guess what follows.

        Args:
            anchor_ids: [B] int64 last token of each sequence, not taken in yet.
            context: where the tokens before it lie.
            num_tokens: N.
            settings: how to draw tokens; None: the most likely ones.
        """
        ...


class DraftProposer:
    """A DSpark draft."""

    def __init__(
        self,
        draft: DraftDecoder,
        target: DecoderConfig,
        spec: KVCacheSpec,
        *,
        recorder: Recorder | None = None,
    ) -> None:
        """`spec` is that of the target's cache, whose blocks the draft shares. `recorder` records
        what the draft does; None: CUDA graphs do, on a GPU."""
        self._draft = draft
        self._caches = allocate_draft_cache(
            draft.config, target, spec, dtype=draft.dtype, device=draft.device
        )
        self._graphs: DraftGraphs | None = None
        self._context_graphs: ContextGraphs | None = None
        waits = getattr(draft.kernels, "waits_for_device", False)
        if recorder is None and draft.device.type == "cuda" and not waits:
            recorder = CudaRecorder(draft.device)
        if recorder is not None:
            self._graphs = DraftGraphs(self._guess, draft, target, spec, recorder)
            self._context_graphs = ContextGraphs(self._take_in, draft.device, recorder)

    @property
    def records(self) -> bool:
        """Whether what it does runs as graphs, which are recorded when their size first comes."""
        return self._graphs is not None

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return self._draft.config.target_layer_ids

    @property
    def max_tokens(self) -> int:
        return self._draft.config.max_tokens

    @torch.inference_mode()
    def features(self, taps: Sequence[Tensor]) -> Tensor:
        return self._draft.features(taps)

    def inject(self, rows: ContextRows) -> None:
        graphs = self._context_graphs
        if graphs is not None and graphs.accepts(len(rows.positions)):
            graphs.run(rows)
        else:
            self._take_in(rows)

    def _take_in(self, rows: ContextRows) -> None:
        self._draft.inject(*rows, self._caches)

    def propose(
        self,
        anchor_ids: Tensor,
        context: DraftContext,
        num_tokens: int,
        settings: DrawSettings | None,
    ) -> Guess:
        graphs = self._graphs
        if graphs is not None and graphs.accepts(context):
            return graphs.run(anchor_ids, context, num_tokens, settings)
        return self._guess(anchor_ids, context, num_tokens, settings)

    @torch.inference_mode()
    def _guess(
        self,
        anchor_ids: Tensor,
        context: DraftContext,
        num_tokens: int,
        settings: DrawSettings | None,
    ) -> Guess:
        """Asks the device for nothing, so that a graph can record it."""
        drawing = Drawing(settings, self._draft.kernels)
        proposal = self._draft.propose(anchor_ids, context, self._caches, num_tokens, drawing.pick)
        has_head = self._draft.config.enable_confidence_head
        distributions = drawing.distributions()
        if distributions is not None:
            distributions = self._draft.expand(distributions, 0.0)
        return Guess(proposal.token_ids, proposal.confidences if has_head else None, distributions)

"""Who guesses: the draft with its cache, or a stand-in."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from musespark.config.model import DecoderConfig
from musespark.model.draft import DraftContext, DraftDecoder
from musespark.model.draft_cache import allocate_draft_cache
from musespark.model.kv_cache import KVCacheSpec
from musespark.speculative.draw import Drawing, DrawSettings


class Guess(NamedTuple):
    """What comes next in each of B sequences, N tokens."""

    token_ids: Tensor
    """[B, N] int64."""
    confidences: Tensor | None
    """[B, N] float32 how likely each token is right if those before it are; None: not known."""
    distributions: Tensor | None
    """[B, N, V] float32 that tokens drawn at random were drawn from; None: none were."""


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

    def inject(
        self,
        taps: Sequence[Tensor],
        positions: Tensor,
        full_slots: Tensor | None,
        sliding_slots: Tensor | None,
    ) -> None:
        """Take in T tokens that stand.

        Args:
            taps: one stream [T, D] per tapped layer.
            positions: [T] int64 of each token in its sequence.
            full_slots: [T] int64 row of each token in the flattened cache of the full layers; None:
                the target has no such layers.
            sliding_slots: likewise.
        """
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

    def __init__(self, draft: DraftDecoder, target: DecoderConfig, spec: KVCacheSpec) -> None:
        """`spec` is that of the target's cache, whose blocks the draft shares."""
        self._draft = draft
        self._caches = allocate_draft_cache(
            draft.config, target, spec, dtype=draft.dtype, device=draft.device
        )

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return self._draft.config.target_layer_ids

    @property
    def max_tokens(self) -> int:
        return self._draft.config.max_tokens

    def inject(
        self,
        taps: Sequence[Tensor],
        positions: Tensor,
        full_slots: Tensor | None,
        sliding_slots: Tensor | None,
    ) -> None:
        self._draft.inject(taps, positions, full_slots, sliding_slots, self._caches)

    @torch.inference_mode()
    def propose(
        self,
        anchor_ids: Tensor,
        context: DraftContext,
        num_tokens: int,
        settings: DrawSettings | None,
    ) -> Guess:
        drawing = Drawing(settings)
        proposal = self._draft.propose(anchor_ids, context, self._caches, num_tokens, drawing.pick)
        has_head = self._draft.config.enable_confidence_head
        distributions = drawing.distributions()
        if distributions is not None:
            distributions = self._draft.expand(distributions, 0.0)
        return Guess(proposal.token_ids, proposal.confidences if has_head else None, distributions)

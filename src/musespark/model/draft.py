"""A DSpark draft: several tokens in one pass from the target's hidden states (docs/speculative.md).

Context never runs through the draft's layers: the target's tapped streams of a token become that
token's key and value in each of them. A block of one known token, the anchor, and masks behind it
does; and a small sequential head makes the block's tokens fit one another.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from musespark.config.draft import DraftConfig
from musespark.config.model import DecoderConfig
from musespark.errors import CheckpointError
from musespark.model.draft_cache import draft_kinds
from musespark.model.draft_layer import BlockInputs, DraftLayer, DraftNorm
from musespark.model.kv_cache import LayerCache
from musespark.modules.linear import Linear
from musespark.ops.attention_block import BlockView, block_view
from musespark.ops.kernel_set import choose_kernels
from musespark.ops.precision import wide_dtype
from musespark.ops.rotary import rotary_angles
from musespark.parallel.shard import HasTensor, WeightSlot, weight_slots

Pick = Callable[[int, Tensor], Tensor]
"""Draws the tokens at one place of all blocks: (place, logits [B, V_draft]) -> draft ids [B]."""


@dataclass(frozen=True, slots=True)
class PagedContext:
    """The draft's cache as its layers of one kind (full or sliding) see it."""

    block_table: Tensor
    """[B, M] int64 blocks of each sequence in order of position; the rest of a row is padding,
    which may be any valid block."""
    key_start: Tensor
    """[B] int64 position of the first key in each sequence's first block of the table."""


@dataclass(frozen=True, slots=True)
class DraftContext:
    """The sequences to propose for, and where their context lies in the draft's cache."""

    context_lens: Tensor
    """[B] int64 tokens whose context was injected: the position of the anchor."""
    full: PagedContext | None
    """Of the layers that page with the target's full layers; None: there are none."""
    sliding: PagedContext | None
    """Likewise, with the target's sliding layers."""


class ContextRows(NamedTuple):
    """Tokens that the target has computed and that stand, for `DraftDecoder.inject`."""

    features: Tensor
    """[T, taps * D_target] of the tokens' tapped streams."""
    positions: Tensor
    """[T] int64 position of each token in its sequence."""
    full_slots: Tensor | None
    """[T] int64 row of each token in the flattened cache of the layers that page with the target's
    full layers; None: the target has no such layers."""
    sliding_slots: Tensor | None
    """Likewise, with the target's sliding layers."""

    def map(self, function: Callable[[Tensor], Tensor]) -> "ContextRows":
        """With another tensor for each."""
        full, sliding = (
            None if slots is None else function(slots)
            for slots in (self.full_slots, self.sliding_slots)
        )
        return ContextRows(function(self.features), function(self.positions), full, sliding)


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a draft proposes for each sequence, N tokens."""

    token_ids: Tensor
    """[B, N] int64 of the target's vocabulary."""
    logits: Tensor
    """[B, N, V_draft] float32 that they were drawn from: capped, in the draft's vocabulary."""
    confidences: Tensor
    """[B, N] float32 how likely the target accepts each token if it accepts those before it; 1
    from a draft without a confidence head."""


# Setting up a product of a new shape takes longer than the product.
_ROUND_ROWS = 16


def _most_likely(_place: int, logits: Tensor) -> Tensor:
    return logits.argmax(dim=-1)


class MarkovHead(nn.Module):
    """What the token before says about the next one: w2(w1[token]), of low rank."""

    def __init__(
        self,
        vocab_size: int,
        draft_vocab_size: int,
        rank: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank, dtype=dtype, device=device, _freeze=True)
        self.markov_w2 = Linear(
            rank, draft_vocab_size, dtype=dtype, device=device, wide_output=True
        )

    def embed(self, token_ids: Tensor) -> Tensor:
        """[B] ids of the target's vocabulary -> [B, rank]."""
        return F.embedding(token_ids, self.markov_w1.weight)


class ConfidenceHead(nn.Module):
    """sigmoid(proj(x)) in float32."""

    def __init__(self, width: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1, dtype=wide_dtype(dtype), device=device)
        self.proj.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, width] -> [B, N]."""
        return self.proj(x.to(self.proj.weight.dtype)).squeeze(-1).sigmoid()


class DraftDecoder(nn.Module):
    """A DSpark draft on the cache of its own.

    context  = hidden_norm(fc(cat(taps)))      # -> keys and values of every layer
    s        = embed([anchor, mask, mask, ...])
    s        = layer(s)  for every layer       # over the context and the block
    base     = norm(s) @ Wlm
    logits_i = cap(multiplier * (base_i + w2(w1[token before])))    # one i after the other
    """

    d2t: Tensor

    def __init__(
        self,
        config: DraftConfig,
        target: DecoderConfig,
        embedding: Tensor,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """Weights are left uninitialized, for a loader to fill.

        Args:
            config: what to build.
            target: what it proposes tokens for.
            embedding: [V, D] the target's embedding table, read and not copied.
            dtype: the compute dtype: bfloat16, float32, or float64 (tests).
            device: where the weights live.

        Raises:
            ConfigError: the draft was made for another target.
        """
        super().__init__()
        config.check_target(target)
        device, wide = torch.device(device), wide_dtype(dtype)
        self.config, self.dtype, self.embedding = config, dtype, embedding.detach()
        self.kernels = choose_kernels(device, dtype)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        taps = len(config.target_layer_ids)
        self.fc = Linear(taps * config.target_hidden_size, hidden, dtype=dtype, device=device)
        self.hidden_norm = DraftNorm(hidden, eps, centre=0.0, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            DraftLayer(config, index, dtype=dtype, device=device)
            for index in range(config.num_hidden_layers)
        )
        centre = config.output_norm_center
        self.norm = DraftNorm(hidden, eps, centre=centre, dtype=dtype, device=device)
        self.lm_head = Linear(
            hidden, config.draft_vocab_size, dtype=dtype, device=device, wide_output=True
        )
        rank = config.markov_rank
        self.markov_head = (
            MarkovHead(target.vocab_size, config.draft_vocab_size, rank, dtype=dtype, device=device)
            if rank
            else None
        )
        confidence_width = hidden + (rank if config.confidence_head_with_markov else 0)
        self.confidence_head = (
            ConfidenceHead(confidence_width, dtype=dtype, device=device)
            if config.enable_confidence_head
            else None
        )
        d2t = torch.empty(config.draft_vocab_size, dtype=torch.int64, device=device)
        self.register_buffer("d2t", d2t, persistent=False)
        self._residual_dtype = wide if config.residual_dtype == "fp32" else dtype
        self._vocab_size = target.vocab_size
        self._pages_full = [kind == "full_attention" for kind in draft_kinds(config, target)]

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return self.norm.weight.device

    def weight_slots(self, has: HasTensor) -> Iterator[WeightSlot]:
        """What the draft takes from its checkpoint."""
        for name, module in self.named_children():
            yield from weight_slots(module, f"{name}.", has)
        yield WeightSlot("d2t", tuple(self.d2t.shape), self._take_d2t, dtypes=(torch.int64,))

    def _take_d2t(self, offsets: Tensor) -> None:
        """Check the map from the draft's vocabulary to the target's before it is used."""
        targets = offsets + torch.arange(len(offsets))
        outside = ((targets < 0) | (targets >= self._vocab_size)).nonzero()
        if len(outside):
            token = int(outside[0])
            raise CheckpointError(
                f"d2t: draft token {token} becomes target token {int(targets[token])}, but the "
                f"target's vocabulary is 0 to {self._vocab_size - 1}. This draft was made for "
                "another target: set `draft` to one that was trained for this model."
            )
        if len(targets.unique()) < len(targets):
            raise CheckpointError(
                "d2t: several draft tokens become the same target token, so that the draft's "
                "probabilities mean nothing. Save the draft again with one draft token each."
            )
        self.d2t.copy_(offsets)

    def finish_loading(self) -> None:
        """Derive what is derived from weights, once they are all in place."""
        for module in self.modules():
            finish = getattr(type(module), "finish_loading", None)
            if module is not self and finish is not None:
                finish(module)

    def pack(self) -> None:
        """Move weights to the machine's fastest layout; their plain form is given up."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()

    def features(self, taps: Sequence[Tensor]) -> Tensor:
        """What `inject` reads of tokens: [T, taps * D_target] in the compute dtype, of one stream
        [T, D_target] per entry of `target_layer_ids`, in its order."""
        num_tokens, width = taps[0].shape
        features = taps[0].new_empty((num_tokens, len(taps) * width), dtype=self.dtype)
        return torch.cat(list(taps), dim=1, out=features)

    @torch.inference_mode()
    def inject(
        self,
        features: Tensor,
        positions: Tensor,
        full_slots: Tensor | None,
        sliding_slots: Tensor | None,
        caches: Sequence[LayerCache],
    ) -> None:
        """Write the context of tokens that the target has computed and that stand.

        Args:
            features, positions, full_slots, sliding_slots: as in `ContextRows`; no slots are needed
                of layers that the draft has none of.
            caches: of the draft's layers, written.
        """
        # Rows of padding, which are not written, so that there are products of a few shapes only.
        padding = -len(positions) % _ROUND_ROWS
        features = F.pad(features, (0, 0, 0, padding))
        context = self.hidden_norm(self.fc(features))
        angles = self._angles(F.pad(positions, (0, padding)))
        layers = cast("list[DraftLayer]", list(self.layers))
        for layer, kind, pages_full, cache in zip(
            layers, self.config.layers, self._pages_full, caches, strict=True
        ):
            slots = full_slots if pages_full else sliding_slots
            assert slots is not None
            rotation = angles if kind.rope_theta > 0 else None
            layer.self_attn.write_context(context, rotation, slots, cache)

    @torch.inference_mode()
    def propose(
        self,
        anchor_ids: Tensor,
        context: DraftContext,
        caches: Sequence[LayerCache],
        num_tokens: int,
        pick: Pick = _most_likely,
    ) -> Proposal:
        """Propose the tokens behind each sequence's anchor. Leaves no trace in the cache.

        Args:
            anchor_ids: [B] int64 the newest token of each sequence, which the target has not
                computed yet; its position is the sequence's context length.
            context: the sequences.
            caches: of the draft's layers, read.
            num_tokens: N, from 1 to the config's `max_tokens`.
            pick: draws tokens from logits.
        """
        hidden = self._run_block(anchor_ids, context, caches, num_tokens)  # [B, N, D]
        base = self.lm_head(hidden.flatten(0, 1)).unflatten(0, (-1, num_tokens))
        previous, tokens, logits, embedded = anchor_ids, [], [], []
        for place in range(num_tokens):
            bias: Tensor | float = 0.0
            if self.markov_head is not None:
                embedded.append(self.markov_head.embed(previous))
                bias = self.markov_head.markov_w2(embedded[-1])
            logits.append(self._cap(base[:, place] + bias))
            picked = pick(place, logits[-1])
            previous = picked + self.d2t[picked]
            tokens.append(previous)
        return Proposal(
            torch.stack(tokens, dim=1),
            torch.stack(logits, dim=1),
            self._confidences(hidden, embedded),
        )

    def expand(self, values: Tensor, fill: float) -> Tensor:
        """[..., V_draft] by the draft's tokens -> [..., V] by the target's, `fill` elsewhere."""
        targets = self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)
        out = values.new_full((*values.shape[:-1], self._vocab_size), fill)
        return out.index_copy_(-1, targets, values)

    def _run_block(
        self,
        anchor_ids: Tensor,
        context: DraftContext,
        caches: Sequence[LayerCache],
        num_tokens: int,
    ) -> Tensor:
        """The final norm's output [B, N, D] at the rows that propose."""
        config = self.config
        assert 1 <= num_tokens <= config.max_tokens
        rows = num_tokens + (not config.sample_from_anchor)
        ids = anchor_ids.new_full((len(anchor_ids), rows), config.mask_token_id)
        ids[:, 0] = anchor_ids
        stream = F.embedding(ids.flatten(), self.embedding).to(self._residual_dtype)
        inputs = self._block_inputs(context, caches[0].key.shape[1], rows)
        layers = cast("list[DraftLayer]", list(self.layers))
        norms = [*(layer.self_attn.pre_qkv_proj_norm for layer in layers[1:]), self.norm]
        normed = layers[0].self_attn.pre_qkv_proj_norm(stream, out_dtype=self.dtype)
        for layer, given, cache, next_norm in zip(layers, inputs, caches, norms, strict=True):
            normed, stream = layer(normed, stream, given, cache, next_norm)
        return normed.unflatten(0, (-1, rows))[:, rows - num_tokens :]

    def _block_inputs(self, context: DraftContext, block_size: int, rows: int) -> list[BlockInputs]:
        """What each layer must know of the blocks; alike layers share it."""
        steps = torch.arange(rows, device=context.context_lens.device)
        positions = (context.context_lens[:, None] + steps).flatten()
        angles, query_scale = self._angles(positions), self._query_scale(positions)
        kinds = [
            (pages_full, layer.sliding_window)
            for pages_full, layer in zip(self._pages_full, self.config.layers, strict=True)
        ]
        views = {
            (pages_full, window): self._view(context, pages_full, block_size, rows, window)
            for pages_full, window in set(kinds)
        }
        return [
            BlockInputs(
                view=views[kind],
                angles=angles if layer.rope_theta > 0 else None,
                query_scale=query_scale if layer.tunes_temperature else None,
            )
            for kind, layer in zip(kinds, self.config.layers, strict=True)
        ]

    def _view(
        self,
        context: DraftContext,
        pages_full: bool,
        block_size: int,
        rows: int,
        window: int | None,
    ) -> BlockView:
        paged = context.full if pages_full else context.sliding
        assert paged is not None
        return block_view(
            paged.block_table,
            block_size,
            paged.key_start,
            context.context_lens,
            rows,
            window,
            causal=self.config.causal,
        )

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        """(cos, sin) of the one theta that a draft has; None where no layer rotates."""
        theta = max(layer.rope_theta for layer in self.config.layers)
        if theta == 0:
            return None
        return rotary_angles(positions, theta, self.config.head_dim, wide_dtype(self.dtype))

    def _query_scale(self, positions: Tensor) -> Tensor | None:
        """max(1, 1 + ln((position + 1) / floor) * constant), [T, 1, 1]; None: not tuned."""
        floor = self.config.attn_temperature_tuning_floor_scale
        constant = self.config.attn_temperature_tuning_q_scale_constant
        if floor is None or constant is None:
            return None
        growth = ((positions.to(wide_dtype(self.dtype)) + 1) / floor).log() * constant
        return (growth + 1).clamp_min(1)[:, None, None]

    def _cap(self, scores: Tensor) -> Tensor:
        """Multiplied, then softly capped where the draft has a cap; `scores` may be overwritten."""
        multiplier, cap = self.config.output_multiplier, self.config.output_soft_cap_temp
        if cap is None:
            return scores * multiplier
        return self.kernels.soft_cap(scores, multiplier, cap)

    def _confidences(self, hidden: Tensor, embedded: list[Tensor]) -> Tensor:
        if self.confidence_head is None:
            return hidden.new_ones(hidden.shape[:2], dtype=wide_dtype(self.dtype))
        if self.config.confidence_head_with_markov:
            hidden = torch.cat((hidden, torch.stack(embedded, dim=1)), dim=-1)
        return self.confidence_head(hidden)

"""The whole text decoder: token ids in, float32 logits out."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from musespark.config.model import DecoderConfig
from musespark.errors import RequestError
from musespark.model.attention import RotaryAngles
from musespark.model.batch import AttentionMetadata, ForwardBatch
from musespark.model.kv_cache import LayerCache
from musespark.model.layer import DecoderLayer
from musespark.model.stage import StageLink
from musespark.modules.norms import RMSNorm
from musespark.modules.vocabulary import VocabularyEmbedding, VocabularyHead
from musespark.moe.block import runs_on_cut_tokens
from musespark.ops.attention_paged import PagedSequences
from musespark.ops.kernel_set import choose_kernels
from musespark.ops.precision import wide_dtype
from musespark.ops.rotary import rotary_angles
from musespark.parallel.layout import ONE_PROCESS, Layout
from musespark.parallel.placement import Placement, StepPlaces
from musespark.parallel.shard import HasTensor, WeightSlot, weight_slots


class Decoder(nn.Module):
    """A Muse Spark text decoder on flat tokens.

    s      = rms(embed[ids])                                    # float32, never rounded
    s      = layer(s)  for every layer, boundaries fused
    logits = cap * tanh(multiplier * (norm(s) @ Wlm) / cap)

    On many ranks this is one rank's part: the layers of its pipeline stage, and of each its share.
    Every rank of a replica runs the same batches in the same order.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        layout: Layout = ONE_PROCESS,
    ) -> None:
        """Weights are left uninitialized, for a loader to fill.

        Args:
            config: what to build.
            dtype: the compute dtype: bfloat16, float32, or float64 (tests).
            device: where the weights live.
            layout: how the model is spread over processes, and what computes its experts.
        """
        super().__init__()
        device = torch.device(device)
        self.config, self.dtype, self.layout, self.device = config, dtype, layout, device
        self.kernels = choose_kernels(device, dtype, config.head_dim)
        self._link = StageLink(layout.mesh.pipeline)
        vocabulary, width = config.vocab_size, config.hidden_size
        self.embed_tokens: VocabularyEmbedding | None = None
        if self._link.is_first:
            self.embed_tokens = VocabularyEmbedding(
                vocabulary, width, axis=layout.tensor, dtype=dtype, device=device
            )
        self._here = layout.layers_here(config.num_hidden_layers)
        self._first_cut_layer = _first_cut_layer(config, layout)
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, dtype=dtype, device=device, layout=layout)
            if index in self._here
            else nn.Identity()  # another stage's
            for index in range(config.num_hidden_layers)
        )
        self.norm: RMSNorm | None = None
        self.lm_head: VocabularyHead | None = None
        if self._link.is_last:
            self.norm = RMSNorm(width, config.rms_norm_eps, dtype=dtype, device=device)
            self.lm_head = VocabularyHead(
                width, vocabulary, axis=layout.tensor, dtype=dtype, device=device
            )

    @property
    def waits_for_device(self) -> bool:
        """Whether every forward pass asks the device for numbers, which no CUDA graph records."""
        parts = [self.kernels, self._link, *self.layers.modules()]
        return any(getattr(part, "waits_for_device", False) for part in parts)

    def can_record(self, num_tokens: int) -> bool:
        """Whether a CUDA graph can record a pass of so many tokens.

        Where tokens are cut, rows travel, and the host must know how many.
        """
        return not self.waits_for_device and not self.layout.cuts(num_tokens)

    def weight_slots(self, prefix: str, has: HasTensor) -> Iterator[WeightSlot]:
        """What the decoder takes from a checkpoint whose text weights start with `prefix`."""
        for name in ("embed_tokens", "layers", "norm", "lm_head"):
            module = getattr(self, name)
            if module is not None:
                where = "" if name == "lm_head" else prefix
                yield from weight_slots(module, f"{where}{name}.", has)

    def finish_loading(self) -> None:
        """Derive what is derived from weights, once they are all in place."""
        self._for_each_part("finish_loading")

    def pack(self) -> None:
        """Move weights to the machine's fastest layout.

        Their plain form is given up piece by piece, so that memory grows by one tensor at most.
        """
        self._for_each_part("pack")

    def _for_each_part(self, method: str) -> None:
        """Call a method of every module below this one that has it."""
        for module in self.modules():
            kind: Any = type(module)
            if module is not self and hasattr(kind, method):
                getattr(kind, method)(module)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache] | None = None) -> Tensor:
        """Logits [N, V] float32 of the batch's `logit_rows`.

        Args:
            batch: the step's tokens.
            caches: the keys and values of every layer here, read and written; None: nothing is
                cached.

        Returns:
            the logits, on every rank of the last pipeline stage; [0, V] on ranks of other stages.
        """
        return self.forward_with_taps(batch, caches, ())[0]

    @torch.inference_mode()
    def forward_with_taps(
        self,
        batch: ForwardBatch,
        caches: Sequence[LayerCache] | None,
        tap_layers: Sequence[int],
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Logits as `forward` gives them, and the stream behind some layers (auxiliary hidden
        states), which costs nothing: each is the stream that the next boundary writes anyway.

        Args:
            batch, caches: as for `forward`.
            tap_layers: ascending layer numbers: k is layer k's output, -1 the normed embedding.

        Returns:
            (logits [N, V] float32, one stream [T, D] float32 per tap), blended and not normed;
            of all of the batch's tokens, whichever rows want logits. Both are the last pipeline
            stage's; other stages give none.
        """
        in_order = tuple(k for k in range(-1, len(self.layers)) if k in tap_layers)
        assert in_order == tuple(tap_layers)
        hidden_states, taps = self._run_layers(batch, caches, tap_layers)
        if hidden_states is None:
            nothing = torch.empty((0, self.config.vocab_size), device=self.device)
            return nothing.to(wide_dtype(self.dtype)), ()
        if batch.logit_rows is not None:
            hidden_states = hidden_states.index_select(0, batch.logit_rows)
        return self._logits(hidden_states), taps

    def compute_logits(self, token_ids: Tensor | Sequence[int]) -> Tensor:
        """Logits [T, V] float32 of one sequence [T], all positions at once, without a cache.

        Raises:
            RequestError: more than one sequence, or a token outside the vocabulary.
        """
        ids = torch.as_tensor(token_ids, dtype=torch.int64, device=self.device)
        if ids.dim() != 1:
            raise RequestError(
                f"token_ids: must be the tokens of one sequence, [T], found {list(ids.shape)}."
            )
        outside = ids[(ids < 0) | (ids >= self.config.vocab_size)]
        if len(outside):
            raise RequestError(
                f"token_ids: {int(outside[0])} is outside the vocabulary "
                f"(0 to {self.config.vocab_size - 1})."
            )
        return self.forward(ForwardBatch.uncached(ids))

    def _run_layers(
        self,
        batch: ForwardBatch,
        caches: Sequence[LayerCache] | None,
        tap_layers: Sequence[int],
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """The final norm's output [T, D], and the streams [T, D] behind `tap_layers`.

        On a stage before the last: (None, nothing); both are on their way to the next stage.
        """
        num_tokens = batch.token_ids.shape[0]
        places = StepPlaces.of(self.layout, num_tokens, batch.padding, self.device)
        place = places.cut if self._first_cut_layer == 0 else places.whole
        stream, taps = self._enter(batch, place, tap_layers)
        layers = [cast("DecoderLayer", self.layers[index]) for index in self._here]
        # Each layer's last boundary norms for the next layer, or for the logits.
        next_norms = [*(layer.input_layernorm for layer in layers[1:]), self.norm]
        normed = layers[0].input_layernorm(stream, out_dtype=self.dtype)
        angles = self._rotary_angles(batch.positions)
        full, sliding = (self._sequences(batch, kind) for kind in (batch.full, batch.sliding))
        for row, (index, layer) in enumerate(zip(self._here, layers, strict=True)):
            kind = self.config.layers[index]
            before, place = place, places.cut if index >= self._first_cut_layer else places.whole
            residual = layer(
                normed,
                stream,
                full if kind.sliding_window is None else sliding,
                caches[row] if caches is not None and num_tokens else None,
                angles[kind.rope_theta],
                before,
                place,
            )
            next_norm = next_norms[row]
            if next_norm is None:
                stream = residual.blend()  # a boundary does not cross stages
            else:
                normed, stream = residual.boundary(next_norm)
            if index in tap_layers:
                taps.append(place.gather(stream))
        if self.norm is None:
            self._link.send(stream, taps)
            return None, ()
        return place.gather(normed), tuple(taps)

    def _enter(
        self, batch: ForwardBatch, place: Placement, tap_layers: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """The stream in front of this stage's first layer, and the taps collected by then."""
        wide = wide_dtype(self.dtype)
        if self.embed_tokens is None:
            earlier = sum(layer < self._here.start for layer in tap_layers)
            shape = (batch.token_ids.shape[0], self.config.hidden_size)
            return self._link.receive(torch.empty(shape, dtype=wide, device=self.device), earlier)
        embedded = place.reduce(self.embed_tokens(batch.token_ids))
        stream = self.kernels.rms_norm(embedded, None, self.config.rms_norm_eps, out_dtype=wide)
        return stream, [place.gather(stream)] if -1 in tap_layers else []

    def _sequences(
        self, batch: ForwardBatch, metadata: AttentionMetadata | None
    ) -> PagedSequences | None:
        """The step's sequences as the layers of one kind see them."""
        if metadata is None:
            return None
        on_device = metadata.on_device or self.kernels.sequences_on_device(
            batch.query_start, batch.seq_lens, metadata.key_start, self.device
        )
        return PagedSequences(
            num_decodes=batch.num_decodes,
            query_start=batch.query_start,
            seq_lens=batch.seq_lens,
            key_start=metadata.key_start,
            block_table=metadata.block_table,
            decode_table=metadata.decode_table,
            decode_mask=metadata.decode_mask,
            slot_mapping=metadata.slot_mapping,
            on_device=on_device,
            few=metadata.few,
        )

    def _rotary_angles(self, positions: Tensor) -> dict[float, RotaryAngles | None]:
        """The step's angles for each theta in use; None for theta 0."""
        thetas = {layer.rope_theta for layer in self.config.layers}
        wide, head_dim = wide_dtype(self.dtype), self.config.head_dim
        return {
            theta: rotary_angles(positions, theta, head_dim, wide) if theta > 0 else None
            for theta in thetas
        }

    def _logits(self, hidden_states: Tensor) -> Tensor:
        assert self.lm_head is not None
        config = self.config
        logits = self.kernels.soft_cap(
            self.lm_head(hidden_states), config.output_multiplier, config.final_logit_softcapping
        )
        return self.lm_head.gather(logits)


def _first_cut_layer(config: DecoderConfig, layout: Layout) -> int:
    """The first layer that leaves the stream cut along tokens, in steps that are cut at all.

    The leading layers that need all tokens keep it whole: cutting it would only cost a gather.
    """
    layers = range(config.num_hidden_layers)
    return next((k for k in layers if runs_on_cut_tokens(config, k, layout)), len(layers))

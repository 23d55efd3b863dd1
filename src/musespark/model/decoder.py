"""The whole text decoder: token ids in, float32 logits out."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from musespark.config.model import DecoderConfig
from musespark.config.parallel import MoEBackend
from musespark.errors import RequestError
from musespark.model.attention import RotaryAngles
from musespark.model.batch import AttentionMetadata, ForwardBatch
from musespark.model.kv_cache import LayerCache
from musespark.model.layer import DecoderLayer
from musespark.modules.linear import Linear
from musespark.modules.norms import RMSNorm
from musespark.ops.attention_paged import PagedSequences
from musespark.ops.kernel_set import choose_kernels
from musespark.ops.precision import wide_dtype
from musespark.ops.rotary import rotary_angles
from musespark.parallel.mesh import SINGLE_PROCESS, Mesh
from musespark.parallel.shard import HasTensor, WeightSlot, weight_slots


class Decoder(nn.Module):
    """A Muse Spark text decoder on flat tokens.

    s      = rms(embed[ids])                                    # float32, never rounded
    s      = layer(s)  for every layer, boundaries fused
    logits = cap * tanh(multiplier * (norm(s) @ Wlm) / cap)
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        mesh: Mesh = SINGLE_PROCESS,
        moe_backend: MoEBackend = "auto",
    ) -> None:
        """Weights are left uninitialized, for a loader to fill.

        Args:
            config: what to build.
            dtype: the compute dtype: bfloat16, float32, or float64 (tests).
            device: where the weights live.
            mesh: this process's place among the others.
            moe_backend: what computes the routed experts.
        """
        super().__init__()
        device = torch.device(device)
        self.config, self.dtype, self.mesh = config, dtype, mesh
        self.kernels = choose_kernels(device, dtype)
        self.embed_tokens = nn.Embedding(
            config.vocab_size, config.hidden_size, dtype=dtype, device=device, _freeze=True
        )
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, dtype=dtype, device=device, moe_backend=moe_backend)
            for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.lm_head = Linear(
            config.hidden_size, config.vocab_size, dtype=dtype, device=device, wide_output=True
        )

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return self.norm.weight.device

    @property
    def waits_for_device(self) -> bool:
        """Whether a forward pass asks the device for numbers, which no CUDA graph can record."""
        parts = [self.kernels, *self.layers.modules()]
        return any(getattr(part, "waits_for_device", False) for part in parts)

    def weight_slots(self, prefix: str, has: HasTensor) -> Iterator[WeightSlot]:
        """What the decoder takes from a checkpoint whose text weights start with `prefix`."""
        for name in ("embed_tokens", "layers", "norm"):
            yield from weight_slots(getattr(self, name), f"{prefix}{name}.", has)
        yield from weight_slots(self.lm_head, "lm_head.", has)

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
            caches: every layer's keys and values, read and written; None: nothing is cached.
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
            of all of the batch's tokens, whichever rows want logits.
        """
        in_order = tuple(k for k in range(-1, len(self.layers)) if k in tap_layers)
        assert in_order == tuple(tap_layers)
        hidden_states, taps = self._run_layers(batch, caches, tap_layers)
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
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The final norm's output [T, D], and the streams [T, D] behind `tap_layers`."""
        angles = self._rotary_angles(batch.positions)
        embedded = F.embedding(batch.token_ids, self.embed_tokens.weight)
        stream = self.kernels.rms_norm(
            embedded, None, self.config.rms_norm_eps, out_dtype=wide_dtype(self.dtype)
        )
        layers = cast("list[DecoderLayer]", list(self.layers))
        # Each layer's last boundary norms for the next layer, or for the logits.
        next_norms = [*(layer.input_layernorm for layer in layers[1:]), self.norm]
        normed = layers[0].input_layernorm(stream, out_dtype=self.dtype)
        taps = [stream] if -1 in tap_layers else []
        full, sliding = (self._sequences(batch, kind) for kind in (batch.full, batch.sliding))
        for index, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
            cache = None if caches is None else caches[index]
            kind = self.config.layers[index]
            sequences = full if kind.sliding_window is None else sliding
            residual = layer(
                normed, stream, sequences, cache, angles[kind.rope_theta], batch.padding
            )
            normed, stream = residual.boundary(next_norm)
            if index in tap_layers:
                taps.append(stream)
        return normed, tuple(taps)

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
        config = self.config
        return self.kernels.soft_cap(
            self.lm_head(hidden_states), config.output_multiplier, config.final_logit_softcapping
        )

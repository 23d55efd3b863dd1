"""Self-attention: fused projections, QK-norm, optional RoPE, paged attention, gated output."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from musespark.config.model import DecoderConfig, LayerConfig
from musespark.model.batch import AttentionMetadata, ForwardBatch
from musespark.model.kv_cache import LayerCache
from musespark.modules.linear import FusedLinear, Linear
from musespark.ops.attention_decode import attention_decode, gather_blocks
from musespark.ops.attention_prefill import attention_prefill
from musespark.ops.kv_write import kv_write
from musespark.ops.output_gate import output_gate
from musespark.ops.qk_norm_rope import qk_norm_rope
from musespark.parallel.shard import HasTensor, WeightSlot, weight_slots

RotaryAngles = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """o_proj( rms(attention(q, k, v)) * sigmoid(gate) ), q and k normed per head.

    Full or sliding, with RoPE or without: read from the layer's config when built.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layer: LayerConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.window = layer.sliding_window
        self.scale = config.attention_scale
        self.eps = config.rms_norm_eps
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.qkvg_proj = FusedLinear(
            config.hidden_size,
            {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size, "gate_proj": q_size},
            dtype=dtype,
            device=device,
        )
        self.o_proj = Linear(q_size, config.hidden_size, dtype=dtype, device=device)

    def weight_slots(self, prefix: str, has: HasTensor) -> Iterator[WeightSlot]:
        """The four projections that are fused here stand apart in a checkpoint."""
        yield from self.qkvg_proj.part_slots(prefix)
        yield from weight_slots(self.o_proj, f"{prefix}o_proj.", has)

    def forward(
        self,
        hidden_states: Tensor,
        batch: ForwardBatch,
        cache: LayerCache | None,
        angles: RotaryAngles | None,
    ) -> Tensor:
        """[T, D], normed -> [T, D].

        Args:
            hidden_states: [T, D], normed by the caller.
            batch: the step.
            cache: this layer's keys and values; None: attend to the step's own tokens.
            angles: (cos, sin) of the step's positions; None on a layer without RoPE.
        """
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkvg = self.qkvg_proj(hidden_states).unflatten(-1, (-1, self.head_dim))
        qk, value, gate = qkvg.split((heads + kv_heads, kv_heads, heads), dim=1)
        query, key = qk_norm_rope(qk, self.eps, angles).split((heads, kv_heads), dim=1)
        if cache is None:
            attended = attention_prefill(query, key, value, self.scale, self.window)
        else:
            metadata = batch.full if self.window is None else batch.sliding
            assert metadata is not None
            kv_write(key, value, cache.key, cache.value, metadata.slot_mapping)
            attended = self._attend_paged(query, batch, metadata, cache)
        return self.o_proj(output_gate(attended, gate, self.eps).flatten(1))

    def _attend_paged(
        self, query: Tensor, batch: ForwardBatch, metadata: AttentionMetadata, cache: LayerCache
    ) -> Tensor:
        """Decoding sequences in one call, then each prefilling sequence in its own."""
        outputs = []
        if decodes := batch.num_decodes:
            outputs.append(
                attention_decode(
                    query[:decodes],
                    cache.key,
                    cache.value,
                    metadata.decode_table,
                    metadata.decode_mask,
                    self.scale,
                )
            )
        for row in range(decodes, len(batch.seq_lens)):
            start, stop = batch.query_start[row], batch.query_start[row + 1]
            num_keys = batch.seq_lens[row] - metadata.key_start[row]
            blocks = metadata.block_table[row, : -(-num_keys // cache.key.shape[1])]
            # [S, kv_heads, head_dim]; the cache may hold a narrower type.
            key = gather_blocks(cache.key, blocks)[:num_keys].to(query.dtype)
            value = gather_blocks(cache.value, blocks)[:num_keys].to(query.dtype)
            outputs.append(
                attention_prefill(query[start:stop], key, value, self.scale, self.window)
            )
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

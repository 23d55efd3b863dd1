"""Self-attention: fused projections, QK-norm, optional RoPE, paged attention, gated output."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from musespark.config.model import DecoderConfig, LayerConfig
from musespark.model.kv_cache import LayerCache
from musespark.modules.linear import FusedLinear, RowParallelLinear
from musespark.ops.attention_paged import PagedSequences
from musespark.ops.attention_prefill import attention_prefill
from musespark.ops.kernel_set import choose_kernels
from musespark.ops.qk_norm_rope import qk_norm_rope
from musespark.parallel.mesh import ALONE, MeshAxis
from musespark.parallel.shard import HasTensor, Share, WeightSlot, weight_slots

RotaryAngles = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """o_proj( rms(attention(q, k, v)) * sigmoid(gate) ), q and k normed per head.

    Full or sliding, with RoPE or without: read from the layer's config when built. Ranks that share
    it hold a group of heads each, and hand out partial sums.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layer: LayerConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        axis: MeshAxis = ALONE,
    ) -> None:
        """`axis`: the ranks that share the heads; more of them than key-value heads hold copies."""
        super().__init__()
        self.kernels = choose_kernels(device, dtype, config.head_dim)
        self.head_dim = config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        q_share = Share.of(heads * self.head_dim, axis, units=heads)
        kv_share = Share.of(kv_heads * self.head_dim, axis, units=kv_heads)
        self.num_heads = q_share.size // self.head_dim
        self.num_kv_heads = kv_share.size // self.head_dim
        self.window = layer.sliding_window
        self.scale = config.attention_scale
        self.eps = config.rms_norm_eps
        self.qkvg_proj = FusedLinear(
            config.hidden_size,
            {"q_proj": q_share, "k_proj": kv_share, "v_proj": kv_share, "gate_proj": q_share},
            dtype=dtype,
            device=device,
        )
        self.o_proj = RowParallelLinear(q_share, config.hidden_size, dtype=dtype, device=device)

    def weight_slots(self, prefix: str, has: HasTensor) -> Iterator[WeightSlot]:
        """The four projections that are fused here stand apart in a checkpoint."""
        yield from self.qkvg_proj.part_slots(prefix)
        yield from weight_slots(self.o_proj, f"{prefix}o_proj.", has)

    def forward(
        self,
        hidden_states: Tensor,
        sequences: PagedSequences | None,
        cache: LayerCache | None,
        angles: RotaryAngles | None,
    ) -> Tensor:
        """[T, D], normed -> [T, D], to be summed over the ranks that share the heads.

        Args:
            hidden_states: [T, D], normed by the caller.
            sequences: whose tokens these are, as layers of this kind see them.
            cache: this layer's keys and values; None: attend to the step's own tokens.
            angles: (cos, sin) of the step's positions; None on a layer without RoPE.
        """
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkvg = self.qkvg_proj(hidden_states).unflatten(-1, (-1, self.head_dim))
        qkv, gate = qkvg.split((heads + 2 * kv_heads, heads), dim=1)
        if cache is None:
            gated = self.kernels.output_gate(self._attend_to_own(qkv, angles), gate, self.eps)
        else:
            assert sequences is not None
            query = self.kernels.qk_norm_rope_write(
                qkv, heads, self.eps, angles, cache.key, cache.value, sequences.slot_mapping
            )
            gated = self.kernels.attention_paged(
                query, cache.key, cache.value, sequences, self.scale, self.window,
                gate=gate, gate_eps=self.eps,
            )  # fmt: skip
        return self.o_proj(gated.flatten(1))

    def _attend_to_own(self, qkv: Tensor, angles: RotaryAngles | None) -> Tensor:
        """One sequence that attends to itself."""
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qk, value = qkv.split((heads + kv_heads, kv_heads), dim=1)
        query, key = qk_norm_rope(qk, self.eps, angles).split((heads, kv_heads), dim=1)
        return attention_prefill(query, key, value, self.scale, self.window)

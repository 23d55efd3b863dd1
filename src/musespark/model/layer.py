"""One decoder layer: two sub-layers, two boundaries, the second of them left to the next layer."""

import torch
from torch import Tensor, nn

from musespark.config.model import DecoderConfig
from musespark.model.attention import Attention, RotaryAngles
from musespark.model.kv_cache import LayerCache
from musespark.model.mlp import DenseMLP
from musespark.model.residual import ResidualGate, ResidualStream, unblended
from musespark.modules.norms import CentredRMSNorm, WeightFirstRMSNorm
from musespark.moe.block import CompressedMoE
from musespark.ops.attention_paged import PagedSequences
from musespark.parallel.layout import ONE_PROCESS, Layout
from musespark.parallel.placement import HERE, Placement


class DecoderLayer(nn.Module):
    """s = blend(s, attention(norm(s)));  return s and ffn(norm(s)), not yet blended."""

    def __init__(
        self,
        config: DecoderConfig,
        index: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        layout: Layout = ONE_PROCESS,
    ) -> None:
        super().__init__()
        layer = config.layers[index]
        hidden, eps, axis = config.hidden_size, config.rms_norm_eps, layout.tensor
        self.post_eps = config.post_norm_eps
        self.input_layernorm = CentredRMSNorm(hidden, eps, dtype=dtype, device=device)
        self.self_attn = Attention(config, layer, dtype=dtype, device=device, axis=axis)
        self.post_attention_residual_gate = ResidualGate(config, dtype=dtype, device=device)
        self.pre_feedforward_layernorm = CentredRMSNorm(hidden, eps, dtype=dtype, device=device)
        self.mlp: CompressedMoE | DenseMLP
        if layer.mlp == "sparse":
            self.mlp = CompressedMoE(config, index, dtype=dtype, device=device, layout=layout)
        else:
            self.mlp = DenseMLP(config, dtype=dtype, device=device, axis=axis)
        self.post_feedforward_layernorm = WeightFirstRMSNorm(
            hidden, self.post_eps, dtype=dtype, device=device
        )
        self.post_feedforward_residual_gate = ResidualGate(config, dtype=dtype, device=device)

    def forward(
        self,
        attn_input: Tensor,
        stream: Tensor,
        sequences: PagedSequences | None,
        cache: LayerCache | None,
        angles: RotaryAngles | None,
        before: Placement = HERE,
        after: Placement = HERE,
    ) -> ResidualStream:
        """Run both sub-layers.

        Args:
            attn_input: [T, D], the stream normed by `input_layernorm`.
            stream: [T, D] float32.
            sequences, cache, angles: as for `Attention`.
            before: where the rows of `attn_input` and `stream` are.
            after: where those of the result shall be.

        Returns:
            The stream after attention, with the FFN's branch waiting to be blended.
        """
        attended = self.self_attn(before.gather(attn_input), sequences, cache, angles)
        after_attention = unblended(
            stream if after is before else after.shard(stream),
            after.reduce_in_boundary(attended),
            self.post_attention_residual_gate,
            None,
            self.post_eps,
        )
        ffn_input, stream = after_attention.boundary(self.pre_feedforward_layernorm)
        return unblended(
            stream,
            self.mlp(ffn_input, after),
            self.post_feedforward_residual_gate,
            self.post_feedforward_layernorm,
            self.post_eps,
        )

"""One decoder layer: two sub-layers, two boundaries, the second of them left to the next layer."""

import torch
from torch import Tensor, nn

from musespark.config.model import DecoderConfig
from musespark.config.parallel import MoEBackend
from musespark.model.attention import Attention, RotaryAngles
from musespark.model.kv_cache import LayerCache
from musespark.model.mlp import DenseMLP
from musespark.model.residual import ResidualGate, ResidualStream
from musespark.modules.norms import CentredRMSNorm, WeightFirstRMSNorm
from musespark.moe.block import CompressedMoE
from musespark.ops.attention_paged import PagedSequences


class DecoderLayer(nn.Module):
    """s = blend(s, attention(norm(s)));  return s and ffn(norm(s)), not yet blended."""

    def __init__(
        self,
        config: DecoderConfig,
        index: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        moe_backend: MoEBackend = "auto",
    ) -> None:
        super().__init__()
        layer = config.layers[index]
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.post_eps = config.post_norm_eps
        self.input_layernorm = CentredRMSNorm(hidden, eps, dtype=dtype, device=device)
        self.self_attn = Attention(config, layer, dtype=dtype, device=device)
        self.post_attention_residual_gate = ResidualGate(config, dtype=dtype, device=device)
        self.pre_feedforward_layernorm = CentredRMSNorm(hidden, eps, dtype=dtype, device=device)
        self.mlp: CompressedMoE | DenseMLP
        if layer.mlp == "sparse":
            self.mlp = CompressedMoE(config, index, dtype=dtype, device=device, backend=moe_backend)
        else:
            self.mlp = DenseMLP(config, dtype=dtype, device=device)
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
        padding: Tensor | None = None,
    ) -> ResidualStream:
        """Run both sub-layers.

        Args:
            attn_input: [T, D], the stream normed by `input_layernorm`.
            stream: [T, D] float32.
            sequences, cache, angles: as for `Attention`.
            padding: [T] bool, True for rows that are no tokens; None: none are.

        Returns:
            The stream after attention, with the FFN's branch waiting to be blended.
        """
        after_attention = ResidualStream(
            stream=stream,
            branch=self.self_attn(attn_input, sequences, cache, angles),
            gate=self.post_attention_residual_gate,
            post_norm=None,
            post_eps=self.post_eps,
        )
        ffn_input, stream = after_attention.boundary(self.pre_feedforward_layernorm)
        return ResidualStream(
            stream=stream,
            branch=self.mlp(ffn_input, padding),
            gate=self.post_feedforward_residual_gate,
            post_norm=self.post_feedforward_layernorm,
            post_eps=self.post_eps,
        )

"""The compressed MoE block, from the FFN's input to its output at full width."""

import torch
from torch import Tensor, nn

from musespark.config.model import DecoderConfig
from musespark.config.parallel import MoEBackend
from musespark.modules.linear import Linear
from musespark.modules.norms import CentredRMSNorm
from musespark.moe.experts.build import build_experts
from musespark.moe.finalize import Finalizer
from musespark.moe.router import Router
from musespark.moe.runner import MoERunner
from musespark.ops.side_by_side import MAX_TOKENS, in_turn, side_by_side


class CompressedMoE(nn.Module):
    """pooler (D -> H), experts at width H, unpooler (H -> D).

    routing = router(f)                                  # at width D, float32
    h = pre_expert_norm(f @ Wpool)                       # the product is rounded before the norm
    b = finalize(experts(h, routing)) @ Wunpool          # the runner; experts stop after GEMM2
    """

    def __init__(
        self,
        config: DecoderConfig,
        layer_index: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        backend: MoEBackend = "auto",
    ) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.moe_hidden_size
        self.gate = Router(config, dtype=dtype, device=device)
        self.pre_expert_proj = Linear(hidden, width, dtype=dtype, device=device)
        self.pre_expert_norm = CentredRMSNorm(
            width, config.rms_norm_eps, dtype=dtype, device=device
        )
        self.experts = build_experts(
            config, layer_index, dtype=dtype, device=device, backend=backend
        )
        self.post_expert_proj = Linear(width, hidden, dtype=dtype, device=device)
        self._side_by_side = side_by_side(device)
        self._run_experts = MoERunner(self.experts, Finalizer(self.experts.post_expert_norm))

    def forward(self, hidden_states: Tensor, padding: Tensor | None = None) -> Tensor:
        """[T, D] -> [T, D]; rows where `padding` [T] is True reach no expert."""
        together = self._side_by_side if hidden_states.shape[0] <= MAX_TOKENS else in_turn
        routing, pooled = together(
            lambda: self.gate(hidden_states, padding),
            lambda: self.pre_expert_norm(self.pre_expert_proj(hidden_states)),  # [T, H]
        )
        return self.post_expert_proj(self._run_experts(pooled, routing))

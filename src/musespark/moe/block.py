"""The compressed MoE block, from the FFN's input to its output at full width."""

import torch
from torch import Tensor, nn

from musespark.config.model import DecoderConfig
from musespark.modules.linear import Linear
from musespark.modules.norms import CentredRMSNorm
from musespark.moe.experts.bf16 import GroupedExperts
from musespark.moe.finalize import Finalizer
from musespark.moe.router import Router


class CompressedMoE(nn.Module):
    """pooler (D -> H), experts at width H, unpooler (H -> D).

    routing = router(f)                                  # at width D, float32
    h = pre_expert_norm(f @ Wpool)                       # the product is rounded before the norm
    rows = experts(h, routing)                           # stops after GEMM2
    b = finalize(rows) @ Wunpool
    """

    def __init__(
        self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.moe_hidden_size
        self.gate = Router(config, dtype=dtype, device=device)
        self.pre_expert_proj = Linear(hidden, width, dtype=dtype, device=device)
        self.pre_expert_norm = CentredRMSNorm(
            width, config.rms_norm_eps, dtype=dtype, device=device
        )
        self.experts = GroupedExperts(config, dtype=dtype, device=device)
        self.post_expert_proj = Linear(width, hidden, dtype=dtype, device=device)
        self._finalize = Finalizer(self.experts.post_expert_norm)

    def forward(self, hidden_states: Tensor, padding: Tensor | None = None) -> Tensor:
        """[T, D] -> [T, D]; rows where `padding` [T] is True reach no expert."""
        routing = self.gate(hidden_states, padding)
        pooled = self.pre_expert_norm(self.pre_expert_proj(hidden_states))  # [T, H]
        return self.post_expert_proj(self._finalize(self.experts(pooled, routing)))

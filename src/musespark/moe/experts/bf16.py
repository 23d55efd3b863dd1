"""Experts with plain floating-point weights (BF16 in checkpoints; float32 or float64 in tests)."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from musespark.config.model import DecoderConfig
from musespark.modules.norms import WeightFirstRMSNorm
from musespark.moe.experts.base import ExpertOutput
from musespark.moe.router import Routing
from musespark.ops.expert_permute import group_by_expert
from musespark.ops.grouped_gemm import can_pack_grouped, grouped_gemm, pack_grouped_gemm
from musespark.ops.silu_mul import silu_mul
from musespark.parallel.shard import HasTensor, WeightSlot, copy_into, weight_slots


class GroupedExperts(nn.Module):
    """y = ( silu(h @ Wgate[e]) * (h @ Wup[e]) ) @ Wdown[e] for every route, grouped by expert."""

    gate_up_proj: nn.Parameter | None
    down_proj: nn.Parameter | None

    def __init__(
        self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.num_experts = config.num_local_experts
        self.width, self.intermediate = config.moe_hidden_size, config.moe_intermediate_size

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        self.gate_up_proj = weight(self.num_experts, 2 * self.intermediate, self.width)
        self.down_proj = weight(self.num_experts, self.width, self.intermediate)
        self.post_expert_norm = WeightFirstRMSNorm(
            self.width, config.post_norm_eps, dtype=dtype, device=device
        )
        self._gate_up = grouped_gemm(self.gate_up_proj)
        self._down = grouped_gemm(self.down_proj)

    def weight_slots(self, prefix: str, has: HasTensor) -> Iterator[WeightSlot]:
        """All experts in one tensor, or one tensor per expert and projection."""
        assert self.gate_up_proj is not None
        assert self.down_proj is not None
        yield from weight_slots(self.post_expert_norm, f"{prefix}post_expert_norm.", has)
        if not has(f"{prefix}0.gate_proj.weight"):
            for name in ("gate_up_proj", "down_proj"):
                target = getattr(self, name)
                yield WeightSlot(f"{prefix}{name}", tuple(target.shape), copy_into(target))
            return
        for expert in range(self.num_experts):
            gate, up = self.gate_up_proj[expert].chunk(2)
            for name, target in (("gate", gate), ("up", up), ("down", self.down_proj[expert])):
                key = f"{prefix}{expert}.{name}_proj.weight"
                yield WeightSlot(key, tuple(target.shape), copy_into(target))

    def pack(self) -> None:
        """Move the weights to the machine's fastest layout; their plain form is given up."""
        for name, matmul in (("gate_up_proj", "_gate_up"), ("down_proj", "_down")):
            weight = getattr(self, name)
            if weight is not None and can_pack_grouped(weight):
                setattr(self, matmul, pack_grouped_gemm(weight))
                setattr(self, name, None)

    def forward(self, hidden_states: Tensor, routing: Routing) -> ExpertOutput:
        """Run the experts on pooled, normed activations [T, H]."""
        groups = group_by_expert(routing.ids, self.num_experts)
        group_ends = groups.group_ends.tolist()
        rows = hidden_states.index_select(0, groups.token_index)  # [R, H]
        rows = self._down(silu_mul(self._gate_up(rows, group_ends)), group_ends)
        return ExpertOutput(rows, routing.weights, groups.route_index, route_major=False)

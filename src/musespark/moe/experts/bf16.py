"""Experts with plain floating-point weights (BF16 in checkpoints; float32 or float64 in tests)."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from musespark.config.model import DecoderConfig
from musespark.modules.norms import WeightFirstRMSNorm
from musespark.moe.experts.base import Activations, ExpertOutput
from musespark.moe.experts.part import ExpertPart
from musespark.moe.experts.slots import (
    down_slot,
    gate_up_slots,
    single_expert_slots,
    stored_one_by_one,
)
from musespark.moe.router import Routing
from musespark.ops import routed_experts
from musespark.ops.bf16_grouped_gemm_hopper import HopperBF16Experts
from musespark.ops.expert_permute import group_by_expert
from musespark.ops.grouped_gemm import can_pack_grouped, grouped_gemm, pack_grouped_gemm
from musespark.ops.nvfp4_hopper import runs_on
from musespark.ops.routed_experts import RoutedExperts
from musespark.ops.silu_mul import silu_mul
from musespark.ops.small_experts import are_small, small_experts
from musespark.parallel.shard import HasTensor, WeightSlot, weight_slots


class GroupedExperts(nn.Module):
    """y = ( silu(h @ Wgate[e]) * (h @ Wup[e]) ) @ Wdown[e] for every route, grouped by expert."""

    gate_up_proj: nn.Parameter | None
    down_proj: nn.Parameter | None
    keeps_plain_weights = False
    """Whether `pack` does nothing, and every product reads the checkpoint's own layout."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        part: ExpertPart | None = None,
    ) -> None:
        """Weights are left uninitialized; `part` is this rank's share, None: all."""
        super().__init__()
        self.part = part or ExpertPart.whole(config)
        self.width, inner = config.moe_hidden_size, self.part.inner_size

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        self.gate_up_proj = weight(self.part.num_experts_here, 2 * inner, self.width)
        self.down_proj = weight(self.part.num_experts_here, self.width, inner)
        self.post_expert_norm = WeightFirstRMSNorm(
            self.width, config.post_norm_eps, dtype=dtype, device=device
        )
        self._are_small = are_small(self.gate_up_proj, self.down_proj)
        self._on_gpu: HopperBF16Experts | RoutedExperts | None = None
        self._gate_up = grouped_gemm(self.gate_up_proj)
        self._down = grouped_gemm(self.down_proj)

    def weight_slots(self, prefix: str, has: HasTensor) -> Iterator[WeightSlot]:
        """All experts in one tensor, or one tensor per expert and projection."""
        assert self.gate_up_proj is not None
        assert self.down_proj is not None
        yield from weight_slots(self.post_expert_norm, f"{prefix}post_expert_norm.", has)
        if stored_one_by_one(prefix, has):
            yield from single_expert_slots(
                prefix, "weight", self.gate_up_proj, self.down_proj, self.part
            )
        else:
            yield from gate_up_slots(f"{prefix}gate_up_proj", self.gate_up_proj, self.part)
            yield down_slot(f"{prefix}down_proj", self.down_proj, self.part)

    def order_inputs(self) -> Tensor | None:
        """Columns are wanted as they are."""
        return None

    def pack(self) -> None:
        """Move the weights to the machine's fastest layout; their plain form is given up."""
        if self.keeps_plain_weights or self._are_small:
            return
        if self._pack_for_gpu():
            return
        for name, matmul in (("gate_up_proj", "_gate_up"), ("down_proj", "_down")):
            weight = getattr(self, name)
            if weight is not None and can_pack_grouped(weight):
                setattr(self, matmul, pack_grouped_gemm(weight))
                setattr(self, name, None)

    def _pack_for_gpu(self) -> bool:
        """Take the kernels for these widths, if there are any here; says whether it did."""
        gate_up, down = self.gate_up_proj, self.down_proj
        if gate_up is None or down is None:
            return False
        device, dtype = gate_up.device, gate_up.dtype
        if dtype == torch.bfloat16 and runs_on(device, self.width, self.part.inner_size):
            self._on_gpu = HopperBF16Experts(
                gate_up.data, down.data, num_routed=self.part.num_experts
            )
        elif routed_experts.takes(device, dtype):
            self._on_gpu = RoutedExperts(gate_up.data, down.data)
        return self._on_gpu is not None

    @property
    def waits_for_device(self) -> bool:
        """Whether the host must know how many rows each expert has."""
        return self._on_gpu is None

    def plan(self, routing: Routing) -> Routing:
        """Nothing is worked out ahead."""
        return routing

    def prepare(self, hidden_states: Tensor) -> Activations:
        """Activations are multiplied as they are."""
        return hidden_states

    def forward(self, activations: Activations, routing: Routing) -> ExpertOutput:
        """Run the experts on pooled, normed activations [T, H]."""
        assert isinstance(activations, Tensor)
        if self._on_gpu is not None:
            first_expert = self.part.first_expert or 0
            rows, index = self._on_gpu(activations, routing.ids, first_expert=first_expert)
            return ExpertOutput(rows, routing.weights, index, route_major=True)
        if self._are_small and not self.keeps_plain_weights:
            assert self.gate_up_proj is not None
            assert self.down_proj is not None
            local_ids = self.part.local_ids(routing.ids)
            found = small_experts(activations, local_ids, self.gate_up_proj, self.down_proj)
            if found is not None:
                return ExpertOutput(found[0], routing.weights, found[1], route_major=False)
        groups = group_by_expert(routing.ids, self.part.num_experts_here, self.part.first_expert)
        group_ends = groups.group_ends.tolist()
        rows = activations.index_select(0, groups.token_index)  # [R, H]
        rows = self._down(silu_mul(self._gate_up(rows, group_ends)), group_ends)
        return ExpertOutput(rows, routing.weights, groups.route_index, route_major=False)

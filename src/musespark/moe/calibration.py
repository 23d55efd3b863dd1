"""Which magnitudes reach the experts' products, watched while text runs through the model."""

from collections.abc import Sequence

import torch
from torch import Tensor

from musespark.moe.experts.bf16 import GroupedExperts
from musespark.ops.grouped_gemm import GroupedMatMul, occupied_groups


class InputRanges:
    """Per expert, the largest magnitude that entered each of its two products so far."""

    def __init__(self, num_experts: int) -> None:
        self.gate_up = torch.zeros(num_experts)
        """[E] float32, of the gate and up projections, which share their input."""
        self.down = torch.zeros(num_experts)
        """[E] float32."""


def watch_inputs(experts: GroupedExperts) -> InputRanges:
    """Record the ranges of all that these experts multiply from now on.

    They go expert by expert then, however small they are.
    """
    experts.keeps_plain_weights = True
    ranges = InputRanges(experts.part.num_experts_here)
    experts._gate_up = _watched(experts._gate_up, ranges.gate_up)
    experts._down = _watched(experts._down, ranges.down)
    return ranges


def _watched(matmul: GroupedMatMul, largest: Tensor) -> GroupedMatMul:
    def watched_matmul(x: Tensor, group_ends: Sequence[int]) -> Tensor:
        for expert, rows in occupied_groups(group_ends):
            largest[expert] = torch.maximum(largest[expert], x[rows].abs().max().float().cpu())
        return matmul(x, group_ends)

    return watched_matmul

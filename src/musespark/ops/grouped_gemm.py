"""One matrix product per expert over rows grouped by expert.

out[r] = x[r] @ weight[expert of r].T
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from musespark.ops.linear import can_pack, pack_linear

GroupedMatMul = Callable[[Tensor, Sequence[int]], Tensor]
"""(x [R, in], group_ends: one past the last row of each of the E groups) -> [R, out]."""


def grouped_gemm(weight: Tensor) -> GroupedMatMul:
    """Products with plain weights [E, out, in], group by group."""

    def matmul(x: Tensor, group_ends: Sequence[int]) -> Tensor:
        out = x.new_empty((x.shape[0], weight.shape[1]))
        for expert, rows in occupied_groups(group_ends):
            torch.mm(x[rows], weight[expert].t(), out=out[rows])
        return out

    return matmul


def can_pack_grouped(weight: Tensor) -> bool:
    """Whether `pack_grouped_gemm` has a faster layout for these weights on this machine."""
    return can_pack(weight)


def pack_grouped_gemm(weight: Tensor) -> GroupedMatMul:
    """Like `grouped_gemm`, over packed copies of the experts' weights."""
    experts = [pack_linear(expert) for expert in weight]
    out_features = weight.shape[1]  # the closure must not keep the plain weights alive

    def matmul(x: Tensor, group_ends: Sequence[int]) -> Tensor:
        parts = [experts[expert](x[rows]) for expert, rows in occupied_groups(group_ends)]
        return torch.cat(parts) if parts else x.new_empty((0, out_features))

    return matmul


def occupied_groups(group_ends: Sequence[int]) -> list[tuple[int, slice]]:
    """(expert, its rows) for every expert that has any."""
    starts = (0, *group_ends[:-1])
    return [
        (expert, slice(start, end))
        for expert, (start, end) in enumerate(zip(starts, group_ends, strict=True))
        if end > start
    ]

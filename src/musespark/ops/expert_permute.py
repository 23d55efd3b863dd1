"""Grouping routes by expert, so that each expert multiplies one contiguous run of rows."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Routes in order of their expert; within an expert, in order of token and slot."""

    token_index: Tensor
    """[R] int64: the token of each row."""
    route_index: Tensor
    """[T, K] int64: the row of each route, -1 where the route has no expert here."""
    group_ends: Tensor
    """[E] int32: one past the last row of each expert."""

    def expert_index(self) -> Tensor:
        """[R] int64: the expert of each row."""
        rows = torch.arange(self.token_index.shape[0], device=self.group_ends.device)
        return torch.searchsorted(self.group_ends, rows, right=True)


def group_by_expert(ids: Tensor, num_experts: int, first_expert: int | None = None) -> ExpertGroups:
    """Sort routes by expert.

    Args:
        ids: [T, K] int64 expert of each route; -1: none.
        num_experts: E, the experts that are here.
        first_expert: where not all experts are here, the id of the first one that is; routes to
            those before it and after the last get no row.

    Returns:
        Groups over the R routes with an expert here.
    """
    num_tokens, top_k = ids.shape
    flat = ids.flatten()
    if first_expert is not None:
        flat = flat - first_expert
        flat = flat.masked_fill((flat < 0) | (flat >= num_experts), -1)
    order = torch.argsort(flat, stable=True)  # routes without an expert (-1) come first
    counts = torch.bincount(flat + 1, minlength=num_experts + 1)
    num_absent = int(counts[0])
    route_index = torch.empty_like(order)
    route_index[order] = torch.arange(-num_absent, flat.numel() - num_absent, device=ids.device)
    return ExpertGroups(
        token_index=order[num_absent:] // top_k,
        route_index=route_index.clamp_min(-1).view(num_tokens, top_k),
        group_ends=counts[1:].cumsum(0, dtype=torch.int32),
    )

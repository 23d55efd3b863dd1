"""Grouping routes by expert, so that each expert multiplies one contiguous run of rows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from musespark.ops.triton_import import next_power_of_2, tl, triton

# Routes that one program sorts.
_BLOCK = 256


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


@triton.jit
def _local_experts(ids_ptr, route, num_routes, first_expert, NUM_EXPERTS: tl.constexpr):
    """The index here of each route's expert; NUM_EXPERTS where it has none here."""
    ids = tl.load(ids_ptr + route, route < num_routes, other=-1).to(tl.int32)
    local = ids - first_expert
    here = (ids >= 0) & (local >= 0) & (local < NUM_EXPERTS)
    return tl.where(here, local, NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_routes"])
def _count_kernel(
    ids_ptr,
    counts_ptr,
    num_routes,
    first_expert,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """counts[program, e]: routes to expert e among the program's."""
    route = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = _local_experts(ids_ptr, route, num_routes, first_expert, NUM_EXPERTS)
    counts = tl.histogram(expert, BLOCK_E)
    tl.store(counts_ptr + tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E), counts)


@triton.jit(do_not_specialize=["num_routes", "num_blocks"])
def _place_kernel(
    ids_ptr,
    counts_ptr,
    token_index_ptr,
    route_index_ptr,
    group_ends_ptr,
    num_routes,
    num_blocks,
    first_expert,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
):
    """A route's row: the expert's first row, its routes of earlier programs, and those before it.

    Routes without an expert here go behind all others: their rows' token is 0, which may be read.
    """
    block = tl.program_id(0)
    experts = tl.arange(0, BLOCK_E)
    route = block * BLOCK + tl.arange(0, BLOCK)
    expert = _local_experts(ids_ptr, route, num_routes, first_expert, NUM_EXPERTS)
    earlier = tl.zeros((BLOCK_E,), tl.int32)
    if ONE_BLOCK:
        totals = tl.histogram(expert, BLOCK_E)
    else:
        totals = tl.zeros((BLOCK_E,), tl.int32)
        for start in range(0, num_blocks, ROWS):
            rows = start + tl.arange(0, ROWS)
            counts = tl.load(
                counts_ptr + rows[:, None] * BLOCK_E + experts[None, :],
                (rows < num_blocks)[:, None] & (experts >= 0)[None, :],
                other=0,
            )
            totals += tl.sum(counts, axis=0)
            earlier += tl.sum(tl.where((rows < block)[:, None], counts, 0), axis=0)
    ends = tl.cumsum(totals)
    if block == 0:
        tl.store(group_ends_ptr + experts, ends, experts < NUM_EXPERTS)
    first_rows = ends - totals + earlier
    # How many earlier routes of this program have the same expert.
    rank = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, BLOCK, COLUMNS):
        other_route = block * BLOCK + start + tl.arange(0, COLUMNS)
        other = _local_experts(ids_ptr, other_route, num_routes, first_expert, NUM_EXPERTS)
        same = (other[None, :] == expert[:, None]) & (other_route[None, :] < route[:, None])
        rank += tl.sum(same.to(tl.int32), axis=1)
    row = tl.gather(first_rows, expert, axis=0) + rank
    here = expert < NUM_EXPERTS
    inside = route < num_routes
    tl.store(route_index_ptr + route, tl.where(here, row, -1).to(tl.int64), inside)
    tl.store(token_index_ptr + row, tl.where(here, route // TOP_K, 0).to(tl.int64), inside)


def group_by_expert_triton(
    ids: Tensor, num_experts: int, first_expert: int | None = None
) -> ExpertGroups:
    """`group_by_expert` without waiting for the device: R is T * K whatever is elsewhere.

    Rows behind the last group's end belong to no expert and are not to be computed.
    """
    num_routes, top_k = ids.numel(), ids.shape[1]
    device = ids.device
    group_ends = torch.empty(num_experts, dtype=torch.int32, device=device)
    token_index = torch.empty(num_routes, dtype=torch.int64, device=device)
    route_index = torch.empty_like(ids, dtype=torch.int64)
    if not num_routes:
        return ExpertGroups(token_index, route_index, group_ends.zero_())
    ids = ids.contiguous()
    block_e = next_power_of_2(num_experts + 1)
    num_blocks = -(-num_routes // _BLOCK)
    offset = first_expert or 0
    counts = None
    if num_blocks > 1:
        counts = torch.empty((num_blocks, block_e), dtype=torch.int32, device=device)
        _count_kernel[(num_blocks,)](
            ids, counts, num_routes, offset, num_experts, block_e, _BLOCK, num_warps=4
        )
    _place_kernel[(num_blocks,)](
        ids,
        counts,
        token_index,
        route_index,
        group_ends,
        num_routes,
        num_blocks,
        offset,
        TOP_K=top_k,
        NUM_EXPERTS=num_experts,
        BLOCK_E=block_e,
        BLOCK=_BLOCK if num_blocks > 1 else max(16, next_power_of_2(num_routes)),
        ROWS=16,
        COLUMNS=16,
        ONE_BLOCK=num_blocks == 1,
        num_warps=8,
    )
    return ExpertGroups(token_index, route_index, group_ends)

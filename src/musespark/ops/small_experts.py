"""Both products of small experts in a few batched calls, for CPUs.

A small expert's product takes less time than the call that starts it, so going from expert to
expert is slow while tokens are few. Two ways do all experts at once, on the weights as they are:

    gathered   copy each route's expert next to its row, then one batched product of R rows by one;
               for so few routes that the copies are cheaper than reading every expert
    padded     give every expert the same number of rows, as many as the busiest one has, then one
               batched product; for up to a few thousand rows, padding included

Every row equals the row that expert-by-expert products give.
"""

import torch
from torch import Tensor

from musespark.ops.silu_mul import silu_mul

# Above this size a product outweighs the call, and copying or padding experts only costs.
_MAX_EXPERT_BYTES = 2**20
# Above this many rows, padding and the temporaries cost more than calls.
_MAX_PADDED_ROWS = 8192


def are_small(gate_up: Tensor, down: Tensor) -> bool:
    """Whether this way suits experts with weights gate_up [E, 2I, H] and down [E, H, I]."""
    expert_bytes = (gate_up[0].numel() + down[0].numel()) * gate_up.element_size()
    return gate_up.device.type == "cpu" and expert_bytes <= _MAX_EXPERT_BYTES


def small_experts(
    hidden_states: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Rows of every route, or None where going expert by expert is faster.

    Args:
        hidden_states: [T, H].
        ids: [T, K] int64 index into the experts here; -1: no expert here.
        gate_up: [E, 2I, H], gate rows first.
        down: [E, H, I].

    Returns:
        (rows [R, H], row of each route [T, K], -1 for a route without an expert).
    """
    if 2 * ids.numel() <= gate_up.shape[0]:
        return _gathered(hidden_states, ids, gate_up, down)
    return _padded(hidden_states, ids, gate_up, down)


def _gathered(
    hidden_states: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor
) -> tuple[Tensor, Tensor]:
    expert = ids.flatten().clamp_min(0)  # a route without an expert computes a row nobody reads
    x = _repeat(hidden_states, ids.shape[1])[:, None]  # [T * K, 1, H]
    rows = _swiglu(x, gate_up.index_select(0, expert), down.index_select(0, expert))
    own_row = torch.arange(ids.numel(), device=ids.device).view_as(ids)
    return rows[:, 0], own_row.masked_fill(ids < 0, -1)


def _padded(
    hidden_states: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor
) -> tuple[Tensor, Tensor] | None:
    num_experts, top_k = gate_up.shape[0], ids.shape[1]
    # An expert meets a token at most once, so counting tokens up to each one ranks its rows. The
    # extra column takes the routes without an expert.
    meets = torch.zeros((ids.shape[0], num_experts + 1), dtype=torch.int64, device=ids.device)
    column = ids.remainder(num_experts + 1)  # -1 -> the extra column
    rank = meets.scatter_(1, column, 1).cumsum(0)  # [T, E + 1], from 1
    capacity = int(rank[-1, :num_experts].max())
    if capacity * num_experts > _MAX_PADDED_ROWS:
        return None
    row = rank.gather(1, column).sub_(1).add_(column * capacity)  # [T, K]
    row = row.masked_fill_(ids < 0, -1)
    x = hidden_states.new_zeros((num_experts * capacity + 1, hidden_states.shape[1]))
    x.index_copy_(0, row.flatten().remainder(x.shape[0]), _repeat(hidden_states, top_k))
    rows = _swiglu(x[:-1].view(num_experts, capacity, x.shape[1]), gate_up, down)
    return rows.flatten(0, 1), row


def _repeat(hidden_states: Tensor, top_k: int) -> Tensor:
    """[T, H] -> [T * K, H], each row K times."""
    return hidden_states[:, None].expand(-1, top_k, -1).flatten(0, 1)


def _swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """[B, M, H] through B experts."""
    return torch.bmm(silu_mul(torch.bmm(x, gate_up.transpose(1, 2))), down.transpose(1, 2))

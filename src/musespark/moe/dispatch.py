"""Experts whose tokens are elsewhere: rows travel to the ranks of their experts and back.

Each rank holds other tokens. A token's row is sent once to every rank that has one of its experts,
with the token's choices and weights. That rank runs its experts and finalizes: what returns is one
normed and weighted row per token and rank, and the token's own rank adds those up.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from musespark.moe.experts.base import Experts
from musespark.moe.finalize import Finalizer
from musespark.moe.router import Routing
from musespark.ops.precision import wide_dtype
from musespark.parallel.collectives import all_to_all, exchange_counts
from musespark.parallel.mesh import MeshAxis


@dataclass(frozen=True, slots=True)
class DispatchPlan:
    """Which rows go where; the way back is the same in reverse."""

    token_index: Tensor
    """[N] int64: the token of each row sent, in order of the receiving rank."""
    send_counts: list[int]
    """[ranks] rows for each rank."""
    receive_counts: list[int]
    """[ranks] rows from each rank."""


def plan_dispatch(ids: Tensor, experts_per_rank: int, axis: MeshAxis) -> DispatchPlan:
    """Who needs which of the tokens whose experts are `ids` [T, K]; -1: no expert.

    Every rank of the axis calls this, even one without tokens. The host waits for the counts.
    """
    owners = ids.div(experts_per_rank, rounding_mode="floor")  # [T, K]
    ranks = torch.arange(axis.size, device=ids.device)
    is_wanted = (owners[:, None, :] == ranks[None, :, None]).any(dim=2)  # [T, ranks]
    send = is_wanted.sum(dim=0)
    counts = torch.stack((send, exchange_counts(send, axis))).tolist()
    token_index = is_wanted.t().nonzero()[:, 1]
    return DispatchPlan(token_index, *counts)


class AllToAllRunner:
    """The MoE runner of ranks with tokens of their own; the host waits for every step's counts."""

    def __init__(self, experts: Experts, finalizer: Finalizer, axis: MeshAxis) -> None:
        """`experts`: this rank's, whole ones; `axis`: the ranks among which they are handed out."""
        assert finalizer.row_reduce is None
        self._experts, self._finalizer, self._axis = experts, finalizer, axis

    def plan(self, routing: Routing) -> Routing:
        """Nothing is worked out ahead: which rows come is not known yet."""
        return routing

    def __call__(self, hidden_states: Tensor, routing: Routing) -> Tensor:
        """Pooled, normed activations [T, H] of this rank's tokens -> [T, H], complete.

        All ranks call this together, T = 0 included.
        """
        here = self._experts.part.num_experts_here
        plan = plan_dispatch(routing.ids, here, self._axis)
        rows, received = self._dispatch(plan, hidden_states, routing)
        if rows.shape[0]:
            output = self._experts(self._experts.prepare(rows), received)
            rows = self._finalizer(output).hidden_states
        return self._combine(plan, rows, hidden_states)

    def _dispatch(
        self, plan: DispatchPlan, hidden_states: Tensor, routing: Routing
    ) -> tuple[Tensor, Routing]:
        """The rows [M, H] that this rank's experts shall see, and their routing."""
        counts = plan.send_counts, plan.receive_counts
        rows = all_to_all(hidden_states.index_select(0, plan.token_index), *counts, self._axis)
        # Weights and ids in one message: a float32 holds every expert's number exactly.
        choices = torch.cat((routing.weights, routing.ids.to(routing.weights.dtype)), dim=1)
        choices = all_to_all(choices.index_select(0, plan.token_index), *counts, self._axis)
        weights, ids = choices.chunk(2, dim=1)
        return rows, Routing(weights.contiguous(), ids.to(routing.ids.dtype).contiguous())

    def _combine(self, plan: DispatchPlan, finalized: Tensor, like: Tensor) -> Tensor:
        """Rows [M, H] back to their tokens: [T, H], summed in order of the ranks, rounded once."""
        rows = all_to_all(finalized, plan.receive_counts, plan.send_counts, self._axis)
        total = torch.zeros_like(like, dtype=wide_dtype(like.dtype))
        # A rank has one row per token at most, so no two rows of one addition meet.
        for tokens, part in zip(
            plan.token_index.split(plan.send_counts), rows.split(plan.send_counts), strict=True
        ):
            total.index_add_(0, tokens, part.to(total.dtype))
        return total.to(like.dtype)

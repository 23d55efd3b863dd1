"""Sums and gathers that are left to whoever uses them next, so that both become one kernel."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from musespark.parallel.collectives import all_reduce
from musespark.parallel.mesh import MeshAxis


class RankSums(Protocol):
    """Sums and gathers over the tensor ranks together with the operation behind (or before) them.

    Every method is called by all ranks together, with the same number of tokens.
    """

    max_tokens: int
    """More tokens than this take a collective of their own."""

    def boundary(
        self,
        stream: Tensor,
        partial: Tensor,
        alpha: Tensor,
        beta: Tensor,
        post_gain: Tensor | None,
        post_eps: float,
        pre_gain: Tensor,
        pre_eps: float,
    ) -> tuple[Tensor, Tensor]:
        """`residual_boundary` of the sum of all ranks' branches `partial` [T, D], or of their
        blocks of columns [T, D / ranks]."""
        ...

    def norm(self, block: Tensor, gain: Tensor, eps: float) -> Tensor:
        """`rms_norm` of the ranks' blocks of columns [T, N / ranks] side by side: [T, N]."""
        ...

    def finalize(
        self, rows: Tensor, route_weights: Tensor, route_index: Tensor, gain: Tensor, eps: float
    ) -> Tensor:
        """`expert_finalize` of this rank's routes, summed over ranks: [T, H]."""
        ...

    def finalize_rows(
        self, rows: Tensor, route_weights: Tensor, route_index: Tensor, gain: Tensor, eps: float
    ) -> Tensor:
        """`expert_finalize` of rows that are partial sums, in the order of the routes: [T, H]."""
        ...


@dataclass(frozen=True, slots=True)
class PartialSums:
    """A branch whose sum over ranks is left to the boundary that consumes it."""

    values: Tensor
    """[T, D], this rank's part."""
    axis: MeshAxis
    sums: RankSums

    def sum(self) -> Tensor:
        """The whole branch, by a collective; `values` are overwritten."""
        return all_reduce(self.values, self.axis)

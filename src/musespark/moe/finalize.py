"""The finalizer: from un-finalized expert rows to one row per token.

There is more than one way there, by where the tokens and the experts are. A `FinalizePath` is one;
the finalizer takes the first that accepts the batch, in this order:

1. `FusedSumPath`, which a deployment over several GPUs may put in front;
2. `ReferencePath`: a norm whose variance covers fewer elements than the row, or partial rows that
   are not route-major, so that they may lie in another order on each rank;
3. `KernelPath`: partial rows are summed over ranks as they are, then one fused kernel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from musespark.modules.norms import WeightFirstRMSNorm
from musespark.moe.experts.base import ExpertOutput
from musespark.ops.expert_finalize import expert_finalize_reference
from musespark.parallel.rank_sums import RankSums

AllReduce = Callable[[Tensor], Tensor]
"""Sums a tensor over the ranks that hold partial sums of it."""


@dataclass(frozen=True, slots=True)
class Finalized:
    """One row per token."""

    hidden_states: Tensor
    """[T, H] in the compute dtype."""
    is_reduced: bool
    """Whether it is the whole sum over a token's routes, whichever ranks they are on."""


class FinalizePath(Protocol):
    """One way to finalize."""

    def accepts(self, output: ExpertOutput) -> bool:
        """Whether this path can take the batch; alike on all ranks."""
        ...

    def __call__(self, output: ExpertOutput) -> Finalized:
        """Norm every route's row, weight it, sum over routes."""
        ...


class ReferencePath:
    """Plain torch, in chunks of tokens."""

    def __init__(
        self,
        norm: WeightFirstRMSNorm,
        *,
        variance_size: int | None = None,
        row_reduce: AllReduce | None = None,
    ) -> None:
        self._norm, self._variance_size, self._row_reduce = norm, variance_size, row_reduce

    def accepts(self, output: ExpertOutput) -> bool:
        """Batches that the kernel is not made for."""
        disordered = self._row_reduce is not None and not output.route_major
        return self._variance_size is not None or disordered

    def __call__(self, output: ExpertOutput) -> Finalized:
        """[R, H] rows -> [T, H]."""
        hidden_states = expert_finalize_reference(
            output.rows,
            output.route_weights,
            output.route_index,
            self._norm.gain,
            self._norm.eps,
            variance_size=self._variance_size,
            reduce_rows=self._row_reduce,
        )
        return Finalized(hidden_states, is_reduced=self._row_reduce is not None)


class KernelPath:
    """One fused kernel, after a plain all-reduce of the rows if they are partial sums."""

    def __init__(self, norm: WeightFirstRMSNorm, *, row_reduce: AllReduce | None = None) -> None:
        self._norm, self._row_reduce = norm, row_reduce

    def accepts(self, output: ExpertOutput) -> bool:
        """Whatever no path before it took."""
        return output.route_major or self._row_reduce is None

    def __call__(self, output: ExpertOutput) -> Finalized:
        """[R, H] rows -> [T, H]."""
        rows = output.rows if self._row_reduce is None else self._row_reduce(output.rows)
        hidden_states = self._norm.kernels.expert_finalize(
            rows, output.route_weights, output.route_index, self._norm.gain, self._norm.eps
        )
        return Finalized(hidden_states, is_reduced=self._row_reduce is not None)


class FusedSumPath:
    """Few tokens: finalized and summed over ranks in one kernel."""

    def __init__(self, norm: WeightFirstRMSNorm, sums: RankSums, *, rows_are_partial: bool) -> None:
        """`rows_are_partial`: rows are summed first; else the ranks' routes differ."""
        self._norm, self._max_tokens = norm, sums.max_tokens
        self._rows_are_partial = rows_are_partial
        self._finalize = sums.finalize_rows if rows_are_partial else sums.finalize

    def accepts(self, output: ExpertOutput) -> bool:
        """Small batches; of partial rows, those whose order is the same on all ranks."""
        in_order = output.route_major or not self._rows_are_partial
        return in_order and 0 < output.route_index.shape[0] <= self._max_tokens

    def __call__(self, output: ExpertOutput) -> Finalized:
        """[R, H] rows -> [T, H], complete."""
        hidden_states = self._finalize(
            output.rows, output.route_weights, output.route_index, self._norm.gain, self._norm.eps
        )
        return Finalized(hidden_states, is_reduced=True)


class Finalizer:
    """Post-expert norm per route, then the weighted sum over a token's routes."""

    def __init__(
        self,
        norm: WeightFirstRMSNorm,
        *,
        variance_size: int | None = None,
        row_reduce: AllReduce | None = None,
        fused_paths: Sequence[FinalizePath] = (),
    ) -> None:
        """Choose what is chosen once.

        Args:
            norm: the post-expert norm.
            variance_size: its mean square is of a row's first so many elements; None: of all.
            row_reduce: for rows that are partial sums (tensor parallelism): RMS is not linear in
                them, so they are summed, in the compute dtype, before the norm.
            fused_paths: paths fused with a collective, the preferred one first.
        """
        self.row_reduce = row_reduce
        self._paths = (
            *fused_paths,
            ReferencePath(norm, variance_size=variance_size, row_reduce=row_reduce),
            KernelPath(norm, row_reduce=row_reduce),
        )

    def choose(self, output: ExpertOutput) -> FinalizePath:
        """The path for this batch."""
        return next(path for path in self._paths if path.accepts(output))

    def __call__(self, output: ExpertOutput) -> Finalized:
        """[R, H] rows -> [T, H], in the rows' dtype."""
        return self.choose(output)(output)

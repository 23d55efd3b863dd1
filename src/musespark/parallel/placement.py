"""Where a step's tokens are between two sub-layers: on every tensor rank, or cut over them.

Cut along tokens (sequence parallelism), each rank norms, blends and routes its own share, and only
attention sees all. The tokens are padded with zero rows to a multiple of the ranks, each of which
takes a contiguous run; gathering puts the runs one after the other and drops the padding.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from musespark.parallel.collectives import all_gather, all_reduce, reduce_scatter
from musespark.parallel.layout import Layout
from musespark.parallel.mesh import ALONE, MeshAxis
from musespark.parallel.rank_sums import PartialSums, RankSums


class Placement(Protocol):
    """Where the rows of the residual stream are in one step, and how to get them elsewhere."""

    is_cut: bool
    """Whether each rank holds tokens of its own."""
    padding: Tensor | None
    """[rows here] bool, True for rows that are no tokens; None: all are."""

    @property
    def whole(self) -> "Replicated":
        """Where the rows are that `gather` gives."""
        ...

    def shard(self, x: Tensor) -> Tensor:
        """[T, ...], alike on all ranks -> the rows that belong here."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """The rows here -> [T, ...] on every rank."""
        ...

    def reduce(self, partial: Tensor) -> Tensor:
        """[T, ...] partial sums of every rank -> the rows that belong here, summed over ranks."""
        ...

    def reduce_in_boundary(self, partial: Tensor) -> Tensor | PartialSums:
        """As `reduce`, for a branch [T, D], whose sum may be left to the next boundary."""
        ...


class Replicated:
    """Every rank holds all tokens."""

    is_cut = False

    def __init__(
        self,
        axis: MeshAxis = ALONE,
        padding: Tensor | None = None,
        sums: RankSums | None = None,
    ) -> None:
        self.padding, self._axis, self._sums = padding, axis, sums

    @property
    def whole(self) -> "Replicated":
        """Here already."""
        return self

    def shard(self, x: Tensor) -> Tensor:
        """All of them."""
        return x

    def gather(self, x: Tensor) -> Tensor:
        """They are here already."""
        return x

    def reduce(self, partial: Tensor) -> Tensor:
        """The sum over ranks; `partial` is overwritten."""
        return all_reduce(partial, self._axis)

    def reduce_in_boundary(self, partial: Tensor) -> Tensor | PartialSums:
        """The sum, or for few tokens its parts, if there are kernels for that."""
        if self._sums is None or partial.shape[0] > self._sums.max_tokens:
            return self.reduce(partial)
        return PartialSums(partial, self._axis, self._sums)


HERE = Replicated()
"""All tokens on the one rank there is."""


class CutByTokens:
    """Each rank holds a run of tokens; the last runs may end in zero rows."""

    is_cut = True

    def __init__(
        self, axis: MeshAxis, whole: Replicated, num_tokens: int, device: torch.device
    ) -> None:
        """`whole`: where the tokens are once they are gathered."""
        self._axis, self._whole, self._num_tokens = axis, whole, num_tokens
        self._num_rows = -(-num_tokens // axis.size)
        self._start = axis.rank * self._num_rows
        self.padding = self._local_padding(whole.padding, device)

    @property
    def whole(self) -> Replicated:
        """As given."""
        return self._whole

    def shard(self, x: Tensor) -> Tensor:
        """This rank's rows."""
        return self._padded(x)[self._start : self._start + self._num_rows]

    def gather(self, x: Tensor) -> Tensor:
        """All ranks' rows, without the padding."""
        return all_gather(x, self._axis)[: self._num_tokens]

    def reduce(self, partial: Tensor) -> Tensor:
        """This rank's rows of the sum over ranks."""
        return reduce_scatter(self._padded(partial), self._axis)

    def reduce_in_boundary(self, partial: Tensor) -> Tensor | PartialSums:
        """At once: cut tokens are many."""
        return self.reduce(partial)

    def _padded(self, x: Tensor) -> Tensor:
        missing = self._num_rows * self._axis.size - self._num_tokens
        return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x

    def _local_padding(self, padding: Tensor | None, device: torch.device) -> Tensor | None:
        """True on this rank's rows that are no tokens, or past the last one; None: there are none.

        No collective depends on it, so it may be None on some ranks only.
        """
        stop = self._start + self._num_rows
        missing = min(self._num_rows, max(0, stop - self._num_tokens))
        if padding is not None:
            return F.pad(padding[self._start : stop], (0, missing), value=True)
        if not missing:
            return None
        return torch.arange(self._num_rows, device=device) >= self._num_rows - missing


@dataclass(frozen=True, slots=True)
class StepPlaces:
    """Where one step's tokens are, throughout the layers."""

    whole: Replicated
    """Before the first layer that runs on cut tokens, and wherever all tokens are needed."""
    cut: Placement
    """From there on: `whole` itself where the step is not cut."""

    @classmethod
    def of(
        cls, layout: Layout, num_tokens: int, padding: Tensor | None, device: torch.device
    ) -> "StepPlaces":
        """The places of one step, by `Layout.cuts`.

        Args:
            layout: how the model is spread.
            num_tokens: T, alike on all tensor-parallel ranks.
            padding: [T] bool, True for rows that are no tokens; None: none are.
            device: where the stream is.
        """
        whole = Replicated(layout.tensor, padding, layout.sums)
        if not layout.cuts(num_tokens):
            return cls(whole, whole)
        return cls(whole, CutByTokens(layout.tensor, whole, num_tokens, device))

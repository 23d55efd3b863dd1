"""Linear layers without a bias, whose weights are packed once at load."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from musespark.modules.norms import RMSNorm
from musespark.ops.linear import (
    can_pack,
    linear,
    pack_linear,
    pack_wide_linear,
    wide_linear,
)
from musespark.parallel.collectives import gather_columns
from musespark.parallel.mesh import ALONE, MeshAxis
from musespark.parallel.rank_sums import RankSums
from musespark.parallel.shard import HasTensor, Share, WeightSlot, copy_into


class Linear(nn.Module):
    """y = x @ weight.T, with `weight` [out_features, in_features]."""

    weight: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        wide_output: bool = False,
    ) -> None:
        """`wide_output`: hand out float32 (float64 in float64) whatever the compute dtype."""
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(
            torch.empty(out_features, in_features, dtype=dtype, device=device), requires_grad=False
        )
        self._wide_output = wide_output
        self._matmul = (wide_linear if wide_output else linear)(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        return self._matmul(x)

    def pack(self) -> None:
        """Move the weight to the machine's fastest layout; `weight` itself is given up then."""
        if self.weight is not None and can_pack(self.weight):
            pack = pack_wide_linear if self._wide_output else pack_linear
            self._matmul = pack(self.weight)
            self.weight = None

    def permute_rows(self, order: Tensor) -> None:
        """Put the weight's rows, and with them the output's columns, in this order, in place."""
        assert self.weight is not None
        self.weight.data.copy_(self.weight.data[order])

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}"


class FusedLinear(Linear):
    """Several projections of one input as one product; the checkpoint holds them apart.

    The parts' rows lie one below the other in `weight`, in the order of `parts`. Of a part that is
    cut over ranks, this rank's share is here, and so are its columns of the output.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int | Share],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`parts`: each projection's name in the checkpoint, and its rows, or our share of them."""
        shares = {
            name: rows if isinstance(rows, Share) else Share.whole(rows)
            for name, rows in parts.items()
        }
        out_features = sum(share.size for share in shares.values())
        super().__init__(in_features, out_features, dtype=dtype, device=device)
        self.parts = shares

    def part_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Slots of the parts, named `{prefix}{part}.weight`."""
        assert self.weight is not None
        rows = self.weight.split([share.size for share in self.parts.values()])
        for (part, share), target in zip(self.parts.items(), rows, strict=True):
            shape = (share.total, self.in_features)
            name = f"{prefix}{part}.weight"
            yield WeightSlot(name, shape, copy_into(target), index=(share.index,))


class RowParallelLinear(Linear):
    """A share of the input's features; the outputs are partial sums, for the caller to add up."""

    def __init__(
        self, in_share: Share, out_features: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(in_share.size, out_features, dtype=dtype, device=device)
        self._share = in_share

    def weight_slots(self, prefix: str, _has: HasTensor) -> Iterator[WeightSlot]:
        """This rank's columns of the weight."""
        assert self.weight is not None
        shape = (self.out_features, self._share.total)
        index = (slice(None), self._share.index)
        yield WeightSlot(f"{prefix}weight", shape, copy_into(self.weight), index=index)


@dataclass(frozen=True, slots=True)
class ColumnBlock:
    """A rank's block of the columns of rows that all ranks share; not gathered yet."""

    values: Tensor
    """[T, N / size]."""
    axis: MeshAxis
    sums: RankSums | None = None
    """What gathers and norms in one kernel; None: there is none for so many tokens."""

    def gather(self) -> Tensor:
        """[T, N] on every rank."""
        return gather_columns(self.values, self.axis)

    def normed(self, norm: RMSNorm) -> Tensor:
        """norm(rows [T, N]) on every rank."""
        if self.sums is None:
            return norm(self.gather())
        return self.sums.norm(self.values, norm.gain, norm.eps)


class ReplicatedLinear(Linear):
    """A whole weight on every rank, of which each may compute only its block of output columns.

    Reading a weight is what few tokens wait for. Where all ranks hold the same tokens, each reads
    its share of the weight, and the blocks are gathered: at once, or by whoever norms the rows
    next. Many tokens are multiplied by the whole weight, without a gather.
    """

    MAX_TOKENS = 256
    """More tokens than this are multiplied by the whole weight."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axis: MeshAxis,
        dtype: torch.dtype,
        device: torch.device,
        min_tokens: int = 1,
        sums: RankSums | None = None,
    ) -> None:
        """`axis`: the ranks that hold the same tokens; from `min_tokens` on they share the work.
        `sums`: what gathers the blocks inside other kernels, if anything does."""
        super().__init__(in_features, out_features, dtype=dtype, device=device)
        can_cut = axis.size > 1 and out_features % axis.size == 0
        self._axis = axis if can_cut else ALONE
        self._tokens = range(min_tokens, self.MAX_TOKENS + 1) if can_cut else range(0)
        self._block_matmul = linear(self._block()) if can_cut else None
        self._sums = sums

    def columns(self, x: Tensor) -> Tensor | ColumnBlock:
        """[T, in_features], alike on all ranks -> [T, out_features], or this rank's block of it."""
        if x.shape[0] not in self._tokens:
            return self(x)
        assert self._block_matmul is not None
        fuses = self._sums is not None and x.shape[0] <= self._sums.max_tokens
        return ColumnBlock(self._block_matmul(x), self._axis, self._sums if fuses else None)

    def normed(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """[T, in_features], alike on all ranks -> norm(rows [T, out_features])."""
        out = self.columns(x)
        return out.normed(norm) if isinstance(out, ColumnBlock) else norm(out)

    def pack(self) -> None:
        """Move the weight, and the block once more by itself, to the fastest layout."""
        if self.weight is not None and self._block_matmul is not None and can_pack(self.weight):
            self._block_matmul = pack_linear(self._block())
        super().pack()

    def _block(self) -> Tensor:
        assert self.weight is not None
        return self.weight.data.chunk(self._axis.size)[self._axis.rank]

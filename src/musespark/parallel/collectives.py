"""What ranks along one axis of the mesh exchange.

Every function is called by all ranks of the axis, in the same order, with tensors of the same dtype
on one kind of device. Along an axis of one rank each hands its input back. NCCL (GPUs) and gloo
(CPUs) both carry every dtype the model computes in. On a GPU the call returns before the data has
arrived; whatever the current stream does next comes after it.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from musespark.parallel.mesh import MeshAxis

# PyTorch 2.13 renamed these two, and warns under the old names.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(x: Tensor, axis: MeshAxis) -> Tensor:
    """The sum of all ranks' `x`, the same bits on each of them. `x` is overwritten."""
    if axis.size == 1:
        return x
    x = x.contiguous()
    dist.all_reduce(x, group=_group(axis))
    return x


def all_gather(x: Tensor, axis: MeshAxis) -> Tensor:
    """[T, ...] -> [size * T, ...]: all ranks' tensors, which are of one shape, in rank order."""
    if axis.size == 1:
        return x
    out = x.new_empty((axis.size * x.shape[0], *x.shape[1:]))
    _gather_into(out, x.contiguous(), group=_group(axis))
    return out


def gather_columns(x: Tensor, axis: MeshAxis) -> Tensor:
    """[T, N] -> [T, size * N]: all ranks' blocks of columns side by side, in rank order."""
    if axis.size == 1:
        return x
    num_rows, num_columns = x.shape
    blocks = all_gather(x, axis).view(axis.size, num_rows, num_columns)
    return blocks.transpose(0, 1).reshape(num_rows, axis.size * num_columns)


def reduce_scatter(x: Tensor, axis: MeshAxis) -> Tensor:
    """[size * T, ...] -> [T, ...]: this rank's run of rows of the sum of all ranks' `x`."""
    if axis.size == 1:
        return x
    assert x.shape[0] % axis.size == 0
    out = x.new_empty((x.shape[0] // axis.size, *x.shape[1:]))
    _reduce_scatter_into(out, x.contiguous(), group=_group(axis))
    return out


def broadcast(x: Tensor, axis: MeshAxis) -> Tensor:
    """The `x` of the axis' first rank, on all of them. Those of the others, of the same shape and
    dtype, are overwritten."""
    if axis.size == 1:
        return x
    x = x.contiguous()
    dist.broadcast(x, group=_group(axis), group_src=0)
    return x


def exchange_counts(counts: Tensor, axis: MeshAxis) -> Tensor:
    """[size, ...] -> [size, ...]: row r goes to rank r; row r of the result came from rank r."""
    if axis.size == 1:
        return counts
    out = torch.empty_like(counts)
    dist.all_to_all_single(out, counts.contiguous(), group=_group(axis))
    return out


def all_to_all(
    x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], axis: MeshAxis
) -> Tensor:
    """Rows to where they belong.

    Args:
        x: [sum(send_counts), ...], the rows for rank 0 first, then those for rank 1, and so on.
        send_counts: [size] rows for each rank, 0 allowed.
        receive_counts: [size] rows from each rank, 0 allowed.
        axis: whose ranks exchange.

    Returns:
        [sum(receive_counts), ...], what came from rank 0 first.
    """
    if axis.size == 1:
        return x
    assert sum(send_counts) == x.shape[0]
    out = x.new_empty((sum(receive_counts), *x.shape[1:]))
    dist.all_to_all_single(
        out, x.contiguous(), list(receive_counts), list(send_counts), group=_group(axis)
    )
    return out


class Sending:
    """A message on its way: its memory is kept until it has left."""

    def __init__(self, tensor: Tensor, work: dist.Work | None) -> None:
        self._tensor, self._work = tensor, work

    def is_done(self) -> bool:
        """Whether it is known to have left; gloo knows only after `wait`."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> None:
        """Until it has left."""
        if self._work is not None:
            self._work.wait()


def send(x: Tensor, to_rank: int, axis: MeshAxis) -> Sending:
    """Start to send `x`, without waiting for the receiver; no rows make no message."""
    x = x.contiguous()
    work = dist.isend(x, group=_group(axis), group_dst=to_rank) if x.numel() else None
    return Sending(x, work)


def receive(out: Tensor, from_rank: int, axis: MeshAxis) -> Tensor:
    """Fill `out` with what the rank sends, and return it."""
    if out.numel():
        dist.recv(out, group=_group(axis), group_src=from_rank)
    return out


def _group(axis: MeshAxis) -> dist.ProcessGroup:
    assert axis.group is not None, "a mesh on paper carries no messages: see build_mesh"
    return axis.group

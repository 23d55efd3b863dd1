"""How ranks sum and gather few tokens inside other kernels: on GPUs, and elsewhere."""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from musespark.errors import ConfigError
from musespark.ops.kernel_set import choose_kernels
from musespark.ops.rank_sums import (
    PeerMemory,
    boundary_over_ranks,
    finalize_over_ranks,
    finalize_summed_rows,
    norm_over_ranks,
    num_flags,
    sum_reference,
)
from musespark.ops.triton_import import HAS_TRITON
from musespark.parallel.collectives import all_gather, gather_columns
from musespark.parallel.mesh import MeshAxis
from musespark.parallel.rank_sums import RankSums

_MAX_TOKENS = 256
_MAX_TOKENS_ACROSS_NODES = 128


def connect_rank_sums(
    axis: MeshAxis,
    widest_row: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    wanted: bool | None = True,
) -> RankSums | None:
    """What sums over the axis, or None: collectives do. Called by all its ranks together.

    Args:
        axis: the tensor-parallel ranks.
        widest_row: elements that one token puts into a sum at most.
        dtype: of what is summed.
        device: where it is.
        wanted: `Parallelism.fuse_all_reduce`.

    Raises:
        ConfigError: it is wanted, and GPUs cannot read each other's memory, or there are no kernels
            for this dtype.
    """
    max_tokens = _MAX_TOKENS_ACROSS_NODES if axis.spans_nodes else _MAX_TOKENS
    has_kernels = HAS_TRITON and dtype in (torch.bfloat16, torch.float32)
    if wanted is None:
        if device.type != "cuda" or not has_kernels or axis.size == 1 or axis.spans_nodes:
            return None
        with contextlib.suppress(ConfigError):
            return _symmetric_sums(axis, max_tokens, widest_row, dtype)
        return None
    if not wanted:
        return None
    if device.type != "cuda":
        return GatheredSums(axis, max_tokens, dtype=dtype, device=device)
    if not has_kernels:
        raise ConfigError(
            f"fuse_all_reduce: its kernels need Triton and bfloat16 or float32, found {dtype}. "
            "Leave fuse_all_reduce out."
        )
    return _symmetric_sums(axis, max_tokens, widest_row, dtype)


def _symmetric_sums(
    axis: MeshAxis, max_tokens: int, widest_row: int, dtype: torch.dtype
) -> "SymmetricSums":
    """On all ranks, or an error on all of them."""
    sums, why = None, "another process cannot"
    try:
        sums = SymmetricSums(axis, max_tokens, widest_row, dtype=dtype)
    except RuntimeError as error:
        why = str(error)
    # The meeting of all ranks, too: nobody may use flags that are not zero yet.
    all_can = torch.tensor(sums is not None, dtype=torch.int32, device="cuda")
    dist.all_reduce(all_can, op=dist.ReduceOp.MIN, group=axis.group)
    if sums is None or not bool(all_can):
        raise ConfigError(
            f"fuse_all_reduce: the GPUs cannot read each other's memory ({why}). Leave "
            "fuse_all_reduce out."
        )
    return sums


class GatheredSums:
    """The same results from a gather and plain operations: no faster, for any device."""

    def __init__(
        self, axis: MeshAxis, max_tokens: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.max_tokens, self._axis = max_tokens, axis
        self._kernels = choose_kernels(device, dtype)

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
        """Sum or gather, then the boundary."""
        is_whole = partial.shape[1] == stream.shape[1]
        branch = self._sum(partial) if is_whole else gather_columns(partial, self._axis)
        return self._kernels.residual_boundary(
            stream, branch, alpha, beta, post_gain, post_eps, pre_gain, pre_eps
        )

    def norm(self, block: Tensor, gain: Tensor, eps: float) -> Tensor:
        """Gather, then norm."""
        return self._kernels.rms_norm(gather_columns(block, self._axis), gain, eps)

    def finalize(
        self, rows: Tensor, route_weights: Tensor, route_index: Tensor, gain: Tensor, eps: float
    ) -> Tensor:
        """Finalize, then sum."""
        return self._sum(self._kernels.expert_finalize(rows, route_weights, route_index, gain, eps))

    def finalize_rows(
        self, rows: Tensor, route_weights: Tensor, route_index: Tensor, gain: Tensor, eps: float
    ) -> Tensor:
        """Sum, then finalize."""
        return self._kernels.expert_finalize(self._sum(rows), route_weights, route_index, gain, eps)

    def _sum(self, x: Tensor) -> Tensor:
        return sum_reference(all_gather(x, self._axis).view(self._axis.size, *x.shape))


class SymmetricSums:
    """Kernels that read all ranks' buffers in memory that their GPUs share (NVLink, no multicast).

    Two buffers take turns, so that one is written while another rank may still read the other. A
    step that uses neither has a collective in that place, which is a meeting as well.
    """

    def __init__(
        self,
        axis: MeshAxis,
        max_tokens: int,
        widest_row: int,
        *,
        dtype: torch.dtype,
    ) -> None:
        """On the current device; used once all ranks have met.

        Raises:
            RuntimeError: the GPUs cannot read each other's memory.
        """
        self.max_tokens = max_tokens
        capacity = max_tokens * widest_row
        self._memories: list[PeerMemory] = []
        self._kept: list[Any] = []
        self._turn = 0
        for _ in range(2):
            buffers = self._share(axis, capacity, dtype)
            flags = self._share(axis, num_flags(axis.size), torch.int32)
            self._memories.append(PeerMemory(axis.rank, buffers, flags, capacity))
        torch.cuda.synchronize()

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
        """One kernel."""
        return boundary_over_ranks(
            stream, partial, alpha, beta, post_gain, post_eps, pre_gain, pre_eps, self._next()
        )

    def norm(self, block: Tensor, gain: Tensor, eps: float) -> Tensor:
        """One kernel."""
        return norm_over_ranks(block, gain, eps, self._next())

    def finalize(
        self, rows: Tensor, route_weights: Tensor, route_index: Tensor, gain: Tensor, eps: float
    ) -> Tensor:
        """One kernel."""
        return finalize_over_ranks(rows, route_weights, route_index, gain, eps, self._next())

    def finalize_rows(
        self, rows: Tensor, route_weights: Tensor, route_index: Tensor, gain: Tensor, eps: float
    ) -> Tensor:
        """One kernel."""
        return finalize_summed_rows(rows, route_weights, route_index, gain, eps, self._next())

    def _next(self) -> PeerMemory:
        self._turn = 1 - self._turn
        return self._memories[self._turn]

    def _share(self, axis: MeshAxis, elements: int, dtype: torch.dtype) -> Tensor:
        """[ranks] addresses of a zeroed tensor on every rank."""
        assert axis.group is not None
        device = torch.device("cuda", torch.cuda.current_device())  # with its number
        own = symmetric_memory.empty(elements, dtype=dtype, device=device)
        handle = symmetric_memory.rendezvous(own, axis.group)
        own.zero_()
        self._kept.append((own, handle))
        ranks = range(axis.size)
        addresses = [handle.get_buffer(rank, (elements,), dtype).data_ptr() for rank in ranks]
        return torch.tensor(addresses, dtype=torch.int64, device=device)

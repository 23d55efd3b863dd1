"""Sums and gathers over ranks inside the kernels on either side of them, in one shot.

Every rank's device can read every rank's buffer. A kernel puts its rank's part into its own buffer,
meets the other ranks, and reads all parts itself: one trip over the link instead of a collective's
several, and no launch between. Sums run in float32, in rank order, and are rounded once, so all
ranks get the same bits.

Of a layer's exchanges these can be inside of kernels:

    finalize_over_ranks     b( sum_r finalize(rows of rank r) )              expert parallel
    finalize_summed_rows    finalize( b( sum_r rows of rank r ) )            tensor parallel
    boundary_over_ranks     boundary( stream, b( sum_r branch of rank r ))   attention, dense FFN
                            boundary( stream, columns of all ranks )         unpooler
    norm_over_ranks         rms_norm( columns of all ranks )                 pooler
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from musespark.ops.expert_finalize import expert_finalize_reference
from musespark.ops.precision import wide_dtype
from musespark.ops.residual_boundary import residual_boundary_reference
from musespark.ops.rms_norm import rms_norm_reference
from musespark.ops.triton_import import next_power_of_2, num_multiprocessors, round_to, tl, triton

MAX_PROGRAMS = 1024
"""Programs of one launch that can meet their likes on other ranks."""


def num_flags(num_ranks: int) -> int:
    """Flags of one rank: for each program one per rank, and its count of meetings."""
    return MAX_PROGRAMS * (num_ranks + 1)


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """A buffer and flags on every rank of a group, as the kernels of one rank see them.

    A buffer is used again only after the ranks have met on another one, or in a collective: then
    nobody is still reading it.
    """

    rank: int
    buffers: Tensor
    """[ranks] int64 addresses of all ranks' buffers, this rank's among them."""
    flags: Tensor
    """[ranks] int64 addresses of all ranks' flags: `num_flags(ranks)` int32, zero at first."""
    capacity: int
    """Elements of a buffer."""

    @property
    def size(self) -> int:
        """Ranks."""
        return self.buffers.shape[0]


def sum_reference(parts: Tensor) -> Tensor:
    """[ranks, ...] -> [...]: the sum in float32, in rank order, rounded once."""
    total = parts[0].to(wide_dtype(parts.dtype))
    for part in parts[1:]:
        total = total + part
    return total.to(parts.dtype)


def columns_reference(parts: Tensor) -> Tensor:
    """[ranks, T, N / ranks] -> [T, N]: blocks of columns side by side."""
    return parts.transpose(0, 1).flatten(1)


def finalize_summed_rows_reference(
    parts: Tensor, route_weights: Tensor, route_index: Tensor, gain: Tensor, eps: float
) -> Tensor:
    """`parts` [ranks, R, H] partial rows; the rest as for `expert_finalize`."""
    return expert_finalize_reference(sum_reference(parts), route_weights, route_index, gain, eps)


def boundary_over_ranks_reference(
    stream: Tensor,
    parts: Tensor,
    alpha: Tensor,
    beta: Tensor,
    post_gain: Tensor | None,
    post_eps: float,
    pre_gain: Tensor,
    pre_eps: float,
) -> tuple[Tensor, Tensor]:
    """`parts` [ranks, T, D] partial branches, or [ranks, T, D / ranks] blocks of columns; the rest
    as for `residual_boundary`."""
    is_whole = parts.shape[2] == stream.shape[1]
    branch = sum_reference(parts) if is_whole else columns_reference(parts)
    return residual_boundary_reference(
        stream, branch, alpha, beta, post_gain, post_eps, pre_gain, pre_eps
    )


def norm_over_ranks_reference(parts: Tensor, gain: Tensor, eps: float) -> Tensor:
    """`parts` [ranks, T, N / ranks]; the rest as for `rms_norm`."""
    return rms_norm_reference(columns_reference(parts), gain, eps)


@triton.jit
def _buffer(buffers_ptr, rank, dtype: tl.constexpr):
    """The buffer of a rank."""
    return tl.load(buffers_ptr + rank).to(tl.pointer_type(dtype))


@triton.jit
def _meet(flags_ptr, rank, RANKS: tl.constexpr, BLOCK_R: tl.constexpr):
    """Wait for this program's likes on all ranks; what they wrote before can be read afterwards.

    A program counts its meetings, and writes the count to its flag on every rank. It goes on when
    all ranks have written as much, or more, to its own flags.
    """
    tl.debug_barrier()  # all threads' writes come before the flags
    peer = tl.arange(0, BLOCK_R)
    is_rank = peer < RANKS
    place = tl.program_id(0) * (RANKS + 1)
    own = tl.load(flags_ptr + rank).to(tl.pointer_type(tl.int32)) + place
    count = tl.load(own + RANKS) + 1
    theirs = tl.load(flags_ptr + peer, is_rank, other=0).to(tl.pointer_type(tl.int32))
    counts = tl.zeros([BLOCK_R], tl.int32) + count
    tl.atomic_xchg(theirs + place + rank, counts, mask=is_rank, sem="release", scope="sys")
    arrived = count - 1
    while arrived < count:
        seen = tl.atomic_add(own + peer, 0, mask=is_rank, sem="acquire", scope="sys")
        arrived = tl.min(tl.where(is_rank, seen, count))
    tl.store(own + RANKS, count)
    tl.debug_barrier()


@triton.jit
def _sum_parts(buffers_ptr, offset, inside, RANKS: tl.constexpr, dtype: tl.constexpr):
    """The float32 sum of all ranks' elements at `offset`, rounded as the buffers are."""
    first = tl.load(_buffer(buffers_ptr, 0, dtype) + offset, inside, other=0.0)
    total = first.to(tl.float32)
    # Unrolled, so that several parts are under way at once; all eight would not fit into registers.
    for peer in tl.range(1, RANKS, loop_unroll_factor=4):
        part = tl.load(_buffer(buffers_ptr, peer, dtype) + offset, inside, other=0.0)
        total += part.to(tl.float32)
    return round_to(total, dtype).to(tl.float32)


@triton.jit
def _gather_parts(buffers_ptr, row, column, width, RANKS: tl.constexpr, dtype: tl.constexpr):
    """A row whose columns lie in equal blocks on the ranks, float32."""
    share = width // RANKS
    total = tl.zeros(column.shape, tl.float32)
    for peer in tl.range(0, RANKS, loop_unroll_factor=4):
        place = column - peer * share
        part = _buffer(buffers_ptr, peer, dtype) + row * share + place
        total += tl.load(part, (place >= 0) & (place < share), other=0.0).to(tl.float32)
    return total


@triton.jit
def _publish(part_ptr, stride, share, num_rows, mine, BLOCK: tl.constexpr):
    """Copy this program's rows into this rank's buffer."""
    column = tl.arange(0, BLOCK)
    inside = column < share
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        part = tl.load(part_ptr + row * stride + column, inside, other=0.0)
        tl.store(mine + row * share + column, part, inside)


@triton.jit(do_not_specialize=["num_rows", "rank"])
def _boundary_over_ranks_kernel(
    partial_ptr,
    stream_ptr,
    alpha_ptr,
    beta_ptr,
    post_gain_ptr,
    pre_gain_ptr,
    new_stream_ptr,
    normed_ptr,
    buffers_ptr,
    flags_ptr,
    rank,
    num_rows,
    width,
    partial_stride,
    post_eps,
    pre_eps,
    HAS_POST_GAIN: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows program_id, program_id + num_programs, ...: all into the buffer, then one by one.

    HAS_COLUMNS: parts are blocks of columns; else they are summed.
    """
    dtype: tl.constexpr = normed_ptr.dtype.element_ty
    column = tl.arange(0, BLOCK)
    inside = column < width
    share = width // RANKS if HAS_COLUMNS else width
    mine = _buffer(buffers_ptr, rank, dtype)
    _publish(partial_ptr, partial_stride, share, num_rows, mine, BLOCK)
    _meet(flags_ptr, rank, RANKS, BLOCK_R)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        offset = row * width + column
        if HAS_COLUMNS:
            branch = _gather_parts(buffers_ptr, row, column, width, RANKS, dtype)
        else:
            branch = _sum_parts(buffers_ptr, offset, inside, RANKS, dtype)
        # A program has a row or two: the channels' vectors are read when they are needed, since
        # the parts of all ranks fill the registers before.
        if HAS_POST_GAIN:
            branch *= tl.load(post_gain_ptr + column, inside, other=0.0)
        stream = tl.load(stream_ptr + offset, inside, other=0.0)
        stream *= tl.load(alpha_ptr + column, inside, other=0.0)
        factor = tl.rsqrt(tl.sum(branch * branch) / width + post_eps)
        stream += tl.load(beta_ptr + column, inside, other=0.0) * (branch * factor)
        tl.store(new_stream_ptr + offset, stream, inside)
        normed = stream * tl.rsqrt(tl.sum(stream * stream) / width + pre_eps)
        normed *= tl.load(pre_gain_ptr + column, inside, other=0.0)
        tl.store(normed_ptr + offset, round_to(normed, dtype), inside)


def boundary_over_ranks(
    stream: Tensor,
    partial: Tensor,
    alpha: Tensor,
    beta: Tensor,
    post_gain: Tensor | None,
    post_eps: float,
    pre_gain: Tensor,
    pre_eps: float,
    memory: PeerMemory,
) -> tuple[Tensor, Tensor]:
    """`residual_boundary` of a branch that lies in parts on all ranks.

    Called by all ranks together, with the same T. `partial` is either [T, D], a part of a sum over
    ranks, or [T, D / ranks], a block of columns.
    """
    num_rows, width = stream.shape
    normed = partial.new_empty((num_rows, width))
    new_stream = torch.empty_like(stream)
    if not num_rows:
        return normed, new_stream
    assert partial.numel() <= memory.capacity
    assert partial.shape[1] in (width, width / memory.size)
    assert stream.is_contiguous()
    assert partial.stride(1) == 1
    block = next_power_of_2(width)
    _boundary_over_ranks_kernel[(_num_programs(num_rows, stream.device),)](
        partial,
        stream,
        alpha,
        beta,
        post_gain,
        pre_gain,
        new_stream,
        normed,
        memory.buffers,
        memory.flags,
        memory.rank,
        num_rows,
        width,
        partial.stride(0),
        post_eps,
        pre_eps,
        HAS_POST_GAIN=post_gain is not None,
        HAS_COLUMNS=partial.shape[1] < width,
        RANKS=memory.size,
        BLOCK_R=next_power_of_2(memory.size),
        BLOCK=block,
        num_warps=max(1, min(16, block // 256)),
    )
    return normed, new_stream


@triton.jit(do_not_specialize=["num_rows", "rank"])
def _norm_over_ranks_kernel(
    part_ptr,
    gain_ptr,
    out_ptr,
    buffers_ptr,
    flags_ptr,
    rank,
    num_rows,
    width,
    part_stride,
    eps,
    RANKS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows program_id, program_id + num_programs, ...: all into the buffer, then one by one."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    column = tl.arange(0, BLOCK)
    inside = column < width
    mine = _buffer(buffers_ptr, rank, dtype)
    _publish(part_ptr, part_stride, width // RANKS, num_rows, mine, BLOCK)
    _meet(flags_ptr, rank, RANKS, BLOCK_R)
    gain = tl.load(gain_ptr + column, inside, other=0.0)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        x = _gather_parts(buffers_ptr, row, column, width, RANKS, dtype)
        normed = x * tl.rsqrt(tl.sum(x * x) / width + eps) * gain
        tl.store(out_ptr + row * width + column, round_to(normed, dtype), inside)


def norm_over_ranks(part: Tensor, gain: Tensor, eps: float, memory: PeerMemory) -> Tensor:
    """`rms_norm` of rows [T, N] whose blocks of columns `part` [T, N / ranks] are on all ranks.

    Called by all ranks together, with the same T.
    """
    num_rows, width = part.shape[0], gain.shape[0]
    out = part.new_empty((num_rows, width))
    if not num_rows:
        return out
    assert part.shape[1] * memory.size == width
    assert part.numel() <= memory.capacity
    assert part.stride(1) == 1
    block = next_power_of_2(width)
    _norm_over_ranks_kernel[(_num_programs(num_rows, part.device),)](
        part,
        gain,
        out,
        memory.buffers,
        memory.flags,
        memory.rank,
        num_rows,
        width,
        part.stride(0),
        eps,
        RANKS=memory.size,
        BLOCK_R=next_power_of_2(memory.size),
        BLOCK=block,
        num_warps=max(1, min(16, block // 256)),
    )
    return out


@triton.jit(do_not_specialize=["num_tokens", "rank"])
def _finalize_over_ranks_kernel(
    rows_ptr,
    weights_ptr,
    index_ptr,
    gain_ptr,
    out_ptr,
    buffers_ptr,
    flags_ptr,
    rank,
    num_tokens,
    width,
    row_stride,
    eps,
    SUM_ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Tokens program_id, program_id + num_programs, ...

    SUM_ROWS: rows are summed over ranks and then finalized; else finalized and then summed.
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    slot = tl.arange(0, BLOCK_K)
    column = tl.arange(0, BLOCK)
    inside = column < width
    gain = tl.load(gain_ptr + column, inside, other=0.0)
    mine = _buffer(buffers_ptr, rank, dtype)
    for token in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        route = token * TOP_K + slot
        index = tl.load(index_ptr + route, slot < TOP_K, other=-1).to(tl.int64)
        there = (index >= 0)[:, None] & inside[None, :]
        source = rows_ptr + index[:, None] * row_stride + column[None, :]
        rows = tl.load(source, there, other=0.0)
        if SUM_ROWS:
            tl.store(mine + route[:, None] * width + column[None, :], rows, there)
        else:
            weight = tl.load(weights_ptr + route, slot < TOP_K, other=0.0)
            scaled = rows.to(tl.float32) * gain[None, :]
            factor = tl.rsqrt(tl.sum(scaled * scaled, axis=1) / width + eps)
            factor = tl.where(index >= 0, weight * factor, 0.0)
            part = tl.sum(scaled * factor[:, None], axis=0)
            tl.store(mine + token * width + column, round_to(part, dtype), inside)
    _meet(flags_ptr, rank, RANKS, BLOCK_R)
    for token in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        if SUM_ROWS:
            # One row after the other: sums of all K at once would not fit into registers.
            total = tl.zeros([BLOCK], tl.float32)
            for route in range(token * TOP_K, (token + 1) * TOP_K):
                there = column < tl.where(tl.load(index_ptr + route) >= 0, width, 0)
                row = _sum_parts(buffers_ptr, route * width + column, there, RANKS, dtype) * gain
                factor = tl.rsqrt(tl.sum(row * row) / width + eps)
                total += row * (factor * tl.load(weights_ptr + route))
        else:
            total = _sum_parts(buffers_ptr, token * width + column, inside, RANKS, dtype)
        tl.store(out_ptr + token * width + column, round_to(total, dtype), inside)


def finalize_over_ranks(
    rows: Tensor,
    route_weights: Tensor,
    route_index: Tensor,
    gain: Tensor,
    eps: float,
    memory: PeerMemory,
) -> Tensor:
    """`expert_finalize` of this rank's routes, summed over ranks: [T, H].

    Called by all ranks together, with the same T.
    """
    return _finalize(rows, route_weights, route_index, gain, eps, memory, sum_rows=False)


def finalize_summed_rows(
    rows: Tensor,
    route_weights: Tensor,
    route_index: Tensor,
    gain: Tensor,
    eps: float,
    memory: PeerMemory,
) -> Tensor:
    """`expert_finalize` of rows that are partial sums over ranks: [T, H].

    Called by all ranks together; the routes that are -1 are the same on all of them.
    """
    return _finalize(rows, route_weights, route_index, gain, eps, memory, sum_rows=True)


def _finalize(
    rows: Tensor,
    route_weights: Tensor,
    route_index: Tensor,
    gain: Tensor,
    eps: float,
    memory: PeerMemory,
    *,
    sum_rows: bool,
) -> Tensor:
    num_tokens, top_k = route_index.shape
    width = rows.shape[-1]
    out = rows.new_empty((num_tokens, width))
    if not num_tokens:
        return out
    assert num_tokens * width * (top_k if sum_rows else 1) <= memory.capacity
    assert rows.stride(1) == 1
    assert route_weights.is_contiguous()
    assert route_index.is_contiguous()
    block, block_k = next_power_of_2(width), next_power_of_2(top_k)
    _finalize_over_ranks_kernel[(_num_programs(num_tokens, rows.device),)](
        rows,
        route_weights,
        route_index,
        gain,
        out,
        memory.buffers,
        memory.flags,
        memory.rank,
        num_tokens,
        width,
        rows.stride(0),
        eps,
        SUM_ROWS=sum_rows,
        RANKS=memory.size,
        BLOCK_R=next_power_of_2(memory.size),
        TOP_K=top_k,
        BLOCK_K=block_k,
        BLOCK=block,
        num_warps=max(1, min(16, block // 256)),
    )
    return out


def _num_programs(num_rows: int, device: torch.device) -> int:
    """Programs that are all on the device at once, since each waits for its like elsewhere."""
    return min(num_rows, num_multiprocessors(device), MAX_PROGRAMS)

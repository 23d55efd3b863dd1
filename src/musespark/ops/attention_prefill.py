"""Causal attention of one sequence's new tokens over its keys, full or within a sliding window.

    visible(i, j) = position_j <= position_i  and  position_j > position_i - window
    out_i = sum_j softmax_j(scale * q_i . k_j) v_j      over the visible j

A window counts the query's own position. Query heads share key-value heads in consecutive groups.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from musespark.ops.precision import wide_dtype
from musespark.ops.triton_import import dot_in_float32, next_power_of_2, round_to, tl, triton

LOG2_E = 1.4426950408889634
"""exp(x) = exp2(LOG2_E * x): kernels fold it into the scale."""

# Rows (query heads that share a key-value head, times tokens) and keys of the kernel's tiles.
_BLOCK_ROWS, _BLOCK_S = 64, 64
_WARPS, _STAGES = 4, 2

# Queries handled by one call on a windowed layer: keys outside the chunk's windows are not read,
# so that the work grows with tokens times window, not with tokens squared.
_WINDOW_CHUNK = 64


def visible(
    num_queries: int, num_keys: int, offset: int, window: int | None, device: torch.device
) -> Tensor:
    """[num_queries, num_keys] bool: which key each query sees.

    `offset` is the position of the first query minus the position of the first key.
    """
    query = torch.arange(num_queries, device=device)[:, None] + offset
    key = torch.arange(num_keys, device=device)[None, :]
    mask = key <= query
    return mask if window is None else mask & (key > query - window)


def attention_prefill_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """The formula above in float32. Arguments as for `attention_prefill`."""
    num_queries, num_heads, _ = query.shape
    num_keys, num_kv_heads, _ = key.shape
    wide = wide_dtype(query.dtype)
    group = num_heads // num_kv_heads
    key = key.to(wide).repeat_interleave(group, dim=1)  # [S, heads, head_dim]
    value = value.to(wide).repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.to(wide), key) * scale
    mask = visible(num_queries, num_keys, num_keys - num_queries, window, query.device)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype)


def attention_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attention of the last T of S positions of one sequence.

    Args:
        query: [T, heads, head_dim]; its last row is at the same position as the last key.
        key, value: [S, kv_heads, head_dim] at consecutive positions, S >= T. On a windowed layer
            they may begin at the first position that the first query sees.
        scale: multiplies the scores before the softmax.
        window: keys a query sees, its own included; None: all up to its own.

    Returns:
        [T, heads, head_dim] in query's dtype.
    """
    num_queries, num_keys = query.shape[0], key.shape[0]
    offset = num_keys - num_queries
    if window is None or window >= num_keys:
        return _attend(query, key, value, scale, offset, None)
    out = torch.empty_like(query)
    for start in range(0, num_queries, _WINDOW_CHUNK):
        stop = min(start + _WINDOW_CHUNK, num_queries)
        first_key = max(0, start + offset - window + 1)
        keys = slice(first_key, stop + offset)
        out[start:stop] = _attend(
            query[start:stop], key[keys], value[keys], scale, start + offset - first_key, window
        )
    return out


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, offset: int, window: int | None
) -> Tensor:
    """One call to the fused attention; `offset` as for `visible`."""
    causal = offset == 0 and window is None
    mask = None if causal else visible(len(query), len(key), offset, window, query.device)
    num_kv_heads = key.shape[1]
    group = query.shape[1] // num_kv_heads
    # Key-value heads take the place of the batch; the query heads that share one read one copy.
    out = F.scaled_dot_product_attention(
        query.unflatten(1, (num_kv_heads, group)).permute(1, 2, 0, 3),  # [kv_heads, group, T, :]
        key.transpose(0, 1)[:, None].expand(-1, group, -1, -1),
        value.transpose(0, 1)[:, None].expand(-1, group, -1, -1),
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
    )
    return out.permute(2, 0, 1, 3).flatten(1, 2)  # [T, heads, head_dim]


@triton.jit
def attend_to_keys(
    query,
    position,
    key_ptr,
    value_ptr,
    table_ptr,
    first_key,
    start,
    stop,
    end,
    log2_scale,
    window,
    top,
    total,
    out,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    IS_CLEAR: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Steps over the keys from `start` to `stop`; clear ones hide no key from any row.

    Keys from `end` on do not exist. `top` (the maximum [M] of scores in powers of two), `total`
    (the sum [M]) and `out` (the sum of values [M, head_dim], undivided) are the softmax so far.
    """
    d = tl.arange(0, HEAD_DIM)
    dtype: tl.constexpr = query.dtype
    for begin in range(start, stop, BLOCK_S):
        key_position = begin + tl.arange(0, BLOCK_S)
        place = key_position - first_key
        if IS_CLEAR:
            block = tl.load(table_ptr + place // BLOCK_SIZE).to(tl.int64)
        else:
            exists = key_position < end
            block = tl.load(table_ptr + place // BLOCK_SIZE, exists, other=0).to(tl.int64)
        row = (block * BLOCK_SIZE + place % BLOCK_SIZE) * (KV_HEADS * HEAD_DIM)
        key_place = key_ptr + row[None, :] + d[:, None]
        value_place = value_ptr + row[:, None] + d[None, :]
        if IS_CLEAR:
            key, value = tl.load(key_place), tl.load(value_place)
        else:
            key = tl.load(key_place, exists[None, :] & (d >= 0)[:, None], other=0.0)
            value = tl.load(value_place, exists[:, None] & (d >= 0)[None, :], other=0.0)
        scores = tl.dot(query, key.to(dtype), input_precision="ieee")
        if not IS_CLEAR:
            visible = exists[None, :]
            if CAUSAL:
                visible = visible & (key_position[None, :] <= position[:, None])
            if HAS_WINDOW:
                visible = visible & (key_position[None, :] > position[:, None] - window)
            scores = tl.where(visible, scores, -float("inf"))
        # Scaled within the exponent, as one instruction; the scale is positive.
        new_top = tl.maximum(top, tl.max(scores, axis=1) * log2_scale)
        factor = tl.exp2(top - new_top)
        weights = tl.exp2(scores * log2_scale - new_top[:, None])
        total = total * factor + tl.sum(weights, axis=1)
        out = tl.dot(
            weights.to(dtype), value.to(dtype), out * factor[:, None], input_precision="ieee"
        )
        top = new_top
    return top, total, out


@triton.jit
def _attend_from(
    query,
    position,
    first_position,
    key_ptr,
    value_ptr,
    table_ptr,
    first_key,
    start,
    stop,
    log2_scale,
    window,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Attention of query [M, head_dim] at `position` [M] over the keys from `start` to `stop`.

    The positions lie from `first_position` to `stop` - 1. Most steps need no mask, which saves half
    their arithmetic: only those at the window's edge and around the queries' own positions do.
    """
    # Finite, so that a row without a visible key stays free of NaN.
    top = tl.full((BLOCK_M,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    out = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    clear_start = start
    if HAS_WINDOW:
        clear_start += tl.cdiv(tl.maximum(stop - window - start, 0), BLOCK_S) * BLOCK_S
    seen_by_all = tl.maximum(tl.minimum(stop, first_position + 1) - start, 0)
    clear_stop = tl.maximum(start + seen_by_all // BLOCK_S * BLOCK_S, clear_start)
    if HAS_WINDOW:
        top, total, out = attend_to_keys(
            query, position, key_ptr, value_ptr, table_ptr, first_key,
            start, tl.minimum(clear_start, stop), stop, log2_scale, window, top, total, out,
            KV_HEADS, HEAD_DIM, BLOCK_SIZE, HAS_WINDOW, True, False, BLOCK_S,
        )  # fmt: skip
    top, total, out = attend_to_keys(
        query, position, key_ptr, value_ptr, table_ptr, first_key,
        clear_start, clear_stop, stop, log2_scale, window, top, total, out,
        KV_HEADS, HEAD_DIM, BLOCK_SIZE, HAS_WINDOW, True, True, BLOCK_S,
    )  # fmt: skip
    top, total, out = attend_to_keys(
        query, position, key_ptr, value_ptr, table_ptr, first_key,
        clear_stop, stop, stop, log2_scale, window, top, total, out,
        KV_HEADS, HEAD_DIM, BLOCK_SIZE, HAS_WINDOW, True, False, BLOCK_S,
    )  # fmt: skip
    return out / tl.where(total > 0, total, 1.0)[:, None]


def split_first(first_sequence: int | Tensor) -> tuple[int, Tensor | None]:
    """(the first sequence, 0 where only the device knows it; what the device knows it by)"""
    if isinstance(first_sequence, Tensor):
        return 0, first_sequence
    return first_sequence, None


def num_runs(num_tokens: int, num_sequences: int, first: int, block_t: int) -> int:
    """Runs of `block_t` tokens, as `find_run` counts them, of all sequences from the first on."""
    return (num_tokens - first) // block_t + num_sequences - first


@triton.jit
def find_run(run, query_start_ptr, first_sequence, num_sequences, BLOCK_T: tl.constexpr):
    """Whose tokens a run of BLOCK_T has: (sequence, its first token, its tokens, begin).

    Those from `begin` on are the run's, if there are so many. Sequence b owns at least as many runs
    as it needs if its first is query_start[b] // BLOCK_T + b, so it is found by bisection, and no
    list of runs has to be built.
    """
    first_token = tl.load(query_start_ptr + first_sequence)
    low, high = first_sequence, num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        first_run = (tl.load(query_start_ptr + middle) - first_token) // BLOCK_T
        after = first_run + middle - first_sequence <= run
        low = tl.where(after, middle, low)
        high = tl.where(after, high, middle)
    query_start = tl.load(query_start_ptr + low)
    # Where all sequences are left out, none of the last one's tokens are the run's.
    num_queries = tl.load(query_start_ptr + tl.minimum(low + 1, num_sequences)) - query_start
    own_run = run - ((query_start - first_token) // BLOCK_T + low - first_sequence)
    return low, query_start, num_queries, own_run * BLOCK_T


@triton.jit(
    do_not_specialize=["first_sequence", "num_sequences", "table_stride"],
    do_not_specialize_on_alignment=[
        "table_ptr",
        "query_start_ptr",
        "key_start_ptr",
        "seq_lens_ptr",
        "first_ptr",
    ],
)
def _prefill_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    query_start_ptr,
    key_start_ptr,
    seq_lens_ptr,
    out_ptr,
    first_ptr,
    first_sequence,
    num_sequences,
    query_stride,
    table_stride,
    log2_scale,
    window,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
):
    """A run of BLOCK_T tokens of one sequence (axis 0) with the query heads of one KV head (1).

    The last runs, which see the most keys, start first.
    """
    run = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    if first_ptr is not None:
        first_sequence = tl.load(first_ptr)
    sequence, query_start, num_queries, begin = find_run(
        run, query_start_ptr, first_sequence, num_sequences, BLOCK_T
    )
    if begin < num_queries:
        length = tl.load(seq_lens_ptr + sequence)
        first_key = tl.load(key_start_ptr + sequence)
        row = tl.arange(0, BLOCK_T * BLOCK_G)
        token, member = begin + row // BLOCK_G, row % BLOCK_G
        d = tl.arange(0, HEAD_DIM)
        inside = ((token < num_queries) & (member < GROUP))[:, None] & (d >= 0)[None, :]
        head = kv_head * GROUP + member
        flat = (query_start + token).to(tl.int64)
        query = tl.load(
            query_ptr + (flat * query_stride + head * HEAD_DIM)[:, None] + d[None, :],
            inside,
            other=0.0,
        )
        position = length - num_queries + token
        start = first_key
        if HAS_WINDOW:
            start = tl.maximum(start, length - num_queries + begin - window + 1)
        stop = tl.minimum(length, length - num_queries + begin + BLOCK_T)
        dtype: tl.constexpr = tl.float32 if IN_FLOAT32 else query.dtype
        out = _attend_from(
            query.to(dtype), position, length - num_queries + begin,
            key_ptr + kv_head * HEAD_DIM, value_ptr + kv_head * HEAD_DIM,
            table_ptr + sequence.to(tl.int64) * table_stride, first_key, start, stop,
            log2_scale, window, KV_HEADS, HEAD_DIM, BLOCK_SIZE, HAS_WINDOW,
            BLOCK_T * BLOCK_G, BLOCK_S,
        )  # fmt: skip
        place = (flat * (KV_HEADS * GROUP) + head) * HEAD_DIM
        tl.store(
            out_ptr + place[:, None] + d[None, :], round_to(out, out_ptr.dtype.element_ty), inside
        )


def attention_prefill_triton(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    key_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None = None,
    *,
    first_sequence: int | Tensor = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of the new tokens of many sequences over the paged cache, in one launch.

    Args:
        query: [T, heads, head_dim].
        key_cache, value_cache: [blocks, block_size, kv_heads, head_dim], in query's dtype or an
            8-bit float, the new tokens' own keys and values included.
        block_table: [B, N] integer blocks of each sequence in order of position.
        query_start: [B + 1] int32 first new token of each sequence, and T at the end.
        key_start: [B] int32 position of the first key of a sequence's first block in the table.
        seq_lens: [B] int32 tokens of each sequence, the new ones included.
        scale: multiplies the scores before the softmax.
        window: keys a query sees, its own included; None: all up to its own.
        first_sequence: sequences before it, one token each, are left out; a number, or [1] int32
            where only the device knows it.
        out: [T, heads, head_dim] to write to.

    Returns:
        [T, heads, head_dim] in query's dtype. head_dim must be a power of two.
    """
    num_tokens, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    num_sequences = seq_lens.shape[0]
    first, first_on_device = split_first(first_sequence)
    if num_sequences == first:
        return out
    assert head_dim == next_power_of_2(head_dim)
    assert query.stride()[1:] == (head_dim, 1)
    assert block_table.stride(1) == 1
    assert out.is_contiguous()
    group = num_heads // num_kv_heads
    block_g = next_power_of_2(group)
    # Wide heads and float32 take more room, and the interpreter more time.
    in_float32 = dot_in_float32(query.dtype)
    rows = 16 if in_float32 else _BLOCK_ROWS
    block_t = max(1, rows // block_g)
    runs = num_runs(num_tokens, num_sequences, first, block_t)
    _prefill_kernel[(runs, num_kv_heads)](
        query,
        key_cache,
        value_cache,
        block_table,
        query_start,
        key_start,
        seq_lens,
        out,
        first_on_device,
        first,
        num_sequences,
        query.stride(0),
        block_table.stride(0),
        scale * LOG2_E,
        0 if window is None else window,
        KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        HAS_WINDOW=window is not None,
        BLOCK_G=block_g,
        BLOCK_T=block_t,
        BLOCK_S=32 if in_float32 else _BLOCK_S,
        IN_FLOAT32=in_float32,
        num_warps=_WARPS if head_dim <= 64 else 8,
        num_stages=_STAGES,
    )
    return out

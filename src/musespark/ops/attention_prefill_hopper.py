"""`attention_prefill_triton` for Hopper GPUs, bfloat16 and heads of 64: warps with roles.

A program has the query heads of one key-value head for a run of tokens. Four warps copy keys and
values from the paged cache into a ring of tiles in shared memory, ahead of the warpgroups that
compute. Each of these has 64 rows of its own (query heads that share a key-value head, times
tokens): scores by matrix instructions, their softmax in registers, and from there, as the left
operand, the product with the values. One warpgroup's softmax runs beside the others' products, and
beside its own product of the tile before.

    ring     tiles of 128 keys and their values
    full     a tile is there: one arrival of each thread that copies
    empty    nobody reads the tile any more: one arrival of each warpgroup
    asked    an item's queries are there, by turns in one half of their memory and in the other; one
             arrival of each thread that copies
    done     nobody reads them any more: one arrival of each warpgroup

Tiles are counted from the run's last key down. So the queries' own positions lie in the first tile,
the window's edge in the last one or two, and the tiles between need no mask.
"""

# mypy: disable-error-code="assignment, unreachable, var-annotated"
from collections.abc import Callable

import torch
from torch import Tensor

from musespark.ops.attention_prefill import (
    LOG2_E,
    attention_prefill_triton,
    find_run,
    num_runs,
    split_first,
)
from musespark.ops.gluon_import import (
    HAS_GLUON,
    async_copy,
    copy_words,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from musespark.ops.gluon_ring import allocate_ring, next_slot
from musespark.ops.triton_import import (
    IS_INTERPRETED,
    is_hopper,
    next_power_of_2,
    num_multiprocessors,
)

HEAD_DIM = 64
MIN_TOKENS = 512
"""Of a step, for this kernel to be the faster one: it has few and large items."""
# Query heads that share a key-value head: a run has no more tokens than a tile has keys.
_GROUPS = range(2, 65)
WARPGROUPS = 3
"""That compute; one more copies."""
ROWS = 64
"""Of each of them: tokens times query heads."""

_D = gl.constexpr(HEAD_DIM)
_ROWS = gl.constexpr(ROWS)
_C = gl.constexpr(WARPGROUPS)
_BLOCK_S = gl.constexpr(128)  # keys of a tile
_STAGES = gl.constexpr(4)  # tiles of the ring
_COPY_WARPS = gl.constexpr(4)
_PART = gl.constexpr(32)  # keys that they copy at a time
# Of a lane that computes, and of one that copies.
_REGISTERS = gl.constexpr(160)
_COPY_REGISTERS = gl.constexpr(32)

if HAS_GLUON:
    _TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
    # 16 bytes each, eight lanes side by side.
    _COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
    _OUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16]))
    _EIGHT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]))


@gluon.jit
def _find_item(
    step, pointers, scalars, KV_HEADS: gl.constexpr, HAS_WINDOW: gl.constexpr, BLOCK_T: gl.constexpr
):  # fmt: skip
    """A program's item, from 0 on, and what all its warps must know of it.

    Returns (KV head, sequence, its first token, number of tokens, the run's first, position of
    that, position behind the run's last key, of the first key it may read, of the first one in the
    table, number of tiles). Without tokens there are no tiles. Long runs come first; programs take
    them to and fro, so that each gets as much to do.
    """
    query_start_ptr, key_start_ptr, seq_lens_ptr = pointers
    runs, _items, first_sequence, num_sequences, window, _log2_scale = scalars
    at = gl.program_id(0)
    if step % 2 == 1:
        at = gl.num_programs(0) - 1 - at
    item = step * gl.num_programs(0) + at
    kv_head = item % KV_HEADS
    run = runs - 1 - item // KV_HEADS
    sequence, query_start, num_queries, begin = find_run(
        gl.maximum(run, 0), query_start_ptr, first_sequence, num_sequences, BLOCK_T
    )
    sequence = gl.minimum(sequence, num_sequences - 1)
    length = gl.load(seq_lens_ptr + sequence)
    first_key = gl.load(key_start_ptr + sequence)
    position = length - num_queries + begin
    start = first_key
    if HAS_WINDOW:
        start = gl.maximum(start, position - window + 1)
    stop = gl.minimum(length, position + BLOCK_T)
    # One that hides everything for a row that is padding, of a sequence without keys.
    tiles = gl.maximum((stop - start + _BLOCK_S - 1) // _BLOCK_S, 1)
    tiles = gl.where((begin < num_queries) & (run >= 0), tiles, 0)
    return (
        kv_head, sequence, query_start, num_queries, begin, position, stop, start, first_key, tiles,
    )  # fmt: skip


@gluon.jit
def _halves(x):
    """[M, N] -> its left and right half, both in the lanes where they are."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def _fold(x, OF: gl.constexpr):
    """[M, N] -> [M, 8]: the "max" or the "sum" of every eighth, without leaving the lane."""
    if x.shape[1] == 8:
        result = gl.convert_layout(x, _EIGHT, assert_trivial=True)
    else:
        left, right = _halves(x)
        result = _fold(gl.maximum(left, right) if OF == "max" else left + right, OF)
    return result


@gluon.jit
def _by_row(x, layout: gl.constexpr):
    """[M] beside a tensor of this layout, as [M, 1]; lanes have their rows."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, layout), assert_trivial=True), 1)


@gluon.jit
def _pack(weights):
    """Float32 [M, N] -> bfloat16, two of them in each 32-bit word [M, N / 2]."""
    first, second = gl.split(gl.reshape(weights, [weights.shape[0], weights.shape[1] // 2, 2]))
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [first, second], gl.uint32, is_pure=True, pack=1
    )


@gluon.jit
def _as_left(words):
    """Words [M, N / 2] of `_pack` -> [M, N] as the left operand of a product, in their lanes."""
    first = (words & 0xFFFF).to(gl.uint16).to(gl.bfloat16, bitcast=True)
    second = (words >> 16).to(gl.uint16).to(gl.bfloat16, bitcast=True)
    both = gl.reshape(gl.join(first, second), [words.shape[0], 2 * words.shape[1]])
    return gl.convert_layout(both, gl.DotOperandLayout(0, _OUT, 2), assert_trivial=True)


@gluon.jit
def _mask(scores, first, behind, CAUSAL: gl.constexpr):
    """Scores [M, N] of a tile; -inf before key `first` [M] and, if causal, from `behind` on."""
    LAYOUT: gl.constexpr = scores.type.layout
    key = gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    key = gl.expand_dims(key, 0)
    visible = key >= gl.expand_dims(first, 1)
    if CAUSAL:
        visible = visible & (key < gl.expand_dims(behind, 1))
    return gl.where(visible, scores, -float("inf"))


@gluon.jit
def _softmax(scores, top, log2_scale):
    """One tile's weights, undivided: (their sums [M, 8], they, the new maximum, factor).

    `top` [M] is the maximum so far in powers of two; what has been summed up shrinks by the factor.
    """
    LAYOUT: gl.constexpr = scores.type.layout
    # Scaled within the exponent, as one instruction; the scale is positive.
    new_top = gl.maximum(top, gl.max(_fold(scores, "max"), 1) * log2_scale)
    factor = gl.exp2(top - new_top)
    weights = gl.exp2(scores * log2_scale - _by_row(new_top, LAYOUT))
    return _fold(weights, "sum"), weights, new_top, factor


@gluon.jit
def _steps(
    ring, query, state, first, last, lower, log2_scale, IS_CLEAR: gl.constexpr
):  # fmt: skip
    """Tiles from `first` to `last` - 1; clear ones hide no key, others those before `lower` [M],
    which is counted from the end of the first tile.

    state: (words of the tile before, not yet multiplied; out; maximum; sums; slot and phase of
    the tile before). Nothing is in flight at the end of a step.
    """
    full, empty, keys, values = ring
    words, out, top, total, slot, phase = state
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _BLOCK_S, 16])
    none = gl.zeros([_ROWS, _BLOCK_S], gl.float32, SCORES)
    for tile in range(first, last):
        before = slot
        slot, phase = next_slot(slot, phase, _STAGES)
        mbarrier.wait(full.index(slot), phase)
        fence_async_shared()  # the matrix unit reads what threads have copied
        scores = warpgroup_mma(
            query, keys.index(slot).permute((1, 0)), none, use_acc=False, is_async=True
        )
        out = warpgroup_mma(_as_left(words), values.index(before), out, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        if not IS_CLEAR:
            scores = _mask(scores, lower + (tile + 1) * _BLOCK_S, lower, False)
        added, weights, top, factor = _softmax(scores, top, log2_scale)
        total = total * _by_row(factor, _EIGHT) + added
        # A wait that is over, for its branch: the assembler would move the next one up.
        mbarrier.wait(full.index(slot), phase)
        out, weights = warpgroup_mma_wait(0, deps=(out, weights))
        mbarrier.arrive(empty.index(before), count=1)
        out = out * _by_row(factor, _OUT)
        words = _pack(weights)
    return words, out, top, total, slot, phase


@gluon.jit
def _attend(
    args, INDEX: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCK_G: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """A warpgroup that computes: its 64 rows of each item."""
    ring, queries, asked, done, out_ptr, pointers, scalars = args
    _runs, items, _first_sequence, _num_sequences, window, log2_scale = scalars
    full, empty, keys, values = ring
    TOKENS: gl.constexpr = _ROWS // BLOCK_G
    BLOCK_T: gl.constexpr = _C * TOKENS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _BLOCK_S, 16])
    slot = gl.to_tensor(_STAGES - 1)
    phase = gl.to_tensor(1)
    nth = gl.to_tensor(0)
    for step in range(items):
        (
            kv_head, _sequence, query_start, num_queries, begin, position, stop, start, _first_key,
            tiles,
        ) = _find_item(step, pointers, scalars, KV_HEADS, HAS_WINDOW, BLOCK_T)  # fmt: skip
        if tiles > 0:
            own = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, SCORES))
            own_position = position + INDEX * TOKENS + own // BLOCK_G
            lower = gl.zeros_like(own_position) + (start - stop)  # the first visible key
            seen_by_all = start
            if HAS_WINDOW:
                lower = gl.maximum(lower, own_position - window + 1 - stop)
                seen_by_all = gl.maximum(start, stop - window)
            clear = gl.minimum(gl.maximum((stop - seen_by_all) // _BLOCK_S, 1), tiles)

            half = nth % 2
            query = queries.index(half * _C + INDEX)
            mbarrier.wait(asked.index(half), nth // 2 & 1)
            slot, phase = next_slot(slot, phase, _STAGES)
            mbarrier.wait(full.index(slot), phase)
            fence_async_shared()
            scores = gl.zeros([_ROWS, _BLOCK_S], gl.float32, SCORES)
            scores = warpgroup_mma(
                query, keys.index(slot).permute((1, 0)), scores, use_acc=False, is_async=True
            )
            scores = warpgroup_mma_wait(0, deps=(scores,))
            scores = _mask(scores, lower + _BLOCK_S, own_position + 1 - stop + _BLOCK_S, True)
            # Finite, so that a row without a visible key stays free of NaN.
            top = gl.full([_ROWS], -1e30, gl.float32, layout=gl.SliceLayout(1, _EIGHT))
            total, weights, top, _factor = _softmax(scores, top, log2_scale)
            words = _pack(weights)
            out = gl.zeros([_ROWS, _D], gl.float32, _OUT)
            state = (words, out, top, total, slot, phase)
            state = _steps(ring, query, state, 1, clear, lower, log2_scale, True)
            state = _steps(ring, query, state, clear, tiles, lower, log2_scale, False)
            words, out, top, total, slot, phase = state
            out = warpgroup_mma(_as_left(words), values.index(slot), out, is_async=True)
            out = warpgroup_mma_wait(0, deps=(out,))
            mbarrier.arrive(empty.index(slot), count=1)
            mbarrier.arrive(done.index(half), count=1)
            nth += 1

            whole = gl.sum(total, 1)
            out = out / _by_row(gl.where(whole > 0, whole, 1.0), _OUT)
            result = gl.convert_layout(out.to(gl.bfloat16), _COPY)
            row = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, _COPY))
            token, member = begin + INDEX * TOKENS + row // BLOCK_G, row % BLOCK_G
            column = gl.expand_dims(gl.arange(0, _D, layout=gl.SliceLayout(0, _COPY)), 0)
            inside = gl.expand_dims((token < num_queries) & (member < GROUP), 1)
            head = kv_head * GROUP + member
            flat = (query_start + token).to(gl.int64)
            place = gl.expand_dims((flat * (KV_HEADS * GROUP) + head) * _D, 1) + column
            gl.store(out_ptr + place, result, mask=inside)


@gluon.jit
def _copy(
    args, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCK_G: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """Four warps that copy all items' queries, keys and values; zeros for what is not needed."""
    (
        ring, queries, asked, done, query_ptr, query_stride, key_ptr, value_ptr, table_ptr,
        table_stride, pointers, scalars,
    ) = args  # fmt: skip
    _runs, items, _first_sequence, _num_sequences, _window, _log2_scale = scalars
    full, empty, keys, values = ring
    BLOCK_T: gl.constexpr = _C * _ROWS // BLOCK_G
    PARTS: gl.constexpr = _BLOCK_S // _PART
    QUERY_PARTS: gl.constexpr = _C * _ROWS // _PART
    query_parts = reinterpret(queries, gl.bfloat16, [2 * QUERY_PARTS, _PART, _D], _TILE)
    key_parts = reinterpret(keys, gl.bfloat16, [_STAGES * PARTS, _PART, _D], _TILE)
    value_parts = reinterpret(values, gl.bfloat16, [_STAGES * PARTS, _PART, _D], _TILE)
    row = gl.arange(0, _PART, layout=gl.SliceLayout(1, _COPY))
    column = gl.expand_dims(gl.arange(0, _D, layout=gl.SliceLayout(0, _COPY)), 0)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    nth = gl.to_tensor(0)
    for step in range(items):
        (
            kv_head, sequence, query_start, num_queries, begin, _position, stop, start, first_key,
            tiles,
        ) = _find_item(step, pointers, scalars, KV_HEADS, HAS_WINDOW, BLOCK_T)  # fmt: skip
        if tiles > 0:
            half = nth % 2
            mbarrier.wait(done.index(half), (nth // 2 & 1) ^ 1)
            for part in range(QUERY_PARTS):
                place = part * _PART + row
                token, member = begin + place // BLOCK_G, place % BLOCK_G
                inside = (token < num_queries) & (member < GROUP)
                offset = (query_start + token).to(gl.int64) * query_stride
                offset += (kv_head * GROUP + member) * _D
                copy_words(
                    query_parts.index(half * QUERY_PARTS + part),
                    query_ptr + (gl.expand_dims(offset, 1) + column),
                    mask=gl.expand_dims(inside, 1),
                )
            async_copy.mbarrier_arrive(asked.index(half), increment_count=False)
            nth += 1
        table = table_ptr + sequence.to(gl.int64) * table_stride
        key = stop - _BLOCK_S + row
        for _ in range(tiles):
            mbarrier.wait(empty.index(slot), phase ^ 1)
            for part in range(PARTS):
                place = key + part * _PART
                exists = place >= start
                place -= first_key
                block = gl.load(table + place // BLOCK_SIZE, mask=exists, other=0).to(gl.int64)
                offset = (block * BLOCK_SIZE + place % BLOCK_SIZE) * KV_HEADS + kv_head
                at = gl.expand_dims(offset * _D, 1) + column
                exists = gl.expand_dims(exists, 1)
                copy_words(key_parts.index(slot * PARTS + part), key_ptr + at, mask=exists)
                copy_words(value_parts.index(slot * PARTS + part), value_ptr + at, mask=exists)
            async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
            key -= _BLOCK_S
            slot, phase = next_slot(slot, phase, _STAGES)


@gluon.jit(
    do_not_specialize=[
        "runs",
        "items",
        "first_sequence",
        "num_sequences",
        "table_stride",
        "window",
    ],
    do_not_specialize_on_alignment=[
        "table_ptr",
        "query_start_ptr",
        "key_start_ptr",
        "seq_lens_ptr",
        "first_ptr",
    ],
)
def prefill_hopper_kernel(
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
    runs,
    items,
    query_stride,
    table_stride,
    log2_scale,
    window,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_G: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
):
    """Three warpgroups that compute and one that copies.

    A program takes `items` items, one after another; an item is a run of tokens with the query
    heads of one KV head.
    """
    gl.static_assert(_C * _ROWS // BLOCK_G <= _BLOCK_S)  # the first tile has the run's own keys
    full, empty = allocate_ring(_STAGES, 32 * _COPY_WARPS, _C)
    asked, done = allocate_ring(2, 32 * _COPY_WARPS, _C)
    keys = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _BLOCK_S, _D], _TILE)
    values = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _BLOCK_S, _D], _TILE)
    queries = gl.allocate_shared_memory(gl.bfloat16, [2 * _C, _ROWS, _D], _TILE)
    fence_async_shared()
    if first_ptr is not None:
        first_sequence = gl.load(first_ptr)
    ring = (full, empty, keys, values)
    pointers = (query_start_ptr, key_start_ptr, seq_lens_ptr)
    scalars = (runs, items, first_sequence, num_sequences, window, log2_scale)
    args = (ring, queries, asked, done, out_ptr, pointers, scalars)
    copied = (
        ring, queries, asked, done, query_ptr, query_stride, key_ptr, value_ptr, table_ptr,
        table_stride, pointers, scalars,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_attend, (args, 0, KV_HEADS, GROUP, BLOCK_G, HAS_WINDOW)),
            (_attend, (args, 1, KV_HEADS, GROUP, BLOCK_G, HAS_WINDOW)),
            (_attend, (args, 2, KV_HEADS, GROUP, BLOCK_G, HAS_WINDOW)),
            (_copy, (copied, KV_HEADS, GROUP, BLOCK_G, BLOCK_SIZE, HAS_WINDOW)),
        ],
        [4, 4, _COPY_WARPS],
        [_REGISTERS, _REGISTERS, _COPY_REGISTERS],
    )


def can_prefill_on_hopper(query: Tensor, key_cache: Tensor) -> bool:
    """Whether `attention_prefill_hopper` takes these."""
    return (
        HAS_GLUON
        and not IS_INTERPRETED
        and query.dtype == key_cache.dtype == torch.bfloat16
        and query.shape[2] == HEAD_DIM
        and query.shape[1] // key_cache.shape[2] in _GROUPS
        and is_hopper(query.device)
    )


def attention_prefill_hopper(
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
    """`attention_prefill_triton`, where `can_prefill_on_hopper`; its arguments and result."""
    num_tokens, num_heads, _ = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    num_sequences = seq_lens.shape[0]
    first, first_on_device = split_first(first_sequence)
    if num_sequences == first:
        return out
    assert query.stride()[1:] == (HEAD_DIM, 1)
    assert block_table.stride(1) == 1
    assert out.is_contiguous()
    group = num_heads // num_kv_heads
    block_g = next_power_of_2(group)
    block_t = WARPGROUPS * ROWS // block_g
    runs = num_runs(num_tokens, num_sequences, first, block_t)
    programs = min(runs * num_kv_heads, num_multiprocessors(query.device))
    items = -(-runs * num_kv_heads // programs)
    prefill_hopper_kernel[(programs,)](
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
        runs,
        items,
        query.stride(0),
        block_table.stride(0),
        scale * LOG2_E,
        0 if window is None else window,
        KV_HEADS=num_kv_heads,
        GROUP=group,
        BLOCK_G=block_g,
        BLOCK_SIZE=block_size,
        HAS_WINDOW=window is not None,
        num_warps=4,
    )
    return out


def prefill_kernel(query: Tensor, key_cache: Tensor) -> Callable[..., Tensor]:
    """The faster kernel that takes these: this one, or `attention_prefill_triton`."""
    fits = query.shape[0] >= MIN_TOKENS and can_prefill_on_hopper(query, key_cache)
    return attention_prefill_hopper if fits else attention_prefill_triton

"""Both products of NVFP4 experts in one launch, for Hopper.

    gate, up         = x[token of r] @ Wgate[e].T, x[token of r] @ Wup[e].T
    hidden[r]        = b( silu(s_gate[e] * gate) * (s_up[e] * up) )
    rows[route of r] = b( s_down[e] * (hidden[r] @ Wdown[e].T) )

Operands are swapped: weights, turned into bfloat16 in registers, are the left one, and up to 160
tokens the right one, so that a few tokens fill a small instruction and no lane works in vain.
"""

from musespark.ops.nvfp4_hopper import layout
from musespark.ops.nvfp4_hopper.work_list import (
    find_item,
    finish_strip,
    is_class,
    wait_for_strips,
)
from musespark.ops.triton_import import tl, triton

_K = tl.constexpr(layout.K_BLOCK)
_ROWS = tl.constexpr(layout.TILE_ROWS)
_WORDS = tl.constexpr(layout.TILE_WORDS)
_SCALES = tl.constexpr(layout.TILE_SCALE_WORDS)
_MASK = tl.constexpr(layout.PAIR_MASK)
_MERGE = tl.constexpr(layout.MERGE_MASK)
_NOT_MERGE = tl.constexpr(layout.MERGE_MASK ^ 0xFFFFFFFF)
# Widens the byte c to two bfloat16 of bits 16 * c + 128 * bias: one multiply-add for both.
_WIDEN = tl.constexpr(0x00100010)
_WIDEN_BIAS = tl.constexpr((128 * layout.WIDE_SCALE_BIAS) * 0x00010001)


@triton.jit
def permuted_position(column):
    """Where the layout has an input's column: for the kernel that writes that input."""
    within = column % 128
    return column - within + within % 16 // 2 * 16 + within // 16 * 2 + within % 2


@triton.jit
def _rotate(x, BITS: tl.constexpr):
    return (x << BITS) | (x >> (32 - BITS))


@triton.jit
def merged(a, b):
    """The bits that six pairs leave free in a group's two words: two more pairs."""
    return (a & _MERGE) | (_rotate(b, 2) & _NOT_MERGE)


@triton.jit
def pair_bits(a, b, m, J: tl.constexpr):
    """Pair J of a group of 16 codes, columns 2 J and 2 J + 1: each code's bits where bfloat16 has
    them, out of the group's words a and b, and of `merged`."""
    if J < 3:
        bits = a if J == 0 else (_rotate(a, 28) if J == 1 else a << 6)
    elif J < 6:
        bits = b if J == 3 else (_rotate(b, 28) if J == 4 else b << 6)
    else:
        bits = m << 2 if J == 6 else _rotate(m, 24)
    return bits & _MASK


@triton.jit
def widened(scale_words):
    """[N] words of four scales -> [N, row half, column half] words, each scale twice as bfloat16,
    times the power of two that codes lack."""
    low = tl.join(scale_words & 0xFF, (scale_words >> 16) & 0xFF)
    high = tl.join((scale_words >> 8) & 0xFF, scale_words >> 24)
    return tl.join(low, high) * _WIDEN + _WIDEN_BIAS


@triton.jit
def scaled_pair(pair, scale, EMULATE: tl.constexpr):
    """Two bfloat16 in a word, times two in another; the products are exact."""
    if EMULATE:  # the interpreter has no assembler
        low = _as_float(pair << 16) * _as_float(scale << 16)
        high = _as_float(pair & 0xFFFF0000) * _as_float(scale & 0xFFFF0000)
        low, high = low.to(tl.uint32, bitcast=True), high.to(tl.uint32, bitcast=True)
        product = (low >> 16) | (high & 0xFFFF0000)
    else:
        product = tl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [pair, scale], tl.uint32, is_pure=True, pack=1
        )
    return product


@triton.jit
def _as_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _dequantize(words, scale_words, WARPS: tl.constexpr, EMULATE: tl.constexpr):
    """[256 * WARPS] words and [32 * WARPS] scale words -> bfloat16 [16 * WARPS, 128].

    All reshapes and permutes are renamings: they follow the order in which lanes hold the matrix
    unit's left operand.
    """
    w = tl.reshape(words, [2, WARPS, 8, 4, 2, 2])  # column half, warp, row, group, row half, word
    w = tl.permute(w, (1, 4, 2, 0, 3, 5))  # warp, row half, row, column half, group, word
    a, b = tl.split(tl.reshape(w, [16 * WARPS, 8, 2]))  # [rows, groups]

    s = widened(scale_words)  # [.., row half, column half]
    s = tl.reshape(s, [WARPS, 8, 4, 2, 2])  # warp, row, group, row half, column half
    s = tl.reshape(tl.permute(s, (0, 3, 1, 4, 2)), [16 * WARPS, 8])

    m = merged(a, b)
    p0 = scaled_pair(pair_bits(a, b, m, 0), s, EMULATE)
    p1 = scaled_pair(pair_bits(a, b, m, 1), s, EMULATE)
    p2 = scaled_pair(pair_bits(a, b, m, 2), s, EMULATE)
    p3 = scaled_pair(pair_bits(a, b, m, 3), s, EMULATE)
    p4 = scaled_pair(pair_bits(a, b, m, 4), s, EMULATE)
    p5 = scaled_pair(pair_bits(a, b, m, 5), s, EMULATE)
    p6 = scaled_pair(pair_bits(a, b, m, 6), s, EMULATE)
    p7 = scaled_pair(pair_bits(a, b, m, 7), s, EMULATE)
    # Joined so that the last three axes are j's bits, lowest first.
    p = tl.join(
        tl.join(tl.join(p0, p4), tl.join(p2, p6)), tl.join(tl.join(p1, p5), tl.join(p3, p7))
    )  # rows, groups, bit 2, bit 1, bit 0
    p = tl.reshape(tl.permute(p, (0, 2, 3, 4, 1)), [16 * WARPS, 64])
    first = (p & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    second = (p >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.reshape(tl.join(first, second), [16 * WARPS, 128])


@triton.jit
def _settle(acc):
    """Wait here for the matrix unit.

    Left alone, the compiler lets products run on into the next step and cuts them into pieces of
    16 columns to find registers in time, which costs instructions and registers. Where enough
    programs share a multiprocessor, waiting is cheaper.
    """
    return tl.inline_asm_elementwise(
        "// settled $0", "=f,0", [acc], tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _dot(weights, tokens, acc, EMULATE: tl.constexpr):
    if EMULATE:  # the interpreter multiplies the bits of bfloat16
        acc = tl.dot(weights.to(tl.float32), tokens.to(tl.float32), acc)
    else:
        acc = tl.dot(weights, tokens, acc)
    return acc


@triton.jit
def _store_strip(
    acc, out, out_rows, is_row, first_row, stride, scale0, scale1,
    WARPS: tl.constexpr, TOKENS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Scale the sums [16 * WARPS, TOKENS] in float32, activate, round once, store transposed."""
    if GATED:
        halves = tl.permute(tl.reshape(acc, [WARPS, 2, 8, TOKENS]), (0, 2, 3, 1))
        gate, up = tl.split(halves)
        gate = tl.reshape(gate, [8 * WARPS, TOKENS]) * scale0
        up = tl.reshape(up, [8 * WARPS, TOKENS]) * scale1
        result = gate / (1.0 + tl.exp(-gate)) * up
        column = first_row // 2 + tl.arange(0, 8 * WARPS)
    else:
        result = acc * scale0
        column = first_row + tl.arange(0, 16 * WARPS)
    address = out + out_rows[:, None].to(tl.int64) * stride + column[None, :]
    tl.store(address, tl.trans(result).to(tl.bfloat16), mask=is_row[:, None])


@triton.jit
def _strip(  # noqa: PLR0912
    x, words, scales, out, in_rows, out_rows, divisor, expert, strip, start, end, scale0, scale1,
    N: tl.constexpr, K: tl.constexpr, WARPS: tl.constexpr, GROUPS: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, GATED: tl.constexpr,
    STAGES: tl.constexpr, UNROLL: tl.constexpr, SETTLE: tl.constexpr, EMULATE: tl.constexpr,
):  # fmt: skip
    """GROUPS x 16 * WARPS weight rows times up to MAIN + TAIL tokens.

    `in_rows` and `out_rows` map places in the sorted list to rows of x (after division) and out;
    None is the identity.
    """
    STEPS: tl.constexpr = K // _K
    HEIGHT: tl.constexpr = 16 * WARPS
    place = start + tl.arange(0, MAIN)
    is_row = place < end
    source = place
    if in_rows is not None:
        source = tl.load(in_rows + place, mask=is_row, other=0) // divisor
    column = tl.arange(0, _K)
    x_main = x + source[:, None].to(tl.int64) * K + column[None, :]
    acc0 = tl.zeros([HEIGHT, MAIN], tl.float32)
    acc1 = tl.zeros([HEIGHT, MAIN], tl.float32)
    if TAIL > 0:
        tail_place = start + MAIN + tl.arange(0, TAIL)
        is_tail = tail_place < end
        tail_source = tail_place
        if in_rows is not None:
            tail_source = tl.load(in_rows + tail_place, mask=is_tail, other=0) // divisor
        x_tail = x + tail_source[:, None].to(tl.int64) * K + column[None, :]
        tail0 = tl.zeros([HEIGHT, TAIL], tl.float32)
        tail1 = tl.zeros([HEIGHT, TAIL], tl.float32)

    # A tile is [column half, 4 warps, 128 words]; eight warps take two tiles, one above the other.
    i = tl.arange(0, 256 * WARPS)
    warp = i // 128 % WARPS
    in_tile = i // (128 * WARPS) * 512 + warp % 4 * 128 + i % 128
    j = tl.arange(0, 32 * WARPS)
    tile = (expert.to(tl.int64) * (N // _ROWS) + strip * (GROUPS * HEIGHT // _ROWS)) * STEPS
    w = words + tile * _WORDS + warp // 4 * (STEPS * _WORDS) + in_tile
    s = scales + tile * _SCALES + j // _SCALES * (STEPS * _SCALES) + j % _SCALES
    NEXT: tl.constexpr = HEIGHT // _ROWS * STEPS

    # An unrolled loop with a remainder would be compiled twice.
    UNROLLED: tl.constexpr = UNROLL if STEPS % UNROLL == 0 else 1
    for step in tl.range(0, STEPS, num_stages=STAGES, loop_unroll_factor=UNROLLED):
        w0 = tl.load(w + step * _WORDS, eviction_policy="evict_first")
        s0 = tl.load(s + step * _SCALES, eviction_policy="evict_first")
        if GROUPS == 2:
            w1 = tl.load(w + (NEXT + step) * _WORDS, eviction_policy="evict_first")
            s1 = tl.load(s + (NEXT + step) * _SCALES, eviction_policy="evict_first")
        tokens = tl.trans(tl.load(x_main + step * _K, mask=is_row[:, None], other=0.0))
        if TAIL > 0:
            tail = tl.trans(tl.load(x_tail + step * _K, mask=is_tail[:, None], other=0.0))
        a0 = _dequantize(w0, s0, WARPS, EMULATE)
        acc0 = _dot(a0, tokens, acc0, EMULATE)
        if TAIL > 0:
            tail0 = _dot(a0, tail, tail0, EMULATE)
        if GROUPS == 2:
            a1 = _dequantize(w1, s1, WARPS, EMULATE)
            acc1 = _dot(a1, tokens, acc1, EMULATE)
            if TAIL > 0:
                tail1 = _dot(a1, tail, tail1, EMULATE)
        if SETTLE and not EMULATE:
            acc0 = _settle(acc0)
            if TAIL > 0:
                tail0 = _settle(tail0)
            if GROUPS == 2:
                acc1 = _settle(acc1)
                if TAIL > 0:
                    tail1 = _settle(tail1)

    STRIDE: tl.constexpr = N // 2 if GATED else N
    row = strip * (GROUPS * HEIGHT)
    target = place
    if out_rows is not None:
        target = tl.load(out_rows + place, mask=is_row, other=0)
    _store_strip(acc0, out, target, is_row, row, STRIDE, scale0, scale1, WARPS, MAIN, GATED)
    if GROUPS == 2:
        row1 = row + HEIGHT
        _store_strip(acc1, out, target, is_row, row1, STRIDE, scale0, scale1, WARPS, MAIN, GATED)
    if TAIL > 0:
        tail_target = tail_place
        if out_rows is not None:
            tail_target = tl.load(out_rows + tail_place, mask=is_tail, other=0)
        _store_strip(
            tail0, out, tail_target, is_tail, row, STRIDE, scale0, scale1, WARPS, TAIL, GATED
        )
        if GROUPS == 2:
            row1 = row + HEIGHT
            _store_strip(
                tail1, out, tail_target, is_tail, row1, STRIDE, scale0, scale1, WARPS, TAIL, GATED
            )


@triton.jit
def nvfp4_experts_kernel(
    x, hidden, rows, order, tiles, num_tiles,
    gate_up, gate_up_scales, gate_up_factors, down, down_scales, down_factors, top_k,
    WIDTH: tl.constexpr, INNER: tl.constexpr,
    WARPS: tl.constexpr, GROUPS: tl.constexpr, DOWN_GROUPS: tl.constexpr,
    MAINS: tl.constexpr, TAILS: tl.constexpr,
    STAGES: tl.constexpr, UNROLL: tl.constexpr, SETTLE: tl.constexpr, EMULATE: tl.constexpr,
):  # fmt: skip
    """One item of the work list; see the top of this file, and `Tiling` for the constants.

    Args:
        x: [T, H = WIDTH] bfloat16, columns permuted.
        hidden: [R, I = INNER] bfloat16, in the list's order, columns permuted.
        rows: [T * K, H] bfloat16, route-major.
        order, tiles, num_tiles: the work list.
        gate_up, gate_up_scales, down, down_scales: words of the layout.
        gate_up_factors: [E, 2] float32; down_factors: [E] float32: global scales.
        top_k: K.
    """
    UP_STRIPS: tl.constexpr = 2 * INNER // (16 * WARPS * GROUPS)
    DOWN_STRIPS: tl.constexpr = WIDTH // (16 * WARPS * DOWN_GROUPS)
    item = tl.program_id(0)
    count = tl.load(num_tiles)
    num_up = count * UP_STRIPS
    if item < num_up + count * DOWN_STRIPS:
        record, expert, strip, start, end = find_item(item, tiles, num_up, UP_STRIPS, DOWN_STRIPS)
        size = end - start
        if item < num_up:
            gate_scale = tl.load(gate_up_factors + 2 * expert)
            up_scale = tl.load(gate_up_factors + 2 * expert + 1)
            for c in tl.static_range(len(MAINS)):
                if is_class(size, MAINS, TAILS, c):
                    _strip(
                        x, gate_up, gate_up_scales, hidden, order, None, top_k,
                        expert, strip, start, end, gate_scale, up_scale,
                        2 * INNER, WIDTH, WARPS, GROUPS, MAINS[c], TAILS[c], True,
                        STAGES, UNROLL, SETTLE, EMULATE,
                    )  # fmt: skip
            finish_strip(record)
        else:
            wait_for_strips(record, UP_STRIPS)
            down_scale = tl.load(down_factors + expert)
            for c in tl.static_range(len(MAINS)):
                if is_class(size, MAINS, TAILS, c):
                    _strip(
                        hidden, down, down_scales, rows, None, order, top_k,
                        expert, strip, start, end, down_scale, down_scale,
                        WIDTH, INNER, WARPS, DOWN_GROUPS, MAINS[c], TAILS[c], False,
                        STAGES, UNROLL, SETTLE, EMULATE,
                    )  # fmt: skip

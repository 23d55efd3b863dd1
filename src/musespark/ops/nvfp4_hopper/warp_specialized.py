"""Both products of NVFP4 experts, for many rows an expert: warps with roles.

The same work list, weights and results as `kernel.py`, but a program stays on its multiprocessor
and takes the next item whenever it has room for one. Two warps copy tokens and one copies weights
into a ring of steps in shared memory, ahead of the warpgroups that multiply, over the ends of items
too. Each warpgroup has weight rows of its own, so that one unpacks while another's matrix
instructions run, and tokens come from L2 once for all of them.

    ring     steps of 128 columns: the strip's weights and scales, the tile's tokens
    full     a step is there: one arrival for the weights, one of each thread that copies tokens
    empty    nobody reads the step any more: one arrival of each warpgroup
    mail     the numbers of two items, from the warp that takes them to all others, with a barrier
             for what has come and one for what has been read

Items are taken in order, so that tiles which share weights run at about the same time, whatever
each of them takes: the second finds the weights in L2. An item waits for items of lower numbers
alone, which have been taken before, so programs cannot wait for each other in a circle.
"""

# mypy: disable-error-code="assignment, unreachable, var-annotated"
# ruff: noqa: RUF005 (the compiler knows no starred items of tuples)
from musespark.ops.gluon_import import (
    HAS_GLUON,
    async_copy,
    barrier,
    constexpr_function,
    copy_tensor,
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
from musespark.ops.nvfp4_hopper import layout
from musespark.ops.nvfp4_hopper.kernel import merged, pair_bits, scaled_pair, widened
from musespark.ops.nvfp4_hopper.work_list import (
    find_item,
    finish_strip,
    is_class,
    wait_for_strips,
)

WARPGROUPS = 2
"""That multiply; one more copies."""
PROGRAM_TILES = 2 * WARPGROUPS
"""Tiles of 64 weight rows that an item has."""
START_REGISTERS = 65536 // (128 * (WARPGROUPS + 1)) // 8 * 8
"""Of each lane as a program starts: it has a multiprocessor to itself."""

_K = gl.constexpr(layout.K_BLOCK)
_HALF = gl.constexpr(layout.K_BLOCK // 2)
_ROWS = gl.constexpr(layout.TILE_ROWS)
_WORDS = gl.constexpr(layout.TILE_WORDS)
_SCALES = gl.constexpr(layout.TILE_SCALE_WORDS)
_C = gl.constexpr(WARPGROUPS)
_G = gl.constexpr(PROGRAM_TILES // WARPGROUPS)
_TILES = gl.constexpr(PROGRAM_TILES)
_TOKEN_WARPS = gl.constexpr(2)
# Of a lane that multiplies, and of one that copies.
_REGISTERS = gl.constexpr(232)
_COPY_REGISTERS = gl.constexpr(40)

WORDS_BOX = SCALES_BOX = None
if HAS_GLUON:
    WORDS_BOX = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=4)
    SCALES_BOX = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)
    _WORDS_BOX, _SCALES_BOX = gl.constexpr(WORDS_BOX), gl.constexpr(SCALES_BOX)
    # A lane takes 16 bytes from each column half: rows r and r + 8, two words each.
    _WORDS_LAYOUT = gl.constexpr(
        gl.DistributedLinearLayout(
            [[1], [2], [512]], [[4], [8], [16], [32], [64]], [[128], [256]], [], [1024]
        )
    )
    _SCALES_LAYOUT = gl.constexpr(
        gl.DistributedLinearLayout([], [[1], [2], [4], [8], [16]], [[32], [64]], [], [128])
    )
    # 16 bytes each, four lanes side by side, eight rows a warp.
    _COPY_LAYOUT = gl.constexpr(
        gl.DistributedLinearLayout(
            [[0, 1], [0, 2], [0, 4], [0, 32]],
            [[0, 8], [0, 16], [4, 0], [1, 0], [2, 0]],
            [[8, 0]],
            [],
            [16, 64],
        )
    )
    _SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))
    _FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    _TOKENS = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


@constexpr_function
def _most(values):
    return max(*values, 16)


@constexpr_function
def _sizes(main, tail):
    return (main, tail) if tail else (main,)


@constexpr_function
def _product_layout(tokens):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tokens, 16])


@gluon.jit
def _by(held, TOKENS: gl.constexpr):
    """A ring of tokens [step halves, all, 64] as [.., TOKENS, 64]."""
    COUNT: gl.constexpr = held.shape[0] * held.shape[1] // TOKENS
    return reinterpret(held, gl.bfloat16, [COUNT, TOKENS, _HALF], _TOKENS)


@gluon.jit
def _allocate_mail():
    """(numbers of two items, whether each has come, whether all have read it)"""
    numbers = gl.allocate_shared_memory(gl.int32, [2, 1], mbarrier.MBarrierLayout())
    sent, read = allocate_ring(2, 1, _C + 1)
    return numbers, sent, read


@gluon.jit
def _take_item(num_taken, mail, nth):
    """The number of the program's nth item, for one warp, which sends it to the others; behind the
    last item there are numbers too."""
    numbers, sent, read = mail
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    item = gl.atomic_add(num_taken, 1, sem="relaxed")
    slot = nth % 2
    mbarrier.wait(read.index(slot), (nth // 2 & 1) ^ 1)  # at first, nothing waits to be read
    numbers.index(slot).store(gl.full([1], item, gl.int32, layout=LAYOUT))
    mbarrier.arrive(sent.index(slot), count=1)
    return item


@gluon.jit
def _receive_item(mail, nth, WARPS: gl.constexpr):
    """The same number, for another partition of so many warps."""
    numbers, sent, read = mail
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    slot = nth % 2
    mbarrier.wait(sent.index(slot), nth // 2 & 1)
    item = gl.max(numbers.index(slot).load(LAYOUT), 0)
    barrier()  # all warps have it
    mbarrier.arrive(read.index(slot), count=1)
    return item


@gluon.jit
def _split_words(words, scale_words):
    """[1024] words and [128] scale words of a tile -> words a, b, scale pairs, each [64, 8]."""
    w = gl.reshape(words, [2, 4, 8, 4, 2, 2])  # column half, warp, row, group, row half, word
    w = gl.permute(w, (1, 4, 2, 0, 3, 5))  # warp, row half, row, column half, group, word
    a, b = gl.split(gl.reshape(w, [_ROWS, 8, 2]))
    s = widened(scale_words)  # [.., row half, column half]
    s = gl.reshape(s, [4, 8, 4, 2, 2])  # warp, row, group, row half, column half
    s = gl.reshape(gl.permute(s, (0, 3, 1, 4, 2)), [_ROWS, 8])
    return a, b, gl.convert_layout(s, a.type.layout, assert_trivial=True)


@gluon.jit
def _unpack(a, b, s, HALF: gl.constexpr):
    """Words and scale pairs of a tile -> bfloat16 [64, 64]: its columns from 64 * HALF on.

    Pair j holds columns 2 j and 2 j + 1 of each group of 16. All reshapes, permutes and the layout
    conversion are renamings: they follow the order in which lanes hold the left operand.
    """
    m = merged(a, b)
    p0 = scaled_pair(pair_bits(a, b, m, 4 * HALF), s, False)
    p1 = scaled_pair(pair_bits(a, b, m, 4 * HALF + 1), s, False)
    p2 = scaled_pair(pair_bits(a, b, m, 4 * HALF + 2), s, False)
    p3 = scaled_pair(pair_bits(a, b, m, 4 * HALF + 3), s, False)
    p = gl.join(gl.join(p0, p2), gl.join(p1, p3))  # row, group, high and low bit of j
    p = gl.reshape(gl.permute(p, (0, 2, 3, 1)), [_ROWS, _HALF // 2])
    first = (p & 0xFFFF).to(gl.uint16).to(gl.bfloat16, bitcast=True)
    second = (p >> 16).to(gl.uint16).to(gl.bfloat16, bitcast=True)
    return gl.reshape(gl.join(first, second), [_ROWS, _HALF])


@gluon.jit
def _cut(values, FIRST: gl.constexpr, COUNT: gl.constexpr):
    return values[FIRST : FIRST + COUNT]


@gluon.jit
def _joined(pieces):
    """A power of two of tensors [64, 16] -> one [64, TOKENS], the first tokens from the first."""
    COUNT: gl.constexpr = len(pieces)
    if COUNT == 1:
        whole = pieces[0]
    else:
        both = gl.join(_joined(pieces[: COUNT // 2]), _joined(pieces[COUNT // 2 :]))
        whole = gl.reshape(gl.permute(both, (0, 2, 1)), [_ROWS, 16 * COUNT])
    return whole


@gluon.jit
def _pieces(whole):
    """The reverse."""
    TOKENS: gl.constexpr = whole.shape[1]
    if TOKENS == 16:
        pieces = (gl.convert_layout(whole, _SUMS, assert_trivial=True),)
    else:
        halves = gl.permute(gl.reshape(whole, [_ROWS, 2, TOKENS // 2]), (0, 2, 1))
        left, right = gl.split(halves)
        pieces = _pieces(left) + _pieces(right)
    return pieces


@gluon.jit
def _store(
    sums, out, order, start, end, column, stride, scale0, scale1, GATED: gl.constexpr
):  # fmt: skip
    """Scale sums [64, 16] in float32, activate, round once, store transposed."""
    COLUMNS: gl.constexpr = _ROWS // 2 if GATED else _ROWS
    LANES: gl.constexpr = COLUMNS // 8
    if GATED:
        gate, up = gl.split(gl.permute(gl.reshape(sums, [4, 2, 8, 16]), (0, 2, 3, 1)))
        gate = gl.reshape(gate, [COLUMNS, 16]) * scale0
        up = gl.reshape(up, [COLUMNS, 16]) * scale1
        result = gate / (1.0 + gl.exp(-gate)) * up
    else:
        result = sums * scale0
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    result = gl.convert_layout(gl.permute(result.to(gl.bfloat16), (1, 0)), L)
    place = start + gl.arange(0, 16, layout=gl.SliceLayout(1, L))
    is_row = place < end
    target = place
    if not GATED:
        target = gl.load(order + place, mask=is_row, other=0)
    columns = column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L))
    address = out + gl.expand_dims(target, 1).to(gl.int64) * stride
    gl.store(address + gl.expand_dims(columns, 0), result, mask=gl.expand_dims(is_row, 1))


@gluon.jit
def _as_left(weights, TOKENS: gl.constexpr):
    """Weights as the left operand of a product with so many tokens: they keep their lanes."""
    L: gl.constexpr = gl.DotOperandLayout(0, _product_layout(TOKENS), 2)
    return gl.convert_layout(weights, L, assert_trivial=True)


@gluon.jit
def _settled(sums, in_flight: gl.constexpr):
    """Sums, once no more than so many groups of matrix instructions are unfinished."""
    if len(sums) == 1:
        settled = (warpgroup_mma_wait(in_flight, deps=sums),)
    else:
        settled = warpgroup_mma_wait(in_flight, deps=sums)
    return settled


@gluon.jit
def _multiply(
    ring, sums, slot, phase, steps, MAIN: gl.constexpr, TAIL: gl.constexpr,
    INDEX: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The tiles of warpgroup INDEX times the item's tokens, over all steps.

    Matrix instructions on 64 columns of a tile run while the next ones' weights are unpacked. None
    are left in flight at the end of a step: the assembler would take their operands for live all
    over the kernel, find no registers for them, and let every instruction wait for the one before.

    Returns (sums, slot, phase): by tiles and sixteens of tokens, each [64, 16].
    """
    full, empty, words, scale_words, mains, tails = ring
    tiles = reinterpret(words, gl.int32, [STAGES * _TILES, _WORDS], _FLAT)
    scale_tiles = reinterpret(scale_words, gl.int32, [STAGES * _TILES, _SCALES], _FLAT)
    SIZES: gl.constexpr = _sizes(MAIN, TAIL)
    B: gl.constexpr = len(SIZES)
    EACH: gl.constexpr = len(sums) // _G
    MOST: gl.constexpr = mains.shape[1] // 16
    held = (mains, tails)
    rings = ()
    for b in gl.static_range(B):
        rings = rings + (_by(held[b], SIZES[b]),)
    accs = ()
    for g in gl.static_range(_G):
        for b in gl.static_range(B):
            whole = _joined(_cut(sums, g * EACH + b * MOST, SIZES[b] // 16))
            accs = accs + (
                gl.convert_layout(whole, _product_layout(SIZES[b]), assert_trivial=True),
            )
    for _ in range(steps):
        mbarrier.wait(full.index(slot), phase)
        fence_async_shared()  # the matrix unit reads what threads have copied
        for g in gl.static_range(_G):
            tile = (slot * _C + INDEX) * _G + g
            w = tiles.index(tile).load(_WORDS_LAYOUT).to(gl.uint32, bitcast=True)
            s = scale_tiles.index(tile).load(_SCALES_LAYOUT).to(gl.uint32, bitcast=True)
            first, second, pairs = _split_words(w, s)
            current = accs[:B]
            for half in gl.static_range(2):
                weights = _unpack(first, second, pairs, half)
                issued = ()
                for b in gl.static_range(B):
                    operand = _as_left(weights, SIZES[b])
                    part = (2 * slot + half) * (held[b].shape[1] // SIZES[b])
                    tokens = rings[b].index(part).permute((1, 0))
                    issued = issued + (warpgroup_mma(operand, tokens, current[b], is_async=True),)
                current = issued
                if half == 0 and g > 0:
                    accs = accs[:-B] + _settled(accs[-B:], B)
                if half == 1 and g < _G - 1:
                    current = _settled(current, B)
            accs = accs[B:] + current
        accs = _settled(accs, 0)
        mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = next_slot(slot, phase, STAGES)
    results = ()
    for g in gl.static_range(_G):
        for b in gl.static_range(B):
            results = results + _pieces(accs[g * B + b])
            results = results + _cut(
                sums, g * EACH + b * MOST + SIZES[b] // 16,
                (MOST if b < B - 1 else EACH - b * MOST) - SIZES[b] // 16,
            )  # fmt: skip
    return results, slot, phase


@gluon.jit
def _consume(
    args, INDEX: gl.constexpr, WIDTH: gl.constexpr, INNER: gl.constexpr,
    MAINS: gl.constexpr, TAILS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup that multiplies: its rows of each item."""
    ring, mail, hidden, rows, order, tiles, num_tiles, up_factors, down_factors = args
    UP_STRIPS: gl.constexpr = 2 * INNER // (_ROWS * _TILES)
    DOWN_STRIPS: gl.constexpr = WIDTH // (_ROWS * _TILES)
    EACH: gl.constexpr = (_most(MAINS) + _most(TAILS)) // 16
    zero = gl.zeros([_ROWS, 16], gl.float32, _SUMS)
    zeros = (zero,) * (_G * EACH)
    count = gl.load(num_tiles)
    num_up = count * UP_STRIPS
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    nth = gl.to_tensor(0)
    item = _receive_item(mail, nth, 4)
    while item < num_up + count * DOWN_STRIPS:
        record, expert, strip, start, end = find_item(item, tiles, num_up, UP_STRIPS, DOWN_STRIPS)
        size = end - start
        row = (strip * _C + INDEX) * (_G * _ROWS)
        steps = gl.where(item < num_up, WIDTH // _K, INNER // _K)
        sums = zeros
        for c in gl.static_range(len(MAINS)):
            if is_class(size, MAINS, TAILS, c):
                sums, slot, phase = _multiply(
                    ring, sums, slot, phase, steps, MAINS[c], TAILS[c], INDEX, STAGES
                )
        if item < num_up:
            gate_scale = gl.load(up_factors + 2 * expert)
            up_scale = gl.load(up_factors + 2 * expert + 1)
            for part in gl.static_range(EACH):
                if 16 * part < size:
                    for g in gl.static_range(_G):
                        _store(
                            sums[g * EACH + part], hidden, order, start + 16 * part, end,
                            (row + g * _ROWS) // 2, INNER, gate_scale, up_scale, True,
                        )  # fmt: skip
            finish_strip(record)
        else:
            scale = gl.load(down_factors + expert)
            for part in gl.static_range(EACH):
                if 16 * part < size:
                    for g in gl.static_range(_G):
                        _store(
                            sums[g * EACH + part], rows, order, start + 16 * part, end,
                            row + g * _ROWS, WIDTH, scale, scale, False,
                        )  # fmt: skip
        nth += 1
        item = _receive_item(mail, nth, 4)


@gluon.jit
def _copy_strip(
    ring, slot, phase, weights, scales, tile, steps: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Weights and scales of an item, whose first tile this is; returns the next (slot, phase)."""
    full, empty, words, scale_words, _mains, _tails = ring
    for step in range(steps):
        mbarrier.wait(empty.index(slot), phase ^ 1)
        there = full.index(slot)
        mbarrier.expect(there, 4 * _TILES * (_WORDS + _SCALES))
        copy_tensor(weights, [tile, step, 0, 0], there, words.index(slot))
        copy_tensor(scales, [tile, step, 0], there, scale_words.index(slot))
        slot, phase = next_slot(slot, phase, STAGES)
    return slot, phase


@gluon.jit
def _copy_weights(
    args, WIDTH: gl.constexpr, INNER: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """A warp that copies all items' weights and scales."""
    ring, mail, tiles, num_tiles, up, up_scales, down, down_scales = args
    UP_STRIPS: gl.constexpr = 2 * INNER // (_ROWS * _TILES)
    DOWN_STRIPS: gl.constexpr = WIDTH // (_ROWS * _TILES)
    count = gl.load(num_tiles)
    num_up = count * UP_STRIPS
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    nth = gl.to_tensor(0)
    item = _take_item(num_tiles + 1, mail, nth)
    while item < num_up + count * DOWN_STRIPS:
        _record, expert, strip, _start, _end = find_item(
            item, tiles, num_up, UP_STRIPS, DOWN_STRIPS
        )
        if item < num_up:
            slot, phase = _copy_strip(
                ring, slot, phase, up, up_scales,
                expert * (2 * INNER // _ROWS) + strip * _TILES, WIDTH // _K, STAGES,
            )  # fmt: skip
        else:
            slot, phase = _copy_strip(
                ring, slot, phase, down, down_scales,
                expert * (WIDTH // _ROWS) + strip * _TILES, INNER // _K, STAGES,
            )  # fmt: skip
        nth += 1
        item = _take_item(num_tiles + 1, mail, nth)


@gluon.jit
def _copy_tokens(
    args, WIDTH: gl.constexpr, INNER: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Two warps that copy all items' tokens; the second product's when all its strips are there.

    Tokens come by sixteens; those behind the last one are zeros in its own sixteen, and left as
    they are beyond: they make columns that are not stored.
    """
    ring, mail, offsets, x, hidden, order, tiles, num_tiles, top_k = args
    full, empty, _words, _scale_words, mains, tails = ring
    UP_STRIPS: gl.constexpr = 2 * INNER // (_ROWS * _TILES)
    DOWN_STRIPS: gl.constexpr = WIDTH // (_ROWS * _TILES)
    PARTS: gl.constexpr = mains.shape[1] // 16
    TAIL_PARTS: gl.constexpr = tails.shape[1] // 16
    main_ring, tail_ring = _by(mains, 16), _by(tails, 16)
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, _COPY_LAYOUT))
    column = gl.expand_dims(gl.arange(0, _HALF, layout=gl.SliceLayout(0, _COPY_LAYOUT)), 0)
    count = gl.load(num_tiles)
    num_up = count * UP_STRIPS
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    nth = gl.to_tensor(0)
    item = _receive_item(mail, nth, _TOKEN_WARPS)
    while item < num_up + count * DOWN_STRIPS:
        record, _expert, _strip, start, end = find_item(item, tiles, num_up, UP_STRIPS, DOWN_STRIPS)
        parts = (end - start + 15) // 16
        if item < num_up:
            source = x
            steps = WIDTH // _K
            for part in range(parts):
                place = start + 16 * part + row
                token = gl.load(order + place, mask=place < end, other=0) // top_k
                offsets.index(part).store(token * (WIDTH // 16))
        else:
            source = hidden
            steps = INNER // _K
            for part in range(parts):
                place = start + 16 * part + row
                offsets.index(part).store(gl.where(place < end, place, 0) * (INNER // 16))
            wait_for_strips(record, UP_STRIPS * _C)
        for _ in range(steps):
            mbarrier.wait(empty.index(slot), phase ^ 1)
            for part in range(parts):
                is_row = gl.expand_dims(start + 16 * part + row < end, 1)
                offset = 16 * offsets.index(part).load(gl.SliceLayout(1, _COPY_LAYOUT))
                address = source + (gl.expand_dims(offset, 1) + column)
                if part < PARTS:
                    to = 2 * slot * PARTS + part
                    copy_words(main_ring.index(to), address, mask=is_row)
                    copy_words(main_ring.index(to + PARTS), address + _HALF, mask=is_row)
                else:
                    to = 2 * slot * TAIL_PARTS + (part - PARTS)
                    copy_words(tail_ring.index(to), address, mask=is_row)
                    copy_words(tail_ring.index(to + TAIL_PARTS), address + _HALF, mask=is_row)
            async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
            source += _K
            slot, phase = next_slot(slot, phase, STAGES)
        nth += 1
        item = _receive_item(mail, nth, _TOKEN_WARPS)


@gluon.jit
def warp_specialized_experts_kernel(
    x, hidden, rows, order, tiles, num_tiles,
    gate_up, gate_up_scales, gate_up_factors, down, down_scales, down_factors, top_k,
    WIDTH: gl.constexpr, INNER: gl.constexpr, MAINS: gl.constexpr,
    TAILS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A program of three warpgroups; see the top of this file, and `WarpTiling` for the constants.

    Args:
        x, hidden, rows, order, tiles, num_tiles, gate_up_factors, down_factors, top_k: those of
            `nvfp4_experts_kernel`.
        gate_up, down: descriptors of int32 [E * N / 64, K / 128, 4, 256], a strip's step a box.
        gate_up_scales, down_scales: descriptors of int32 [E * N / 64, K / 128, 128].
    """
    MAIN: gl.constexpr = _most(MAINS)
    TAIL: gl.constexpr = _most(TAILS)
    full, empty = allocate_ring(STAGES, 1 + 32 * _TOKEN_WARPS, _C)
    words = gl.allocate_shared_memory(gl.int32, [STAGES, _TILES, 1, 4, _WORDS // 4], _WORDS_BOX)
    scale_words = gl.allocate_shared_memory(gl.int32, [STAGES, _TILES, 1, _SCALES], _SCALES_BOX)
    mains = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, MAIN, _HALF], _TOKENS)
    tails = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, TAIL, _HALF], _TOKENS)
    offsets = gl.allocate_shared_memory(gl.int32, [(MAIN + TAIL) // 16, 16], _FLAT)
    mail = _allocate_mail()
    fence_async_shared()
    ring = (full, empty, words, scale_words, mains, tails)
    args = (ring, mail, hidden, rows, order, tiles, num_tiles, gate_up_factors, down_factors)
    tokens = (ring, mail, offsets, x, hidden, order, tiles, num_tiles, top_k)
    weights = (ring, mail, tiles, num_tiles, gate_up, gate_up_scales, down, down_scales)
    gl.warp_specialize(
        [
            (_consume, (args, 0, WIDTH, INNER, MAINS, TAILS, STAGES)),
            (_consume, (args, 1, WIDTH, INNER, MAINS, TAILS, STAGES)),
            (_copy_tokens, (tokens, WIDTH, INNER, STAGES)),
            (_copy_weights, (weights, WIDTH, INNER, STAGES)),
        ],
        [4, _TOKEN_WARPS, 1],
        [_REGISTERS, _COPY_REGISTERS, _COPY_REGISTERS],
    )

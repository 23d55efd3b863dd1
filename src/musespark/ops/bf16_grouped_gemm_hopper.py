"""Both products of BF16 experts in one launch, for Hopper.

    hidden[r]        = b( silu(x[token of r] @ Wgate[e].T) * (x[token of r] @ Wup[e].T) )
    rows[route of r] = b( hidden[r] @ Wdown[e].T )

The same work list and the same swapped operands as for NVFP4 experts: a strip of weight rows is
the left operand, a tile of tokens the right one. Weights stay as the checkpoint stores them. A
program of the first product takes equally many gate and up rows, so that it can activate its sums.
"""

from dataclasses import dataclass

from torch import Tensor

from musespark.ops.nvfp4_hopper.work_list import (
    TileClasses,
    build_work_list,
    choose_tiling,
    find_item,
    finish_strip,
    is_class,
    wait_for_strips,
)
from musespark.ops.triton_import import IS_INTERPRETED, tl, triton


@dataclass(frozen=True, slots=True)
class BF16Tiling(TileClasses):
    """How a launch cuts its work; all of it is decided when the kernel is compiled."""

    warps: int
    rows: int
    """Weight rows of one accumulator; a program has two."""
    depth: int
    """Columns of a step."""
    mains: tuple[int, ...]
    tails: tuple[int, ...]
    stages: int


# (up to so many rows an expert on average, tiling).
TILINGS = (
    (12, BF16Tiling(4, 64, 64, (16,), (0,), stages=5)),
    (56, BF16Tiling(4, 64, 64, (16, 32, 32), (0, 0, 16), stages=5)),
    (float("inf"), BF16Tiling(8, 128, 64, (32, 64, 128, 128), (0, 0, 0, 32), stages=4)),
)


class HopperBF16Experts:
    """y = b( b( silu(x @ Wgate) * (x @ Wup) ) @ Wdown ) per route, on the weights as they are."""

    def __init__(self, gate_up: Tensor, down: Tensor, *, num_routed: int | None = None) -> None:
        """Take the weights.

        Args:
            gate_up: [E, 2 I, H] bfloat16, gate rows first.
            down: [E, H, I] bfloat16.
            num_routed: experts that tokens choose among, here and elsewhere; None: those here.

        Raises:
            ValueError: H or I is not a multiple of 128.
        """
        self.num_experts, self.width, self.inner = down.shape
        for name, size in (("expert width H", self.width), ("intermediate size I", self.inner)):
            if size % 128:
                raise ValueError(
                    f"Hopper's grouped GEMM needs widths that are multiples of 128: found {size} "
                    f"as a rank's share of the {name}. Choose a parallel layout whose shares are."
                )
        self._num_routed = num_routed or self.num_experts
        self._gate_up, self._down = gate_up.data, down.data

    def choose_tiling(self, num_routes: int) -> BF16Tiling:
        """The tiling for so many routes, of which a part may be elsewhere."""
        return choose_tiling(num_routes, self._num_routed, TILINGS)

    def __call__(
        self,
        x: Tensor,
        ids: Tensor,
        *,
        first_expert: int = 0,
        tiling: BF16Tiling | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Multiply every route that has an expert here; no host synchronization.

        Args:
            x: [T, H] bfloat16.
            ids: [T, K] int64 expert of each route.
            first_expert: the id of the first expert here; routes to others, and -1, are left out.
            tiling: instead of the one that suits the number of routes.

        Returns:
            (rows [T * K, H] bfloat16 in the order of the routes, undefined where a route was left
            out; its own number of each route [T, K], -1 where it was left out).
        """
        num_routes = ids.numel()
        if tiling is None:
            tiling = self.choose_tiling(num_routes)
        x, ids = x.contiguous(), ids.contiguous()
        work = build_work_list(ids, self.num_experts, tiling.capacity, first_expert=first_expert)
        hidden = x.new_empty((num_routes, self.inner))
        rows = x.new_empty((num_routes, self.width))
        if not num_routes:
            return rows, work.route_index
        down_rows = tiling.rows if self.width % (2 * tiling.rows) == 0 else tiling.rows // 2
        strips = self.inner // tiling.rows + self.width // (2 * down_rows)
        bf16_experts_kernel[(work.tiles.shape[0] * strips,)](
            x, hidden, rows, work.order, work.tiles, work.num_tiles, self._gate_up, self._down,
            ids.shape[1], self.width, self.inner, tiling.rows, down_rows, tiling.depth,
            tiling.mains, tiling.tails, tiling.stages, IS_INTERPRETED, num_warps=tiling.warps,
        )  # fmt: skip
        return rows, work.route_index


@triton.jit
def _dot(weights, tokens, acc, EMULATE: tl.constexpr):
    if EMULATE:  # the interpreter multiplies the bits of bfloat16
        acc = tl.dot(weights.to(tl.float32), tokens.to(tl.float32), acc)
    else:
        acc = tl.dot(weights, tokens, acc)
    return acc


@triton.jit
def _store(sums, out, out_rows, is_row, first_column, stride, ROWS: tl.constexpr):
    column = first_column + tl.arange(0, ROWS)
    address = out + out_rows[:, None].to(tl.int64) * stride + column[None, :]
    tl.store(address, tl.trans(sums).to(tl.bfloat16), mask=is_row[:, None])


@triton.jit
def _strip(
    x, weight, out, in_rows, out_rows, divisor, row0, row1, out_column, start, end,
    OUT: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, GATED: tl.constexpr,
    STAGES: tl.constexpr, EMULATE: tl.constexpr,
):  # fmt: skip
    """ROWS weight rows from row0 and from row1, times up to MAIN + TAIL tokens."""
    place = start + tl.arange(0, MAIN)
    is_row = place < end
    source = place
    if in_rows is not None:
        source = tl.load(in_rows + place, mask=is_row, other=0) // divisor
    column = tl.arange(0, DEPTH)
    x_main = x + source[:, None].to(tl.int64) * K + column[None, :]
    acc0 = tl.zeros([ROWS, MAIN], tl.float32)
    acc1 = tl.zeros([ROWS, MAIN], tl.float32)
    if TAIL > 0:
        tail_place = start + MAIN + tl.arange(0, TAIL)
        is_tail = tail_place < end
        tail_source = tail_place
        if in_rows is not None:
            tail_source = tl.load(in_rows + tail_place, mask=is_tail, other=0) // divisor
        x_tail = x + tail_source[:, None].to(tl.int64) * K + column[None, :]
        tail0 = tl.zeros([ROWS, TAIL], tl.float32)
        tail1 = tl.zeros([ROWS, TAIL], tl.float32)
    w = tl.arange(0, ROWS)[:, None] * K + column[None, :]
    w0 = weight + row0 * K + w
    w1 = weight + row1 * K + w

    for k in tl.range(0, K, DEPTH, num_stages=STAGES):
        a0 = tl.load(w0 + k, eviction_policy="evict_first")
        a1 = tl.load(w1 + k, eviction_policy="evict_first")
        tokens = tl.trans(tl.load(x_main + k, mask=is_row[:, None], other=0.0))
        acc0 = _dot(a0, tokens, acc0, EMULATE)
        acc1 = _dot(a1, tokens, acc1, EMULATE)
        if TAIL > 0:
            tail = tl.trans(tl.load(x_tail + k, mask=is_tail[:, None], other=0.0))
            tail0 = _dot(a0, tail, tail0, EMULATE)
            tail1 = _dot(a1, tail, tail1, EMULATE)

    target = place
    if out_rows is not None:
        target = tl.load(out_rows + place, mask=is_row, other=0)
    if GATED:
        acc0 = acc0 / (1.0 + tl.exp(-acc0)) * acc1
    else:
        _store(acc1, out, target, is_row, out_column + ROWS, OUT, ROWS)
    _store(acc0, out, target, is_row, out_column, OUT, ROWS)
    if TAIL > 0:
        tail_target = tail_place
        if out_rows is not None:
            tail_target = tl.load(out_rows + tail_place, mask=is_tail, other=0)
        if GATED:
            tail0 = tail0 / (1.0 + tl.exp(-tail0)) * tail1
        else:
            _store(tail1, out, tail_target, is_tail, out_column + ROWS, OUT, ROWS)
        _store(tail0, out, tail_target, is_tail, out_column, OUT, ROWS)


@triton.jit
def bf16_experts_kernel(
    x, hidden, rows, order, tiles, num_tiles, gate_up, down, top_k,
    WIDTH: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr, DOWN_ROWS: tl.constexpr,
    DEPTH: tl.constexpr, MAINS: tl.constexpr, TAILS: tl.constexpr,
    STAGES: tl.constexpr, EMULATE: tl.constexpr,
):  # fmt: skip
    """One item of the work list.

    Args:
        x: [T, H = WIDTH] bfloat16.
        hidden: [R, I = INNER] bfloat16, in the list's order.
        rows: [T * K, H] bfloat16, route-major.
        order, tiles, num_tiles: the work list.
        gate_up: [E, 2 I, H] bfloat16; down: [E, H, I] bfloat16.
        top_k: K.
    """
    UP_STRIPS: tl.constexpr = INNER // ROWS
    DOWN_STRIPS: tl.constexpr = WIDTH // (2 * DOWN_ROWS)
    item = tl.program_id(0)
    count = tl.load(num_tiles)
    num_up = count * UP_STRIPS
    if item < num_up + count * DOWN_STRIPS:
        record, expert, strip, start, end = find_item(item, tiles, num_up, UP_STRIPS, DOWN_STRIPS)
        size = end - start
        if item < num_up:
            row = expert.to(tl.int64) * (2 * INNER) + strip * ROWS
            for c in tl.static_range(len(MAINS)):
                if is_class(size, MAINS, TAILS, c):
                    _strip(
                        x, gate_up, hidden, order, None, top_k, row, row + INNER, strip * ROWS,
                        start, end, INNER, WIDTH, ROWS, DEPTH, MAINS[c], TAILS[c], True,
                        STAGES, EMULATE,
                    )  # fmt: skip
            finish_strip(record)
        else:
            wait_for_strips(record, UP_STRIPS)
            column = strip * (2 * DOWN_ROWS)
            row = expert.to(tl.int64) * WIDTH + column
            for c in tl.static_range(len(MAINS)):
                if is_class(size, MAINS, TAILS, c):
                    _strip(
                        hidden, down, rows, None, order, top_k, row, row + DOWN_ROWS, column,
                        start, end, WIDTH, INNER, DOWN_ROWS, DEPTH, MAINS[c], TAILS[c], False,
                        STAGES, EMULATE,
                    )  # fmt: skip

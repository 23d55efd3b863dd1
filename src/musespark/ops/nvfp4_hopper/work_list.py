"""Which expert multiplies which tokens: built on the device, without asking the host.

Routes are sorted by expert, in order within one. An expert's rows are then cut into tiles of up to
`capacity` tokens. How many tiles there will be is known on the device alone, so that launches are
sized by `max_tiles` and programs beyond the last tile leave at once.

One program counts the routes of each chunk of 256; then each chunk's program finds the places of
its routes from the counts of the chunks before. A batch of one chunk needs only the second step.
The first launch also permutes the columns of the input, where it is asked to.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from musespark.ops.triton_import import (
    launch_early,
    next_power_of_2,
    tl,
    triton,
    wait_for_inputs,
)

# A tile's record, in int32 words.
_RECORD = tl.constexpr(8)
_EXPERT = tl.constexpr(0)
_START = tl.constexpr(1)
_END = tl.constexpr(2)
_FIRST_TILE = tl.constexpr(3)
_NUM_TILES = tl.constexpr(4)
_NUM_FINISHED = tl.constexpr(5)

_CHUNK = 256
_PERMUTED_PAIRS = 2048
_PAIRS = tl.constexpr(_PERMUTED_PAIRS)


@dataclass(frozen=True, slots=True)
class WorkList:
    """Routes sorted by expert, cut into tiles."""

    order: Tensor
    """[R] int32: the route t * K + k at each place; places behind the last are undefined."""
    tiles: Tensor
    """[max_tiles, 8] int32: expert, start, end, the expert's first tile and number of tiles, how
    many strips are finished (0 at first), two unused; those behind the last are undefined."""
    num_tiles: Tensor
    """[2] int32: how many tiles there are; how many items have been taken by programs that take
    them one by one, 0 at first."""
    route_index: Tensor
    """[T, K] int64: each route's own number, -1 where no expert here takes it."""


def max_tiles(num_routes: int, num_experts: int, capacity: int) -> int:
    """The most tiles that so many routes can make."""
    occupied = min(num_routes, num_experts)
    return (num_routes + occupied * (capacity - 1)) // capacity


def build_work_list(
    ids: Tensor,
    num_experts: int,
    capacity: int,
    *,
    first_expert: int = 0,
    permute: Tensor | None = None,
    permuted: Tensor | None = None,
) -> WorkList:
    """Sort routes and cut tiles, on the device.

    Args:
        ids: [T, K] int64 expert of each route; one that is not here, -1 above all, gets no place.
        num_experts: the experts that are here.
        capacity: the most tokens of a tile.
        first_expert: the id of the first expert that is here.
        permute: [T, H] bfloat16 whose columns the first launch permutes on the side; None: none.
        permuted: [T, H], receives them.
    """
    num_routes, device = ids.numel(), ids.device
    num_chunks = max(1, -(-num_routes // _CHUNK))
    chunk = _CHUNK if num_chunks > 1 else max(16, next_power_of_2(num_routes))
    experts_padded = next_power_of_2(num_experts)

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    tiles = ints(max(1, max_tiles(num_routes, num_experts, capacity)), 8)
    work = WorkList(ints(num_routes), tiles, ints(2), torch.empty_like(ids))
    source, target, num_pairs = None, None, 0
    if permute is not None and permuted is not None:
        source, target = permute.view(torch.int32), permuted.view(torch.int32)
        num_pairs = source.numel()
    permuting = -(-num_pairs // _PERMUTED_PAIRS)
    early = launch_early(device, ids.shape[0])
    counts = None
    if num_chunks > 1:
        counts = ints(num_chunks, experts_padded)
        _count_kernel[(num_chunks + permuting,)](
            ids, counts, num_routes, num_chunks, first_expert, num_experts,
            source, target, num_pairs, experts_padded, chunk, num_warps=4, **early,
        )  # fmt: skip
        source, target, permuting = None, None, 0
    _list_kernel[(num_chunks + permuting,)](
        ids, counts, work.order, work.tiles, work.num_tiles, work.route_index,
        num_routes, num_chunks, first_expert, num_experts, source, target, num_pairs,
        experts_padded, chunk, capacity, num_warps=8, **early,
    )  # fmt: skip
    return work


@triton.jit
def _permute(block, source, target, num_pairs):
    """Pairs of columns, as words: each 8 x 8 of them is transposed."""
    i = block * _PAIRS + tl.arange(0, _PAIRS)
    within = i % 64
    pairs = tl.load(source + (i - within + within % 8 * 8 + within // 8), mask=i < num_pairs)
    tl.store(target + i, pairs, mask=i < num_pairs)


@triton.jit
def _load_experts(ids, routes, num_routes, first_expert, num_experts):
    """(the expert of each route, as an index here; whether it is here)."""
    expert = tl.load(ids + routes, mask=routes < num_routes, other=-1)
    local = expert - first_expert
    is_here = (expert >= 0) & (local >= 0) & (local < num_experts)
    return tl.where(is_here, local, 0).to(tl.int32), is_here


@triton.jit
def _count_kernel(
    ids, counts, num_routes, num_chunks, first_expert, num_experts,
    source, target, num_pairs, E: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """counts [num_chunks, E]: the routes of each chunk to each expert; one program a chunk."""
    wait_for_inputs()
    chunk = tl.program_id(0)
    if chunk < num_chunks:
        routes = chunk * CHUNK + tl.arange(0, CHUNK)
        experts, is_here = _load_experts(ids, routes, num_routes, first_expert, num_experts)
        tl.store(counts + chunk * E + tl.arange(0, E), tl.histogram(experts, E, mask=is_here))
    elif source is not None:
        _permute(chunk - num_chunks, source, target, num_pairs)


@triton.jit
def _list_kernel(
    ids, counts, order, tiles, num_tiles, route_index,
    num_routes, num_chunks, first_expert, num_experts, source, target, num_pairs,
    E: tl.constexpr, CHUNK: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Place each route; the first program also cuts the tiles. One program a chunk."""
    wait_for_inputs()
    chunk = tl.program_id(0)
    if chunk < num_chunks:
        slot = tl.arange(0, CHUNK)
        routes = chunk * CHUNK + slot
        experts, is_here = _load_experts(ids, routes, num_routes, first_expert, num_experts)
        if counts is None:  # a single chunk
            total = tl.histogram(experts, E, mask=is_here)
            before = tl.zeros([E], tl.int32)
        else:
            total = tl.zeros([E], tl.int32)
            before = tl.zeros([E], tl.int32)
            for other in range(num_chunks):
                count = tl.load(counts + other * E + tl.arange(0, E))
                total += count
                before += tl.where(other < chunk, count, 0)
        starts = tl.cumsum(total, 0) - total
        # The place of a route: its expert's start, then routes of earlier chunks, then earlier
        # ones of this chunk.
        is_before = is_here[None, :] & (slot[None, :] < slot[:, None])
        is_before = is_before & (experts[None, :] == experts[:, None])
        place = tl.gather(starts + before, experts, 0) + tl.sum(is_before.to(tl.int32), axis=1)
        tl.store(order + place, routes, mask=is_here)
        own = tl.where(is_here, routes, -1).to(tl.int64)
        tl.store(route_index + routes, own, mask=routes < num_routes)
        if chunk == 0:
            _cut_tiles(starts, total, tiles, num_tiles, E, CAPACITY)
    elif source is not None:
        _permute(chunk - num_chunks, source, target, num_pairs)


@triton.jit
def _cut_tiles(starts, total, tiles, num_tiles, E: tl.constexpr, CAPACITY: tl.constexpr):
    num = (total + CAPACITY - 1) // CAPACITY
    first = tl.cumsum(num, 0) - num
    tl.store(num_tiles, tl.sum(num, 0))
    tl.store(num_tiles + 1, 0)
    for nth in range(tl.max(num, 0)):
        exists = nth < num
        record = tiles + (first + nth) * _RECORD
        start = starts + nth * CAPACITY
        tl.store(record + _EXPERT, tl.arange(0, E), mask=exists)
        tl.store(record + _START, start, mask=exists)
        tl.store(record + _END, tl.minimum(start + CAPACITY, starts + total), mask=exists)
        tl.store(record + _FIRST_TILE, first, mask=exists)
        tl.store(record + _NUM_TILES, num, mask=exists)
        tl.store(record + _NUM_FINISHED, tl.zeros([E], tl.int32), mask=exists)


# What the kernels that work the list off have in common. A program's item is a strip of weight
# rows times a tile of tokens. All items of the first product come before those of the second, and
# among one expert's, tiles that share a strip are neighbours, so that its weights come from memory
# once. An item of the second product waits until all strips of its tile are finished. No item
# waits for a higher number, and programs start in order, so that some program can always run.


@triton.jit
def find_item(item, tiles, num_first, FIRST_STRIPS: tl.constexpr, SECOND_STRIPS: tl.constexpr):
    """(its tile's record, expert, strip, start, end); the first product's come first."""
    strips = tl.where(item < num_first, FIRST_STRIPS, SECOND_STRIPS)
    within = tl.where(item < num_first, item, item - num_first)
    some_tile = tiles + within // strips * _RECORD  # one of the same expert's
    expert = tl.load(some_tile + _EXPERT)
    first_tile = tl.load(some_tile + _FIRST_TILE)
    count = tl.load(some_tile + _NUM_TILES)
    local = within - first_tile * strips
    record = tiles + (first_tile + local % count) * _RECORD
    return record, expert, local // count, tl.load(record + _START), tl.load(record + _END)


@triton.jit
def finish_strip(record):
    """Make the program's stores visible, then count the strip."""
    tl.debug_barrier()  # all warps have stored
    tl.atomic_add(record + _NUM_FINISHED, 1, sem="release")


@triton.jit
def wait_for_strips(record, count):
    """Until so many strips of the tile are finished and visible."""
    while tl.atomic_add(record + _NUM_FINISHED, 0, sem="acquire") < count:
        pass


class TileClasses:
    """Of a tiling: a tile is multiplied as the first class that holds it, as `is_class` has it."""

    __slots__ = ()
    mains: tuple[int, ...]
    """Tokens of a tile, by class."""
    tails: tuple[int, ...]
    """Tokens of a second matrix product on the same weights, added to the class's first."""

    @property
    def capacity(self) -> int:
        """The most tokens of a tile."""
        return self.mains[-1] + self.tails[-1]


_Tiling = TypeVar("_Tiling", bound=TileClasses)


def choose_tiling(
    num_routes: int, num_experts: int, tilings: Sequence[tuple[float, _Tiling]]
) -> _Tiling:
    """The tiling for so many routes over so many experts, of (up to so many rows an expert on
    average, tiling)."""
    mean = num_routes / num_experts
    return next(tiling for most, tiling in tilings if mean <= most)


@triton.jit
def is_class(size, MAINS: tl.constexpr, TAILS: tl.constexpr, c: tl.constexpr):
    """Whether class c is the first that holds so many tokens."""
    fits = size <= MAINS[c] + TAILS[c]
    if c > 0:
        fits = fits & (size > MAINS[c - 1] + TAILS[c - 1])
    return fits

"""NVFP4 experts on a Hopper GPU: weights in its layout, and the launches that multiply them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from musespark.ops.gluon_import import HAS_GLUON, TensorDescriptor
from musespark.ops.nvfp4_hopper.kernel import nvfp4_experts_kernel
from musespark.ops.nvfp4_hopper.layout import (
    K_BLOCK,
    LEFTOVER,
    TILE_ROWS,
    TILE_SCALE_WORDS,
    TILE_WORDS,
    check_shape,
    gate_up_rows,
    pack_in_place,
)
from musespark.ops.nvfp4_hopper.warp_specialized import (
    PROGRAM_TILES,
    SCALES_BOX,
    START_REGISTERS,
    WORDS_BOX,
    warp_specialized_experts_kernel,
)
from musespark.ops.nvfp4_hopper.work_list import (
    TileClasses,
    WorkList,
    build_work_list,
    choose_tiling,
)
from musespark.ops.triton_import import (
    HAS_TRITON,
    IS_INTERPRETED,
    is_hopper,
    num_multiprocessors,
)


@dataclass(frozen=True, slots=True)
class Tiling(TileClasses):
    """How a launch cuts its work; all of it is decided when the kernel is compiled."""

    warps: int
    """4 or 8; each takes 16 rows of weights at a time."""
    groups: int
    """1 or 2: how many times 16 * warps rows a program takes."""
    mains: tuple[int, ...]
    tails: tuple[int, ...]
    stages: int
    """Steps of 128 columns in flight, the current one included."""
    unroll: int = 1
    """Steps written out in the loop's body."""
    settle: bool = False
    """Whether each step waits for its products: fewer registers, so more programs side by side."""


@dataclass(frozen=True, slots=True)
class WarpTiling(TileClasses):
    """How a launch with warps of their own roles cuts its work."""

    mains: tuple[int, ...]
    tails: tuple[int, ...]
    """Powers of two from 16 on; with a tail, the main part is the largest."""
    stages: int
    """Steps of 128 columns in shared memory."""


# (up to so many rows an expert on average, tiling); docs/nvfp4-hopper.md has the measurements.
TILINGS = (
    (1 / 16, Tiling(4, 1, (16,), (0,), stages=3, unroll=2)),
    (12, Tiling(4, 2, (16,), (0,), stages=4, settle=True)),
    (56, Tiling(8, 2, (16, 32, 32), (0, 0, 16), stages=3, settle=True)),
    (float("inf"), Tiling(8, 2, (32, 64, 128, 128, 128), (0, 0, 0, 16, 32), stages=4)),
)


# Instead of the last one, where warps can have roles and weights have rows enough.
WARP_TILING = WarpTiling((32, 64, 128, 128, 128), (0, 0, 0, 16, 32), stages=3)
Tilings = tuple[tuple[float, Tiling | WarpTiling], ...]


def tilings_for(width: int, inner: int) -> Tilings:
    """(up to so many rows an expert on average, tiling) for experts of these widths, H and I."""
    rows = TILE_ROWS * PROGRAM_TILES
    if not HAS_GLUON or IS_INTERPRETED or 2 * inner % rows or width % rows:
        return TILINGS
    return (*TILINGS[:-1], (TILINGS[-1][0], WARP_TILING))


class HopperNVFP4Experts:
    """y = b( s_down * ( b( silu(s_gate * (x @ Wgate)) * (s_up * (x @ Wup)) ) @ Wdown ) ) per route.

    The weights take the place of the checkpoint's in the same memory: what is passed in must not
    be read afterwards.
    """

    def __init__(
        self,
        gate_up: Tensor,
        gate_up_scales: Tensor,
        gate_up_global: Tensor,
        down: Tensor,
        down_scales: Tensor,
        down_global: Tensor,
        *,
        num_routed: int | None = None,
    ) -> None:
        """Re-lay the weights.

        Args:
            gate_up: [E, 2 I, H / 2] uint8, gate rows first.
            gate_up_scales: [E, 2 I, H / 16] float8_e4m3fn.
            gate_up_global: [E, 2] float32, gate's and up's global scale.
            down: [E, H, I / 2] uint8.
            down_scales: [E, H, I / 16] float8_e4m3fn.
            down_global: [E] float32.
            num_routed: experts that tokens choose among, here and elsewhere; None: those here.

        Raises:
            ValueError: H or I is not a multiple of 128.
        """
        self.num_experts, self.width, self.inner = len(down), down.shape[1], 2 * down.shape[2]
        check_shape(self.width, self.inner)
        self._num_routed = num_routed or self.num_experts
        self._tilings = tilings_for(self.width, self.inner)
        pack_in_place(gate_up, gate_up_scales, gate_up_rows(self.inner, gate_up.device))
        pack_in_place(down, down_scales)
        self._gate_up, self._gate_up_scales = _words(gate_up), _words(gate_up_scales)
        self._down, self._down_scales = _words(down), _words(down_scales)
        self._gate_up_factors = (gate_up_global.to(torch.float32) * LEFTOVER).contiguous()
        self._down_factors = (down_global.to(torch.float32) * LEFTOVER).contiguous()

    def choose_tiling(self, num_routes: int) -> Tiling | WarpTiling:
        """The tiling for so many routes, of which a part may be elsewhere."""
        # Warps with roles count elements in 32 bits.
        is_countable = num_routes * max(self.width, self.inner) < 2**31
        tilings = self._tilings if is_countable else TILINGS
        return choose_tiling(num_routes, self._num_routed, tilings)

    def list_work(self, ids: Tensor, *, first_expert: int = 0) -> WorkList:
        """What a call on these ids [T, K] works off: it needs no activations yet."""
        tiling = self.choose_tiling(ids.numel())
        return build_work_list(
            ids.contiguous(), self.num_experts, tiling.capacity, first_expert=first_expert
        )

    def __call__(
        self,
        x: Tensor,
        ids: Tensor,
        *,
        first_expert: int = 0,
        is_permuted: bool = False,
        work: WorkList | None = None,
        tiling: Tiling | WarpTiling | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Multiply every route that has an expert here; no host synchronization.

        Args:
            x: [T, H] bfloat16.
            ids: [T, K] int64 expert of each route.
            first_expert: the id of the first expert here; routes to others, and -1, are left out.
            is_permuted: whether x's columns are in the layout's order already.
            work: what `list_work` made of these ids and `first_expert`, for this call alone; the
                columns are in the layout's order then. None: it is made here.
            tiling: instead of the one that suits the number of routes.

        Returns:
            (rows [T * K, H] bfloat16 in the order of the routes, undefined where a route was left
            out; its own number of each route [T, K], -1 where it was left out).
        """
        assert work is None or (is_permuted and tiling is None)
        tiling = tiling or self.choose_tiling(ids.numel())
        x, ids = x.contiguous(), ids.contiguous()
        permuted = x if is_permuted else torch.empty_like(x)
        if work is None:
            work = build_work_list(
                ids, self.num_experts, tiling.capacity, first_expert=first_expert,
                permute=None if is_permuted else x, permuted=permuted,
            )  # fmt: skip
        num_routes = ids.numel()
        hidden = x.new_empty((num_routes, self.inner))
        rows = x.new_empty((num_routes, self.width))
        if not num_routes:
            return rows, work.route_index
        if isinstance(tiling, WarpTiling):
            self._run_warp_specialized(permuted, hidden, rows, work, ids.shape[1], tiling)
        else:
            self._run(permuted, hidden, rows, work, ids.shape[1], tiling)
        return rows, work.route_index

    def _run(
        self, x: Tensor, hidden: Tensor, rows: Tensor, work: WorkList, top_k: int, tiling: Tiling
    ) -> None:
        height = 16 * tiling.warps
        groups = _groups(2 * self.inner, height, tiling.groups)
        down_groups = _groups(self.width, height, tiling.groups)
        strips = 2 * self.inner // (height * groups) + self.width // (height * down_groups)
        nvfp4_experts_kernel[(work.tiles.shape[0] * strips,)](
            x, hidden, rows, work.order, work.tiles, work.num_tiles,
            self._gate_up, self._gate_up_scales, self._gate_up_factors,
            self._down, self._down_scales, self._down_factors, top_k,
            self.width, self.inner, tiling.warps, groups, down_groups,
            tiling.mains, tiling.tails, tiling.stages, tiling.unroll, tiling.settle, IS_INTERPRETED,
            num_warps=tiling.warps,
        )  # fmt: skip

    def _run_warp_specialized(
        self,
        x: Tensor,
        hidden: Tensor,
        rows: Tensor,
        work: WorkList,
        top_k: int,
        tiling: WarpTiling,
    ) -> None:
        warp_specialized_experts_kernel[(num_multiprocessors(x.device),)](
            x, hidden, rows, work.order, work.tiles, work.num_tiles,
            _describe_words(self._gate_up, self.width),
            _describe_scales(self._gate_up_scales, self.width), self._gate_up_factors,
            _describe_words(self._down, self.inner),
            _describe_scales(self._down_scales, self.inner), self._down_factors, top_k,
            self.width, self.inner, tiling.mains, tiling.tails, tiling.stages,
            num_warps=4, maxnreg=START_REGISTERS,
        )  # fmt: skip


def _groups(rows: int, height: int, most: int) -> int:
    """How many times `height` rows a program takes, so that no program is left with a part."""
    return most if rows % (height * most) == 0 else 1


def _words(tensor: Tensor) -> Tensor:
    """[E, ...] bytes as unsigned words."""
    return tensor.data.view(torch.uint8).flatten().view(torch.uint32)


def _describe_words(words: Tensor, columns: int) -> TensorDescriptor:
    """Codes of [E, out, in] as [E * out / 64, in / 128, 4, 256], a box a program's step."""
    quarter = TILE_WORDS // 4
    view = words.view(torch.int32).view(-1, columns // K_BLOCK, 4, quarter)
    return TensorDescriptor.from_tensor(view, [PROGRAM_TILES, 1, 4, quarter], WORDS_BOX)


def _describe_scales(scales: Tensor, columns: int) -> TensorDescriptor:
    """The same of the scales, [E * out / 64, in / 128, 128]."""
    view = scales.view(torch.int32).view(-1, columns // K_BLOCK, TILE_SCALE_WORDS)
    return TensorDescriptor.from_tensor(view, [PROGRAM_TILES, 1, TILE_SCALE_WORDS], SCALES_BOX)


def runs_on(device: torch.device, width: int, inner: int) -> bool:
    """Whether experts of these widths, H and I, have this path: on a Hopper GPU with Triton."""
    return HAS_TRITON and is_hopper(device) and width % K_BLOCK == 0 and inner % K_BLOCK == 0

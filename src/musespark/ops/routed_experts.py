"""Both products of experts of any width, in bfloat16 or float32, plain or NVFP4, on any GPU.

    hidden[r]        = b( silu(s_gate[e] * x[token of r] @ Wgate[e].T)
                          * (s_up[e] * x[token of r] @ Wup[e].T) )
    rows[route of r] = b( s_down[e] * hidden[r] @ Wdown[e].T )

For experts that the Hopper kernels do not take: widths that are no multiples of 128, float32, other
GPUs. Weights stay as the checkpoint stores them, and the same work list serves, so that the host is
never asked. A program multiplies one tile of an expert's tokens by a strip of its weight rows.
"""

import torch
from torch import Tensor

from musespark.ops.nvfp4 import GROUP_SIZE
from musespark.ops.nvfp4_hopper.work_list import build_work_list
from musespark.ops.triton_import import HAS_TRITON, dot_in_float32, round_to, tl, triton

_GROUP = tl.constexpr(GROUP_SIZE)
# Tokens and weight rows of a program, and columns of a step.
_BLOCK_T, _BLOCK_N, _BLOCK_K = 16, 32, 32


def takes(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether experts with activations of `dtype` run here."""
    return HAS_TRITON and device.type == "cuda" and dtype in (torch.bfloat16, torch.float32)


class RoutedExperts:
    """The formula above, without the scales for plain weights."""

    def __init__(
        self,
        gate_up: Tensor,
        down: Tensor,
        scales: tuple[Tensor, Tensor] | None = None,
        factors: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Take the weights, as they are.

        Args:
            gate_up: [E, 2 I, H] in the activations' dtype, gate rows first; NVFP4: codes
                [E, 2 I, H / 2] uint8.
            down: [E, H, I]; NVFP4: codes [E, H, I / 2] uint8.
            scales: NVFP4's block scales, [E, 2 I, H / 16] and [E, H, I / 16] float8_e4m3fn.
            factors: NVFP4's global scales, [E, 2] of gate and up, and [E] of down.
        """
        self.num_experts, self.width, columns = down.shape
        self.inner = columns if scales is None else 2 * columns
        self._weights = gate_up.data, down.data
        self._scales = (None, None) if scales is None else tuple(s.data for s in scales)
        self._factors = (
            (None, None)
            if factors is None
            else tuple(f.data.to(torch.float32).contiguous() for f in factors)
        )

    def __call__(self, x: Tensor, ids: Tensor, *, first_expert: int = 0) -> tuple[Tensor, Tensor]:
        """Multiply every route that has an expert here; no host synchronization.

        Args:
            x: [T, H] bfloat16 or float32.
            ids: [T, K] int64 expert of each route.
            first_expert: the id of the first expert here; routes to others, and -1, are left out.

        Returns:
            (rows [T * K, H] in x's dtype, in the order of the routes, undefined where a route was
            left out; its own number of each route [T, K], -1 where it was left out).
        """
        x, ids = x.contiguous(), ids.contiguous()
        work = build_work_list(ids, self.num_experts, _BLOCK_T, first_expert=first_expert)
        hidden = x.new_empty((ids.numel(), self.inner))
        rows = x.new_empty((ids.numel(), self.width))
        if not ids.numel():
            return rows, work.route_index
        for product, (source, target) in enumerate(((x, hidden), (hidden, rows))):
            out_features = target.shape[1]
            grid = (work.tiles.shape[0], -(-out_features // _BLOCK_N))
            routed_product_kernel[grid](
                source, target, work.order, work.tiles, work.num_tiles,
                self._weights[product], self._scales[product], self._factors[product],
                ids.shape[1], source.shape[1], out_features,
                IS_FIRST=product == 0, EMULATE=dot_in_float32(x.dtype),
                BLOCK_T=_BLOCK_T, BLOCK_N=_BLOCK_N, BLOCK_K=_BLOCK_K, num_warps=4,
            )  # fmt: skip
        return rows, work.route_index


@triton.jit
def _load_weights(
    weight, scales, row, column, inside, K, dtype: tl.constexpr, EMULATE: tl.constexpr
):
    """Rows [N, 1] by columns [1, BLOCK_K] of one expert's weights, without the global scale."""
    if scales is None:
        found = tl.load(weight + row * K + column, inside, other=0.0)
    else:
        codes = tl.load(weight + row * (K // 2) + column // 2, inside, other=0).to(tl.int32)
        codes = tl.where(column % 2 == 0, codes & 15, codes >> 4)
        # Twice the magnitude of e2m1: 0, 1 below exponent 1, then (2 + fraction) * 2^(exponent - 1)
        exponent, fraction = (codes >> 1) & 3, codes & 1
        twice = tl.where(exponent == 0, fraction, (2 + fraction) << tl.maximum(exponent - 1, 0))
        magnitude = tl.where(codes >= 8, -twice, twice).to(tl.float32) * 0.5
        scale = tl.load(scales + row * (K // _GROUP) + column // _GROUP, inside, other=0.0)
        found = magnitude * scale.to(tl.float32)
    return found.to(tl.float32 if EMULATE else dtype)  # exact


@triton.jit
def routed_product_kernel(
    x, out, order, tiles, num_tiles, weight, scales, factors, top_k, K, N,
    IS_FIRST: tl.constexpr, EMULATE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of the work list (axis 0) times a strip of weight rows (axis 1).

    Args:
        x: [T, K], or for the second product [R, K] in the list's order.
        out: [R, N] in the list's order, or for the second product in the order of the routes.
        order, tiles, num_tiles: the work list.
        weight: [E, 2 N, K], gate rows first, or for the second product [E, N, K].
        scales: NVFP4's block scales; None: weights are plain.
        factors: [E, 2] or for the second product [E].
        top_k, K, N: routes a token, columns of x, columns of out.
    """
    if tl.program_id(0) < tl.load(num_tiles):
        record = tiles + tl.program_id(0) * 8
        expert = tl.load(record).to(tl.int64)
        place = tl.load(record + 1) + tl.arange(0, BLOCK_T)
        is_row = place < tl.load(record + 2)
        route = tl.load(order + place, is_row, other=0)
        source, target = place, route
        if IS_FIRST:
            source, target = route // top_k, place
        row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        dtype: tl.constexpr = out.dtype.element_ty
        first_row = expert * N
        if IS_FIRST:
            first_row = expert * (2 * N)
        acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
        up_acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
        for start in range(0, K, BLOCK_K):
            column = start + tl.arange(0, BLOCK_K)
            tokens = tl.load(
                x + source[None, :].to(tl.int64) * K + column[:, None],
                is_row[None, :] & (column < K)[:, None],
                other=0.0,
            )
            if EMULATE:
                tokens = tokens.to(tl.float32)
            inside = (row < N)[:, None] & (column < K)[None, :]
            weights = _load_weights(
                weight, scales, (first_row + row)[:, None], column[None, :], inside, K, dtype,
                EMULATE,
            )  # fmt: skip
            acc = tl.dot(weights, tokens, acc, input_precision="ieee")
            if IS_FIRST:
                weights = _load_weights(
                    weight, scales, (first_row + N + row)[:, None], column[None, :], inside, K,
                    dtype, EMULATE,
                )  # fmt: skip
                up_acc = tl.dot(weights, tokens, up_acc, input_precision="ieee")
        if IS_FIRST:
            if factors is not None:
                acc *= tl.load(factors + expert * 2)
                up_acc *= tl.load(factors + expert * 2 + 1)
            acc = acc * tl.sigmoid(acc) * up_acc
        elif factors is not None:
            acc *= tl.load(factors + expert)
        place = target[None, :].to(tl.int64) * N + row[:, None]
        tl.store(out + place, round_to(acc, dtype), is_row[None, :] & (row < N)[:, None])

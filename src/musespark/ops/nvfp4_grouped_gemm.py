"""One matrix product per expert over rows grouped by expert, with NVFP4 weights.

    out[r] = x[r] @ (e2m1 * block scale)[expert of r].T

The global scales are the caller's: what is multiplied here is exact in x's dtype, bfloat16
included. No weight is dequantized but those of experts that have rows, a bounded piece at a time.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from musespark.ops.grouped_gemm import GroupedMatMul, occupied_groups
from musespark.ops.nvfp4 import (
    GROUP_SIZE,
    dequantize,
    e2m1_values,
    e4m3_values,
    pack_codes,
    unpack_codes,
)

# Weights dequantized at once: 1 MB of bfloat16, which stays in a core's cache until multiplied.
_PIECE = 2**19

# Small experts are multiplied together, padded to equally many rows, up to this many products of
# two numbers: starting a matrix product costs as much as some rows of padding.
_SMALL_PRODUCT = 2**24

# How many codes one table look-up turns into numbers, as what integer they are read, and the type
# that carries as many numbers of a dtype at once.
_LOOKUPS = {
    torch.bfloat16: (torch.uint16, torch.int64),
    torch.float32: (torch.uint16, torch.complex128),
    torch.float64: (torch.uint8, torch.complex128),
}


def nvfp4_grouped_gemm(packed: Tensor, scales: Tensor) -> GroupedMatMul:
    """Products with weights as they lie in a checkpoint, dequantized expert by expert.

    Args:
        packed: [E, out, in / 2] uint8.
        scales: [E, out, in / 16] float8_e4m3fn.
    """

    def matmul(x: Tensor, group_ends: Sequence[int]) -> Tensor:
        out = x.new_empty((x.shape[0], packed.shape[1]))
        for expert, rows in occupied_groups(group_ends):
            weight = dequantize(packed[expert], scales[expert], x.dtype)
            torch.mm(x[rows], weight.t(), out=out[rows])
        return out

    return matmul


def pack_nvfp4_grouped_gemm(packed: Tensor, scales: Tensor) -> GroupedMatMul:
    """Like `nvfp4_grouped_gemm`, over weights rearranged for plain torch operations.

    The rearranged bytes take the place of the old ones, in the same memory: `packed` and `scales`
    must not be read afterwards. Four codes that lie side by side become four numbers by one
    look-up in a table; codes lie side by side along the outputs, so that multiplying by the block
    scales, which change along the inputs, runs over whole rows.
    """
    num_experts, out_features, half = packed.shape
    in_features = 2 * half
    width = _panel_width(in_features, out_features)
    panels = out_features // width
    for expert in range(num_experts):
        codes = unpack_codes(packed[expert]).view(panels, width, in_features).transpose(1, 2)
        packed[expert] = pack_codes(codes).reshape(out_features, half)
        blocks = scales[expert].view(torch.uint8).view(panels, width, -1).transpose(1, 2)
        scales[expert].view(torch.uint8).copy_(blocks.reshape(out_features, -1))
    pieces = packed.view(num_experts, panels, in_features, width // 2)
    blocks = scales.view(torch.uint8).view(num_experts, panels, in_features // GROUP_SIZE, width)
    at_once = max(1, _PIECE // (in_features * out_features))  # whole experts, if they are small

    def matmul(x: Tensor, group_ends: Sequence[int]) -> Tensor:
        out = x.new_empty((x.shape[0], out_features))
        groups = occupied_groups(group_ends)
        for start in range(0, len(groups), at_once):
            chosen = groups[start : start + at_once]
            experts = _as_slice([expert for expert, _ in chosen])
            for panel in range(panels):
                weights = _dequantize_piece(
                    _pick(pieces[:, panel], experts), _pick(blocks[:, panel], experts), x.dtype
                )
                columns = out[:, panel * width : (panel + 1) * width]
                _multiply(x, weights, [rows for _, rows in chosen], columns)
        return out

    return matmul


def _multiply(x: Tensor, weights: Tensor, groups: Sequence[slice], out: Tensor) -> None:
    """out[rows] = x[rows] @ weight, for each of the weights [G, in, width] and its rows."""
    most = max(rows.stop - rows.start for rows in groups)
    if len(groups) == 1 or most * weights.numel() > _SMALL_PRODUCT:
        for weight, rows in zip(weights, groups, strict=True):
            torch.mm(x[rows], weight, out=out[rows])
        return
    # Small experts with few rows each: one batched product costs less than starting many. Shorter
    # groups are padded with whatever rows follow; nobody reads what becomes of those.
    first, last = groups[0].start, groups[-1].stop
    if last - first == len(groups) * most:
        product = torch.bmm(x[first:last].view(len(groups), most, -1), weights)
        out[first:last] = product.flatten(0, 1)
        return
    padded = [min(rows.start + i, last - 1) for rows in groups for i in range(most)]
    kept = [
        group * most + i for group, rows in enumerate(groups) for i in range(rows.stop - rows.start)
    ]
    rows_in = x.index_select(0, torch.tensor(padded, device=x.device))
    product = torch.bmm(rows_in.view(len(groups), most, -1), weights).flatten(0, 1)
    out[first:last] = product.index_select(0, torch.tensor(kept, device=x.device))


def _panel_width(in_features: int, out_features: int) -> int:
    """Outputs dequantized together: the most that divide all and keep within a piece."""
    widths = [
        width
        for width in range(4, out_features + 1, 4)
        if out_features % width == 0 and width * in_features <= _PIECE
    ]
    return max(widths, default=math.gcd(out_features, 4))


def _as_slice(experts: list[int]) -> list[int] | slice:
    """Neighbouring experts as a slice, which needs no copy."""
    first, last = experts[0], experts[-1]
    return slice(first, last + 1) if last - first + 1 == len(experts) else experts


def _pick(tensor: Tensor, experts: list[int] | slice) -> Tensor:
    if isinstance(experts, slice):
        return tensor[experts]
    return tensor.index_select(0, torch.tensor(experts, device=tensor.device))


def _dequantize_piece(pieces: Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """[G, in, width / 2] bytes and [G, in / 16, width] scale codes -> [G, in, width] in `dtype`."""
    read_as, _ = _LOOKUPS[dtype]
    values, scales = _tables(dtype, pieces.device)
    count, in_features, _ = pieces.shape
    index = pieces.contiguous().view(read_as).to(torch.int32).flatten()
    weights = (
        values.index_select(0, index).view(dtype).view(count, -1, GROUP_SIZE, blocks.shape[-1])
    )
    factors = scales.index_select(0, blocks.to(torch.int32).flatten())
    weights *= factors.view(count, -1, 1, blocks.shape[-1])
    return weights.view(count, in_features, -1)


@lru_cache(maxsize=8)
def _tables(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """(the numbers behind each integer of codes, the number behind each scale code)."""
    read_as, carrier = _LOOKUPS[dtype]
    bits = torch.iinfo(read_as).bits
    integers = torch.arange(2**bits, device=device)
    codes = torch.stack([(integers >> shift) & 15 for shift in range(0, bits, 4)], dim=-1)
    values = e2m1_values(dtype, device)[codes]
    return values.view(carrier).flatten(), e4m3_values(dtype, device)

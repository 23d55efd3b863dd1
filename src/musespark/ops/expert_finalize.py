"""From the experts' rows to one row per token: norm per route, weighted sum over routes.

    out[t] = b( sum_k  w[t, k] * rms(rows[index[t, k]] * gain, eps) )

Weight first, then the norm; the sum runs in float32, in slot order, and is rounded once. A route
whose index is -1 belongs to another rank: its row is never read, since that memory may hold NaN.
"""

import torch
from torch import Tensor

from musespark.ops.precision import wide_dtype
from musespark.ops.rms_norm import rms_norm

# Bounds the float32 intermediate of one chunk to 128 MiB.
_CHUNK_ELEMENTS = 32 * 2**20


def tokens_per_chunk(top_k: int, width: int) -> int:
    """How many tokens `expert_finalize` handles at once."""
    rows = max(top_k, _CHUNK_ELEMENTS // max(width, 1))
    return max(1, rows // top_k)


def expert_finalize(
    rows: Tensor, route_weights: Tensor, route_index: Tensor, gain: Tensor, eps: float
) -> Tensor:
    """Norm, weight and sum the experts' output rows.

    Args:
        rows: [R, H] in the compute dtype, the second GEMM's output.
        route_weights: [T, K] float32.
        route_index: [T, K] integer row of each route, -1 where another rank has it.
        gain: [H] float32, multiplied into a row before its norm.
        eps: of the norm.

    Returns:
        [T, H] in rows' dtype.
    """
    num_tokens, top_k = route_index.shape
    out = rows.new_empty((num_tokens, rows.shape[-1]))
    if not rows.shape[0]:
        return out.zero_()  # every route is elsewhere
    chunk = tokens_per_chunk(top_k, rows.shape[-1])
    for start in range(0, num_tokens, chunk):
        part = slice(start, min(start + chunk, num_tokens))
        out[part] = _finalize_chunk(rows, route_weights[part], route_index[part], gain, eps)
    return out


def _finalize_chunk(
    rows: Tensor, route_weights: Tensor, route_index: Tensor, gain: Tensor, eps: float
) -> Tensor:
    wide = wide_dtype(rows.dtype)
    elsewhere = route_index < 0  # [T, K]
    picked = rows.index_select(0, route_index.clamp_min(0).flatten())  # [T * K, H]
    normed = rms_norm(picked, gain, eps, scale_input=True, out_dtype=wide)
    normed = normed.view(*route_index.shape, -1).masked_fill(elsewhere[..., None], 0)
    normed *= route_weights.to(wide)[..., None]
    return normed.sum(dim=1).to(rows.dtype)

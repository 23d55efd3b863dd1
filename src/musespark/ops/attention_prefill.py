"""Causal attention of one sequence's new tokens over its keys, full or within a sliding window.

    visible(i, j) = position_j <= position_i  and  position_j > position_i - window
    out_i = sum_j softmax_j(scale * q_i . k_j) v_j      over the visible j

A window counts the query's own position. Query heads share key-value heads in consecutive groups.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from musespark.ops.precision import wide_dtype

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

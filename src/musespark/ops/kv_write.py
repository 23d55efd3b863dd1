"""Writing a step's keys and values into the paged cache."""

import torch
from torch import Tensor

from musespark.ops.triton_import import tl, triton


def kv_write(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Store one key and one value per token, in place.

    Args:
        key, value: [T, kv_heads, head_dim].
        key_cache, value_cache: [blocks, block_size, kv_heads, head_dim].
        slot_mapping: [N] int64 row in the flattened cache of the first N tokens, N <= T. Tokens
            behind them are padding and are not written.

    A cache in an 8-bit float takes values as they are, without a scale.
    """
    count = slot_mapping.shape[0]
    for new, cache in ((key, key_cache), (value, value_cache)):
        rows = saturate(new[:count], cache.dtype)
        if cache.dtype.itemsize == 1:  # indexed as bytes: not every backend indexes 8-bit floats
            rows, cache = rows.view(torch.uint8), cache.view(torch.uint8)
        cache.flatten(0, 1).index_copy_(0, slot_mapping, rows)


def saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`; what is beyond the range of an 8-bit float becomes its largest number."""
    if dtype.itemsize == 1:
        largest = torch.finfo(dtype).max
        x = x.clamp(-largest, largest)
    return x.to(dtype)


@triton.jit
def store_cached(pointer, value, inside):
    """Store into a cache of any float dtype; an 8-bit float saturates."""
    kind: tl.constexpr = pointer.dtype.element_ty
    if kind == tl.float8e4nv:
        value = tl.minimum(tl.maximum(value.to(tl.float32), -448.0), 448.0)
    tl.store(pointer, value.to(kind), inside)

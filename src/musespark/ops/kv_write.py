"""Writing a step's keys and values into the paged cache."""

from torch import Tensor


def kv_write(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Store one key and one value per token, in place.

    Args:
        key, value: [T, kv_heads, head_dim].
        key_cache, value_cache: [blocks, block_size, kv_heads, head_dim].
        slot_mapping: [N] int64 row in the flattened cache of the first N tokens, N <= T. Tokens
            behind them are padding and are not written.
    """
    count = slot_mapping.shape[0]
    key_cache.flatten(0, 1).index_copy_(0, slot_mapping, key[:count].to(key_cache.dtype))
    value_cache.flatten(0, 1).index_copy_(0, slot_mapping, value[:count].to(value_cache.dtype))

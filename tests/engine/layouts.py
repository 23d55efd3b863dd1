"""Caches for tests; imports no torch."""

from musespark.engine.kv_blocks import CacheLayout


def smallest_layout(block_size, window, chunk, *, longest, kinds="both", spare=0):
    """Just enough blocks for one request of `longest` tokens, read in chunks, and some to spare."""
    full = -(-longest // block_size)
    sliding = min(full, -(-(window + chunk) // block_size) + 1)
    return CacheLayout(
        block_size=block_size,
        num_full_blocks=0 if kinds == "sliding" else full + spare,
        num_sliding_blocks=0 if kinds == "full" else sliding + spare,
        sliding_window=window,
    )

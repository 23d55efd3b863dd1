"""Storage of a draft's keys and values, in the target's own blocks.

Block b of a sequence is block b in the draft's layers too. So whatever shares, evicts or gives
back the target's blocks does the same to the draft's, and there is no second pool. A draft layer
whose window is no wider than the target's pages with the target's sliding layers; every other one
needs what only full layers keep.
"""

import torch

from musespark.config.draft import DraftConfig
from musespark.config.model import AttentionKind, DecoderConfig
from musespark.model.kv_cache import KVCacheSpec, LayerCache


def draft_kinds(config: DraftConfig, target: DecoderConfig) -> list[AttentionKind]:
    """Which of the target's layers each draft layer pages with."""
    target_kinds = {layer.attention for layer in target.layers}
    return [
        "sliding_attention"
        if "sliding_attention" in target_kinds
        and layer.sliding_window is not None
        and layer.sliding_window <= target.sliding_window
        else "full_attention"
        for layer in config.layers
    ]


def draft_bytes_per_block(
    config: DraftConfig, target: DecoderConfig, kind: str, block_size: int, dtype: torch.dtype
) -> int:
    """Bytes that one block takes, over all draft layers of one kind together."""
    layers = draft_kinds(config, target).count(kind)  # type: ignore[arg-type]
    values = 2 * block_size * config.num_key_value_heads * config.head_dim
    return layers * values * dtype.itemsize


def allocate_draft_cache(
    config: DraftConfig,
    target: DecoderConfig,
    spec: KVCacheSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> list[LayerCache]:
    """The cache of every draft layer, in layer order, zeroed; `spec` is the target's."""
    caches = []
    for kind in draft_kinds(config, target):
        sliding = kind == "sliding_attention"
        blocks = spec.num_sliding_blocks if sliding else spec.num_full_blocks
        shape = (blocks, spec.block_size, config.num_key_value_heads, config.head_dim)
        key = torch.zeros(shape, dtype=spec.dtype or dtype, device=device)
        caches.append(LayerCache(key=key, value=torch.zeros_like(key)))
    return caches

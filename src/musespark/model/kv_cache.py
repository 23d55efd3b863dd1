"""Storage of keys and values: one pair of paged tensors per layer.

Full and sliding layers page separately, because a sliding layer gives blocks back as soon as the
window has passed them. All layers of one kind share block ids: block b of a sequence is block b in
each of them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from musespark.config.model import DecoderConfig, LayerConfig
from musespark.parallel.layout import ONE_PROCESS, Layout


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's share of the cache."""

    key: Tensor
    """[blocks, block_size, kv_heads, head_dim]."""
    value: Tensor
    """[blocks, block_size, kv_heads, head_dim]."""


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """How large a cache to make."""

    block_size: int
    """Tokens per block."""
    num_full_blocks: int
    """Blocks of the full layers' pool."""
    num_sliding_blocks: int
    """Blocks of the sliding layers' pool."""
    dtype: torch.dtype | None = None
    """Of what is stored; None: as the model computes."""

    def table_widths(self, config: DecoderConfig, new_tokens: int) -> tuple[int, int]:
        """(full, sliding) blocks of one sequence at most, in a step of `new_tokens` more of it."""
        longest = -(-config.max_position_embeddings // self.block_size)
        window = -(-(config.sliding_window + new_tokens) // self.block_size) + 1
        return min(self.num_full_blocks, longest), min(self.num_sliding_blocks, window)


# fp8_e4m3 has no scale: keys and values are normed or near 1, far from its largest number, 448.
_DTYPES = {"bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}


def kv_cache_dtype(setting: str, compute_dtype: torch.dtype) -> torch.dtype:
    """The dtype that `kv_cache_dtype` ("auto", "bf16" or "fp8_e4m3") stands for."""
    return compute_dtype if setting == "auto" else _DTYPES[setting]


def cached_layers(config: DecoderConfig, layout: Layout = ONE_PROCESS) -> tuple[LayerConfig, ...]:
    """The layers whose keys and values this rank holds: those of its pipeline stage."""
    here = layout.layers_here(config.num_hidden_layers)
    return config.layers[here.start : here.stop]


def cached_heads(config: DecoderConfig, layout: Layout = ONE_PROCESS) -> int:
    """Key-value heads of a layer on this rank; with more ranks than heads, several hold one."""
    return max(1, config.num_key_value_heads // layout.tensor.size)


def bytes_per_block(
    config: DecoderConfig,
    kind: str,
    block_size: int,
    dtype: torch.dtype,
    layout: Layout = ONE_PROCESS,
) -> int:
    """Bytes that one block takes on this rank, over all layers of one kind together."""
    layers = sum(layer.attention == kind for layer in cached_layers(config, layout))
    values = 2 * block_size * cached_heads(config, layout) * config.head_dim
    return layers * values * dtype.itemsize


def allocate_kv_cache(
    config: DecoderConfig,
    spec: KVCacheSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    layout: Layout = ONE_PROCESS,
) -> list[LayerCache]:
    """This rank's cache of every layer here, in order, in `dtype` unless `spec` says otherwise.

    The memory is zeroed: a masked key is never seen, but NaN in it would spread through the
    products all the same.
    """
    caches = []
    for layer in cached_layers(config, layout):
        sliding = layer.attention == "sliding_attention"
        blocks = spec.num_sliding_blocks if sliding else spec.num_full_blocks
        shape = (blocks, spec.block_size, cached_heads(config, layout), config.head_dim)
        key = torch.zeros(shape, dtype=spec.dtype or dtype, device=device)
        caches.append(LayerCache(key=key, value=torch.zeros_like(key)))
    return caches

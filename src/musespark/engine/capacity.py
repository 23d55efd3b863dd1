"""How many blocks of KV cache to make, and whether the model's length fits into memory at all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import psutil
import torch

from musespark.config.engine import EngineConfig
from musespark.config.model import DecoderConfig
from musespark.errors import CapacityError
from musespark.model.kv_cache import KVCacheSpec, bytes_per_block, kv_cache_dtype
from musespark.parallel.layout import ONE_PROCESS, Layout


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The cache to make and the longest request it serves."""

    spec: KVCacheSpec
    max_model_len: int
    num_bytes: int


def free_memory(device: torch.device) -> int:
    """Bytes that could be allocated on `device` now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


class DraftRoom(NamedTuple):
    """What a draft needs beside its target."""

    full_bytes: int
    """Of a block of the full layers' pool, for the draft's own layers."""
    sliding_bytes: int
    """Of a block of the sliding layers' pool."""
    num_tokens: int
    """That each sequence guesses ahead."""


NO_DRAFT = DraftRoom(0, 0, 0)

Minimum = Callable[[Sequence[int]], list[int]]
"""The smallest of every rank's numbers, one by one; all ranks call it."""


def plan_kv_cache(
    model: DecoderConfig,
    engine: EngineConfig,
    dtype: torch.dtype,
    free_bytes: int,
    *,
    draft: DraftRoom = NO_DRAFT,
    layout: Layout = ONE_PROCESS,
    minimum: Minimum = list,
) -> CachePlan:
    """Size both pools for `max_num_seqs` requests of full length, or as many as memory holds.

    All ranks make as many blocks as the one with the least room for them.

    Args:
        model: layer counts, head sizes and the window.
        engine: the limits asked for.
        dtype: the model's compute dtype.
        free_bytes: memory left on this rank after loading the weights.
        draft: what guesses tokens ahead, on the same blocks.
        layout: which layers and heads this rank holds.
        minimum: over all ranks.

    Raises:
        CapacityError: not even one request of `max_model_len` fits; names the length that does.
    """
    budget = int(free_bytes * engine.gpu_memory_utilization)
    stored = kv_cache_dtype(engine.kv_cache_dtype, dtype)
    sizes = _BlockSizes(model, engine, stored, draft, layout)
    longest = sizes.longest_fitting(budget, model.max_position_embeddings)
    max_model_len = engine.max_model_len or minimum([longest])[0]
    if max_model_len > model.max_position_embeddings:
        raise CapacityError(
            f"max_model_len: {max_model_len} exceeds the {model.max_position_embeddings} positions "
            "the model was made for (max_position_embeddings)."
        )
    if longest < 1 or max_model_len > longest:
        raise CapacityError(
            f"max_model_len: one request of {max_model_len} tokens needs "
            f"{sizes.request_bytes(max_model_len) / 2**20:,.0f} MiB of KV cache, but "
            f"{budget / 2**20:,.0f} MiB may be used. The longest that fits is {max(longest, 0)}: "
            "lower max_model_len, or raise gpu_memory_utilization."
        )
    full, sliding = sizes.blocks_of(max_model_len)
    # Only one request at a time reads a whole chunk; the others hold a window.
    others = engine.max_num_seqs - 1
    window_blocks = min(sliding, -(-(sizes.window + sizes.ahead) // sizes.block) + 1)
    # And a block to spare for each, without which the scheduler admits no newcomer.
    more_full, more_sliding = (full + 1) * others, (window_blocks + 1) * others
    # One request always fits; the others take an equal share of both pools in what is left.
    left = budget - sizes.request_bytes(max_model_len)
    share = min(1.0, left / max(1, sizes.bytes_of(more_full, more_sliding)))
    num_full, num_sliding = minimum(
        [full + int(more_full * share), sliding + int(more_sliding * share)]
    )
    # All ranks agree on this too, whatever kinds of layers their own share has.
    kinds = {layer.attention for layer in model.layers}
    has_full = "full_attention" in kinds or draft.full_bytes > 0
    has_sliding = "sliding_attention" in kinds or draft.sliding_bytes > 0
    spec = KVCacheSpec(
        block_size=engine.block_size,
        num_full_blocks=num_full if has_full else 0,
        num_sliding_blocks=num_sliding if has_sliding else 0,
        dtype=stored,
    )
    num_bytes = sizes.bytes_of(spec.num_full_blocks, spec.num_sliding_blocks)
    return CachePlan(spec, max_model_len, num_bytes)


class _BlockSizes:
    """Blocks and bytes that a request of a given length takes."""

    def __init__(
        self,
        model: DecoderConfig,
        engine: EngineConfig,
        dtype: torch.dtype,
        draft: DraftRoom,
        layout: Layout,
    ) -> None:
        self.block, self.window = engine.block_size, model.sliding_window
        self.ahead = draft.num_tokens
        self.chunk = engine.max_num_batched_tokens
        full = bytes_per_block(model, "full_attention", self.block, dtype, layout)
        sliding = bytes_per_block(model, "sliding_attention", self.block, dtype, layout)
        self.full_bytes = full + draft.full_bytes
        self.sliding_bytes = sliding + draft.sliding_bytes

    def blocks_of(self, length: int) -> tuple[int, int]:
        """(full, sliding) blocks that one request of `length` tokens holds at most."""
        full = -(-length // self.block)
        # A step's chunk and the window before it, which may begin in the middle of a block.
        sliding = min(full, -(-(self.window + self.chunk) // self.block) + 1)
        return full, sliding

    def bytes_of(self, full: int, sliding: int) -> int:
        return full * self.full_bytes + sliding * self.sliding_bytes

    def request_bytes(self, length: int) -> int:
        return self.bytes_of(*self.blocks_of(length))

    def longest_fitting(self, budget: int, limit: int) -> int:
        """The largest length up to `limit` whose blocks fit into `budget` bytes; 0 if none."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.request_bytes(middle) <= budget:
                low = middle
            else:
                high = middle - 1
        return low

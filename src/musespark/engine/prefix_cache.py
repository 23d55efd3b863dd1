"""Finding the longest beginning of a prompt whose keys and values are still in the cache.

A block's key names its tokens and everything before them, as a hash chain, so equal keys mean equal
content. To go on after n cached tokens, full layers need all blocks before n, but sliding layers
only those that the window of the next token reaches.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from musespark.engine.block_pool import BlockPool


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """Blocks to share, and how many tokens they stand for."""

    num_blocks: int
    """Blocks of tokens that need not be computed."""
    full_blocks: list[int]
    """All of them, or none where the model has no full layers."""
    sliding_blocks: list[int]
    """Those from number `first_sliding_block` on."""
    first_sliding_block: int


def extend_block_keys(
    keys: list[bytes], token_ids: Sequence[int], block_size: int, group: int = 1
) -> None:
    """Append to `keys`, those of the blocks so far, the keys of the further blocks that
    `token_ids` fill, which follow right after.

    With `group`, blocks come in groups of so many that were computed together, and each one's key
    names all tokens of its group; only whole groups get keys.
    """
    data = array("q", token_ids).tobytes()
    num_bytes = group * block_size * 8
    previous = keys[-1] if keys else b""
    for start in range(0, len(data) - num_bytes + 1, num_bytes):
        # Not Python's hash: two prompts that collide would share an answer.
        previous = _digest(previous, data[start : start + num_bytes])
        keys += [_digest(previous, place.to_bytes(4)) for place in range(group - 1)]
        keys.append(previous)


def _digest(*parts: bytes) -> bytes:
    digest = blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.digest()


def first_visible_block(num_tokens: int, window: int, block_size: int) -> int:
    """The first block that the token after `num_tokens` others sees through a window."""
    return max(0, num_tokens - window + 1) // block_size


class PrefixCache:
    """Looks prefixes up in the two pools, either of which may be empty (no such layers)."""

    def __init__(
        self, full_pool: BlockPool, sliding_pool: BlockPool, block_size: int, window: int
    ) -> None:
        self._full_pool, self._sliding_pool = full_pool, sliding_pool
        self._block_size, self._window = block_size, window

    def find(self, keys: Sequence[bytes]) -> CachedPrefix:
        """The longest cached beginning of the blocks `keys`; its blocks are not held yet."""
        full_blocks = self._leading_full_blocks(keys)
        limit = len(full_blocks) if self._full_pool.num_blocks else len(keys)
        num_blocks, first, sliding_blocks = limit, 0, list[int]()
        if self._sliding_pool.num_blocks:
            num_blocks, first, sliding_blocks = self._last_window(keys[:limit])
        return CachedPrefix(num_blocks, full_blocks[:num_blocks], sliding_blocks, first)

    def _leading_full_blocks(self, keys: Sequence[bytes]) -> list[int]:
        blocks = []
        for key in keys:
            if (block := self._full_pool.find(key)) is None:
                break
            blocks.append(block)
        return blocks

    def _last_window(self, keys: Sequence[bytes]) -> tuple[int, int, list[int]]:
        """(number of blocks, first block seen, blocks from there) for the longest prefix whose
        last window is there. Goes back from the end, past one missing block at a time."""
        end = len(keys)
        while end > 0:
            first = first_visible_block(end * self._block_size, self._window, self._block_size)
            blocks: list[int] = []
            for number in range(end - 1, first - 1, -1):
                if (block := self._sliding_pool.find(keys[number])) is None:
                    end = number
                    break
                blocks.append(block)
            else:
                return end, first, blocks[::-1]
        return 0, 0, []

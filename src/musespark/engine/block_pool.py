"""Which blocks of one paged cache are free, shared, or worth keeping.

A block that nobody holds any more keeps its content until it is needed: as long as its key is
known, whoever asks for the same content gets it back. Blocks without a key are handed out first,
then the one that was let go longest ago.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable


class BlockPool:
    """Hands out block ids, counts who holds them, and takes them back."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # Low ids first, so that little memory is touched while little is used.
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._remembered: OrderedDict[int, None] = OrderedDict()  # free, oldest first
        self._num_holders = [0] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, remembered ones included."""
        return len(self._blank) + len(self._remembered)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.num_free

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks of any content; there must be that many."""
        assert count <= self.num_free
        blocks = [self._blank.pop() if self._blank else self._evict() for _ in range(count)]
        for block in blocks:
            self._num_holders[block] = 1
        return blocks

    def find(self, key: bytes) -> int | None:
        """The block with the content named `key`; it may be free, so `share` it before use."""
        return self._block_of.get(key)

    def share(self, blocks: Iterable[int]) -> None:
        """Hold blocks that `find` found, beside whoever else does."""
        for block in blocks:
            if self._num_holders[block] == 0:
                del self._remembered[block]
            self._num_holders[block] += 1

    def remember(self, block: int, key: bytes) -> None:
        """Name the content of a held block. A second block of the same content stays nameless."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def release(self, blocks: Iterable[int]) -> None:
        """Let go of blocks. Those let go first are reused first."""
        for block in blocks:
            self._num_holders[block] -= 1
            if self._num_holders[block] > 0:
                continue
            if block in self._key_of:
                self._remembered[block] = None
            else:
                self._blank.append(block)

    def forget_all(self) -> None:
        """Drop the content of all free blocks."""
        while self._remembered:
            self._blank.append(self._evict())

    def check_integrity(self, held: Iterable[int]) -> None:
        """Assert that free blocks and the ones `held` by requests are all blocks, and that each
        held block is counted as often as it is held."""
        holders = Counter(held)
        together = sorted([*self._blank, *self._remembered, *holders])
        assert together == list(range(self.num_blocks)), "block pool lost or doubled a block"
        counted = {block: count for block, count in enumerate(self._num_holders) if count}
        assert counted == dict(holders), "block pool miscounted the holders of a block"
        assert self._block_of == {key: block for block, key in self._key_of.items()}
        assert not set(self._blank) & self._key_of.keys(), "a blank block has a key"

    def _evict(self) -> int:
        """The free block that was let go longest ago, its content forgotten."""
        block, _ = self._remembered.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        return block

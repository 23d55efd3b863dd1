"""Which blocks of a paged cache are free."""

from collections.abc import Iterable


class BlockPool:
    """Hands out block ids and takes them back."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # Low ids first, so that little memory is touched while little is used.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks; there must be that many."""
        assert count <= len(self._free)
        return [self._free.pop() for _ in range(count)]

    def release(self, blocks: Iterable[int]) -> None:
        """Give blocks back."""
        self._free.extend(blocks)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Assert that free blocks and the ones `held` by requests are all blocks, each once."""
        together = sorted([*self._free, *held])
        assert together == list(range(self.num_blocks)), "block pool lost or doubled a block"

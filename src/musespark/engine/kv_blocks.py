"""Which blocks of the two paged caches each request holds.

Full layers keep every block of a request; sliding layers give blocks back as soon as the window
has passed them. Both group tokens into blocks alike, so a request always has the same block numbers
at its end in both.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from musespark.engine.block_pool import BlockPool
from musespark.engine.prefix_cache import PrefixCache, extend_block_keys, first_visible_block
from musespark.engine.request import Request


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """What the scheduler must know of the two paged caches."""

    block_size: int
    num_full_blocks: int
    """0 where the model has no full layers."""
    num_sliding_blocks: int
    """0 where the model has no sliding layers."""
    sliding_window: int


class KVBlocks:
    """Gives blocks to requests and takes them back."""

    def __init__(
        self, layout: CacheLayout, *, prefix_caching: bool, fixed_chunk: int | None = None
    ) -> None:
        """With `fixed_chunk`, a multiple of the block size, only whole chunks of a prompt that
        begin at its multiples are cached, because only they are the same bits for everybody."""
        self.layout, self._fixed_chunk = layout, fixed_chunk
        self._blocks_per_chunk = (fixed_chunk or layout.block_size) // layout.block_size
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.full_pool = BlockPool(layout.num_full_blocks)
        self.sliding_pool = BlockPool(layout.num_sliding_blocks)
        self._prefixes = (
            PrefixCache(self.full_pool, self.sliding_pool, layout.block_size, layout.sliding_window)
            if prefix_caching
            else None
        )

    @property
    def usage(self) -> float:
        """Share of the fuller pool that requests hold."""
        return max(
            pool.num_used / max(1, pool.num_blocks) for pool in (self.full_pool, self.sliding_pool)
        )

    def take_cached_prefix(self, request: Request) -> None:
        """Start a request, which holds nothing yet, behind what is in the cache of it.

        At least its last token is left to compute: somebody has to predict the next one.
        """
        size = self.layout.block_size
        if self._prefixes is None or request.params.prompt_logprobs is not None:
            return  # log-probabilities need every position computed
        num_tokens = self._num_cacheable(request)
        self._extend_keys(request, num_tokens)
        num_blocks = min(num_tokens, request.num_tokens - 1) // size
        prefix = self._prefixes.find(request.block_keys[:num_blocks])
        while partial := prefix.num_blocks % self._blocks_per_chunk:
            whole_chunks = prefix.num_blocks - partial
            prefix = self._prefixes.find(request.block_keys[:whole_chunks])
        self.full_pool.share(prefix.full_blocks)
        self.sliding_pool.share(prefix.sliding_blocks)
        request.full_blocks = prefix.full_blocks
        request.sliding_blocks = prefix.sliding_blocks
        request.first_sliding_block = prefix.first_sliding_block
        request.num_blocks = request.num_named_blocks = prefix.num_blocks
        request.num_computed_tokens = prefix.num_blocks * size

    def count_lookup(self, request: Request) -> None:
        """Remember, for the statistics, what a request's first admission found."""
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed_tokens
            self.num_queried_tokens += len(request.prompt_token_ids)
            self.num_hit_tokens += request.num_computed_tokens

    def allocate(self, request: Request, count: int, *, spare: int = 0) -> bool:
        """Blocks for the next `count` tokens of a request, all or none, leaving `spare` free."""
        num_blocks = -(-(request.num_computed_tokens + count) // self.layout.block_size)
        new = num_blocks - request.num_blocks
        if new <= 0:
            return True
        full = new if self.full_pool.num_blocks else 0
        sliding = new if self.sliding_pool.num_blocks else 0
        if full and full + spare > self.full_pool.num_free:
            return False
        if sliding and sliding + spare > self.sliding_pool.num_free:
            return False
        request.full_blocks += self.full_pool.allocate(full)
        request.sliding_blocks += self.sliding_pool.allocate(sliding)
        request.num_blocks = num_blocks
        return True

    def trim(self, request: Request, count: int) -> None:
        """Take back blocks beyond those of a request's next `count` tokens."""
        kept = -(-(request.num_computed_tokens + count) // self.layout.block_size)
        surplus = request.num_blocks - kept
        if surplus <= 0:
            return
        # New lists, so that whoever mirrors a request's blocks sees that they have changed.
        if self.full_pool.num_blocks:
            self.full_pool.release(request.full_blocks[-surplus:])
            request.full_blocks = request.full_blocks[:-surplus]
        if self.sliding_pool.num_blocks:
            self.sliding_pool.release(request.sliding_blocks[-surplus:])
            request.sliding_blocks = request.sliding_blocks[:-surplus]
        request.num_blocks = kept

    def commit(self, request: Request) -> None:
        """After a step: name blocks that are full now and wait for nothing, let go of those behind
        the window."""
        computed, layout = request.num_computed_tokens, self.layout
        num_ready = (computed - request.num_waiting_tokens) // layout.block_size
        if num_ready > request.num_named_blocks:
            self._name_blocks(request, num_ready)
        first_visible = computed - layout.sliding_window + 1
        if first_visible >= (request.first_sliding_block + 1) * layout.block_size:
            self._release_behind_window(request)

    def release(self, request: Request) -> None:
        """Take back everything; the end of a prefix is forgotten before its beginning."""
        self.full_pool.release(reversed(request.full_blocks))
        self.sliding_pool.release(reversed(request.sliding_blocks))
        request.full_blocks, request.sliding_blocks = [], []
        request.first_sliding_block = request.num_blocks = request.num_named_blocks = 0
        request.num_computed_tokens = request.num_waiting_tokens = 0

    def forget_prefixes(self) -> None:
        """Drop all cached content that no request holds."""
        self.full_pool.forget_all()
        self.sliding_pool.forget_all()

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Assert that no block is lost, and that each is held as often as it is counted."""
        requests = list(requests)
        self.full_pool.check_integrity(b for r in requests for b in r.full_blocks)
        self.sliding_pool.check_integrity(b for r in requests for b in r.sliding_blocks)

    def _name_blocks(self, request: Request, stop: int) -> None:
        """Tell the prefix cache what is in the blocks before number `stop`."""
        size = self.layout.block_size
        start = request.num_named_blocks
        request.num_named_blocks = stop
        if self._prefixes is None:
            return
        stop = min(stop, self._num_cacheable(request) // size)
        self._extend_keys(request, stop * size)
        for number in range(start, stop):
            key = request.block_keys[number]
            if request.full_blocks:
                self.full_pool.remember(request.full_blocks[number], key)
            place = number - request.first_sliding_block
            if 0 <= place < len(request.sliding_blocks):
                self.sliding_pool.remember(request.sliding_blocks[place], key)

    def _num_cacheable(self, request: Request) -> int:
        """Tokens from the first on whose keys and values do not depend on who computed them."""
        if self._fixed_chunk is None:
            return request.num_tokens
        return len(request.prompt_token_ids) // self._fixed_chunk * self._fixed_chunk

    def _extend_keys(self, request: Request, num_tokens: int) -> None:
        """Make the keys of all blocks that the first `num_tokens` tokens fill."""
        known = len(request.block_keys) * self.layout.block_size
        if known < num_tokens:
            extend_block_keys(
                request.block_keys,
                request.token_ids(known, num_tokens),
                self.layout.block_size,
                self._blocks_per_chunk,
            )

    def _release_behind_window(self, request: Request) -> None:
        first = first_visible_block(
            request.num_computed_tokens, self.layout.sliding_window, self.layout.block_size
        )
        passed = min(first - request.first_sliding_block, len(request.sliding_blocks))
        self.sliding_pool.release(request.sliding_blocks[:passed])
        del request.sliding_blocks[:passed]
        request.first_sliding_block += passed

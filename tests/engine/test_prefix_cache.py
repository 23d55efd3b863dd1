"""Block keys, the search for cached prefixes, and what happens to blocks that nobody holds."""

import random

import pytest

from musespark.config.sampling import SamplingParams
from musespark.engine.block_pool import BlockPool
from musespark.engine.kv_blocks import CacheLayout, KVBlocks
from musespark.engine.prefix_cache import PrefixCache, extend_block_keys, first_visible_block
from musespark.engine.request import Request

SIZE, WINDOW = 4, 8


def keys_of(token_ids):
    keys: list[bytes] = []
    extend_block_keys(keys, token_ids, SIZE)
    return keys


def request_of(token_ids, **params):
    return Request(
        request_id=0,
        prompt_token_ids=tuple(token_ids),
        params=SamplingParams(**params),
        end_token_ids=frozenset(),
        max_total_tokens=1000,
    )


def compute(blocks: KVBlocks, request: Request, count: int) -> None:
    assert blocks.allocate(request, count)
    request.num_computed_tokens += count
    blocks.commit(request)


def fill(blocks: KVBlocks, token_ids, chunk: int = 3) -> None:
    """Compute a prompt and let it go."""
    request = request_of(token_ids)
    blocks.take_cached_prefix(request)
    while request.num_uncomputed_tokens:
        compute(blocks, request, min(chunk, request.num_uncomputed_tokens))
    blocks.release(request)


def test_keys_name_the_tokens_and_everything_before_them():
    first, second = keys_of([1, 2, 3, 4, 5, 6, 7, 8])
    assert keys_of([1, 2, 3, 4, 5, 6, 7, 8, 9]) == [first, second]
    assert keys_of([1, 2, 3, 4, 5, 6, 7, 0])[0] == first
    assert keys_of([1, 2, 3, 4, 5, 6, 7, 0])[1] != second
    assert keys_of([0, 2, 3, 4, 5, 6, 7, 8])[1] != second
    assert keys_of([5, 6, 7, 8])[0] != second
    assert keys_of([1, 2, 3]) == []


def test_keys_do_not_depend_on_how_they_are_extended():
    tokens = list(range(40))
    whole = keys_of(tokens)
    for cut in range(0, 40, SIZE):
        keys = keys_of(tokens[:cut])
        extend_block_keys(keys, tokens[cut:], SIZE)
        assert keys == whole


def test_keys_of_a_group_name_the_whole_group():
    keys: list[bytes] = []
    extend_block_keys(keys, range(20), SIZE, 2)
    assert len(set(keys)) == 4  # the fifth block is only half of a group
    others: list[bytes] = []
    extend_block_keys(others, [*range(12), 99, 99, 99, 99], SIZE, 2)
    assert others[:2] == keys[:2]
    assert not set(others[2:]) & set(keys)
    again = others[:2]
    extend_block_keys(again, range(8, 16), SIZE, 2)
    assert again == keys


@pytest.mark.parametrize(
    ("num_tokens", "first"), [(0, 0), (7, 0), (8, 0), (11, 1), (12, 1), (15, 2), (16, 2)]
)
def test_first_visible_block(num_tokens, first):
    # The next token is at position num_tokens, and sees WINDOW positions, its own included.
    assert first_visible_block(num_tokens, WINDOW, SIZE) == first


def brute_force(full: BlockPool, sliding: BlockPool, keys):
    for end in range(len(keys), 0, -1):
        first = first_visible_block(end * SIZE, WINDOW, SIZE)
        if full.num_blocks and any(full.find(key) is None for key in keys[:end]):
            continue
        if sliding.num_blocks and any(sliding.find(key) is None for key in keys[first:end]):
            continue
        return end
    return 0


@pytest.mark.parametrize("groups", [(64, 64), (64, 0), (0, 64)])
def test_the_longest_prefix_is_found_whatever_is_missing(groups):
    rng = random.Random(1)
    for _ in range(300):
        full, sliding = BlockPool(groups[0]), BlockPool(groups[1])
        keys = keys_of(range(SIZE * rng.randrange(1, 13)))
        for pool, chance in ((full, 0.97), (sliding, 0.8)):
            for key in keys:
                if pool.num_blocks and rng.random() < chance:
                    (block,) = pool.allocate(1)
                    pool.remember(block, key)
        found = PrefixCache(full, sliding, SIZE, WINDOW).find(keys)
        assert found.num_blocks == brute_force(full, sliding, keys)
        if groups[0]:
            expected = [full.find(key) for key in keys[: found.num_blocks]]
            assert found.full_blocks == expected
        if groups[1] and found.num_blocks:
            first = first_visible_block(found.num_blocks * SIZE, WINDOW, SIZE)
            assert found.first_sliding_block == first
            window = keys[first : found.num_blocks]
            assert found.sliding_blocks == [sliding.find(key) for key in window]


def new_blocks(num_full: int = 32, num_sliding: int = 32, caching: bool = True) -> KVBlocks:
    return KVBlocks(CacheLayout(SIZE, num_full, num_sliding, WINDOW), prefix_caching=caching)


def test_a_prompt_is_found_again_up_to_its_last_token():
    blocks = new_blocks()
    fill(blocks, range(16))
    again = request_of(range(16))
    blocks.take_cached_prefix(again)
    assert again.num_computed_tokens == 12  # the last token must be computed, so its block too
    assert len(again.full_blocks) == 3
    assert again.first_sliding_block == 1  # position 12 sees 5 to 12
    assert len(again.sliding_blocks) == 2
    longer = request_of(range(17))
    blocks.take_cached_prefix(longer)
    assert longer.num_computed_tokens == 16
    blocks.check_integrity([again, longer])
    assert blocks.full_pool.num_used == 4  # shared
    blocks.release(again)
    blocks.release(longer)
    blocks.check_integrity([])
    assert blocks.usage == 0


def test_only_the_window_needs_to_be_there_on_sliding_layers():
    blocks = new_blocks(num_full=32, num_sliding=4)
    fill(blocks, range(40))
    again = request_of(range(41))
    blocks.take_cached_prefix(again)
    assert again.num_computed_tokens == 40
    assert len(again.full_blocks) == 10
    assert len(again.sliding_blocks) == 2
    # A shorter prefix has lost its window: its sliding blocks were reused for later ones.
    shorter = request_of([*range(20), 99])
    blocks.take_cached_prefix(shorter)
    assert shorter.num_computed_tokens == 0


def test_what_was_let_go_longest_ago_is_evicted_first():
    blocks = new_blocks(num_full=8, num_sliding=0)
    fill(blocks, range(100, 112))
    fill(blocks, range(200, 212))  # six blocks are remembered, two are blank
    fill(blocks, range(300, 316))  # needs two more: the end of the oldest prompt
    for start, cached in ((100, 4), (200, 12), (300, 16)):
        request = request_of([*range(start, start + cached), 0])
        blocks.take_cached_prefix(request)
        assert request.num_computed_tokens == cached, start
        blocks.release(request)


def test_held_blocks_are_never_evicted():
    blocks = new_blocks(num_full=4, num_sliding=4)
    holder = request_of(range(8))
    compute(blocks, holder, 8)
    fill(blocks, range(50, 58))
    fill(blocks, range(60, 68))
    blocks.check_integrity([holder])
    again = request_of(range(9))
    blocks.take_cached_prefix(again)
    assert again.full_blocks == holder.full_blocks


def test_two_that_compute_the_same_block_at_once_keep_their_own():
    blocks = new_blocks()
    one, other = request_of(range(9)), request_of(range(9))
    compute(blocks, one, 9)
    compute(blocks, other, 9)
    assert not set(one.full_blocks) & set(other.full_blocks)
    blocks.check_integrity([one, other])
    blocks.release(other)
    blocks.release(one)
    blocks.check_integrity([])


def test_prefixes_can_be_forgotten_and_caching_switched_off():
    blocks = new_blocks()
    fill(blocks, range(16))
    blocks.forget_prefixes()
    again = request_of(range(16))
    blocks.take_cached_prefix(again)
    assert again.num_computed_tokens == 0
    off = new_blocks(caching=False)
    fill(off, range(16))
    off.take_cached_prefix(again)
    assert again.num_computed_tokens == 0


def test_prompt_logprobs_need_every_position_computed():
    blocks = new_blocks()
    fill(blocks, range(16))
    request = request_of(range(16), prompt_logprobs=0)
    blocks.take_cached_prefix(request)
    assert request.num_computed_tokens == 0

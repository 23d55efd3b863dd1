"""The paged cache changes nothing: cached equals uncached, together equals alone."""

import dataclasses

import pytest
import torch
from tests.engine.harness import (
    GREEDY,
    cached_logits,
    engine_for,
    finish,
    generate,
    layout_for,
    runner_for,
)

from musespark import load_decoder
from musespark.testing import make_checkpoint

PROMPT_LENS = [1, 33, 7, 18, 2]


def random_tokens(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(128, (count,), generator=generator).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Full and sliding, sparse and dense layers."""
    return make_checkpoint(
        tmp_path_factory.mktemp("cache") / "model",
        dtype=torch.float32,
        mlp_layer_types=["sparse", "sparse", "dense", "sparse", "sparse", "dense"],
    )


@pytest.mark.parametrize("block_size", [1, 3, 8, 16])
@pytest.mark.parametrize("chunk", [1, 2, 7, 64])
def test_cached_equals_uncached_in_float64(folder, block_size, chunk):
    """Every position's logits, to the last digits, with garbage in all other slots."""
    decoder = load_decoder(folder, dtype="float64")
    tokens, cached = cached_logits(
        decoder,
        random_tokens(21) + [0] * 9,
        prompt_len=21,
        block_size=block_size,
        chunk=chunk,
        stale=1000.0,
    )
    uncached = decoder.compute_logits(tokens[:-1])
    assert cached.dtype == torch.float64
    assert (cached - uncached).abs().max() < 1e-11


@pytest.mark.parametrize("chunk", [5, 8, 64])
@pytest.mark.parametrize("num_blocks", [14, 256])
def test_sequences_of_different_lengths_together_equal_each_alone(folder, chunk, num_blocks):
    """Some decode while others are read in chunks; with few blocks, some are preempted too."""
    decoder = load_decoder(folder, dtype="float32")
    prompts = [random_tokens(length, seed=length) for length in PROMPT_LENS]
    params = dataclasses.replace(GREEDY, max_tokens=20)
    alone = [generate(decoder, [prompt], params)[0] for prompt in prompts]
    together = generate(
        decoder,
        prompts,
        params,
        num_blocks=num_blocks,
        max_num_seqs=5,
        max_num_batched_tokens=chunk,
        stale=100.0,
    )
    assert together == alone


def test_a_shared_prefix_out_of_the_cache_changes_nothing(folder):
    decoder = load_decoder(folder, dtype="float32")
    prefix = random_tokens(26)
    prompts = [prefix + random_tokens(n, seed=n) for n in (3, 1, 9)] + [prefix[:13], prefix]
    params = dataclasses.replace(GREEDY, max_tokens=12)
    alone = [generate(decoder, [prompt], params)[0] for prompt in prompts]
    layout = layout_for(decoder, 4, 128)
    engine = engine_for(runner_for(decoder, layout), layout, vocab_size=128)
    cached = []
    for prompt, expected in zip(prompts, alone, strict=True):
        request_id = engine.add_request(prompt, params)
        assert finish(engine)[request_id].token_ids == expected
        cached.append(engine.stats().prefix_cache_hits)
    # Block by block, the later ones found what the first had left.
    assert cached[1] - cached[0] == 24


def test_bfloat16_generates_through_the_cache_what_it_computes_without(folder):
    """Greedy tokens of packed weights, wherever bfloat16 itself is sure of them."""
    decoder = load_decoder(folder, dtype="bfloat16")
    decoder.pack()
    prompt = random_tokens(20)
    tokens, cached = cached_logits(decoder, prompt + [0] * 20, prompt_len=20, chunk=64)
    uncached = decoder.compute_logits(tokens[:-1])
    assert cached.dtype == torch.float32
    # Products of one row and of many may be summed in another order, which flips experts; half of
    # the positions stay far below one step of bfloat16 logits nonetheless.
    assert (cached - uncached).abs().amax(dim=1).median() < 0.5

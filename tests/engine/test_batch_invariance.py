"""In batch-invariant mode a request's tokens and log-probabilities are the same in any company.

Beside any others, through preemption, and behind any prefix that happens to be cached.
"""

import dataclasses
import random

import pytest
from tests.engine.harness import GREEDY, layout_for

from musespark.config.engine import EngineConfig
from musespark.engine.engine import Engine, EngineLimits
from musespark.engine.executor import InProcessExecutor
from musespark.engine.runner import OneByOneRunner
from musespark.errors import ConfigError
from musespark.llm.loading import load_decoder
from musespark.model.kv_cache import KVCacheSpec
from musespark.testing import make_checkpoint, tiny_config

VOCAB = 128
CHUNK = 8


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def decoder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, tiny_config(vocab_size=VOCAB), seed=4)
    decoder = load_decoder(folder, dtype=request.param)
    decoder.pack()
    return decoder


def new_engine(decoder, num_blocks: int) -> Engine:
    layout = layout_for(decoder, 4, num_blocks)
    spec = KVCacheSpec(layout.block_size, layout.num_full_blocks, layout.num_sliding_blocks)
    limits = EngineLimits(
        vocab_size=VOCAB,
        max_model_len=512,
        max_num_seqs=6,
        max_num_batched_tokens=14,
        eos_token_ids=frozenset(),
        fixed_chunk=CHUNK,
    )
    executor = InProcessExecutor(OneByOneRunner(decoder, spec), layout, limits.max_num_seqs)
    return Engine(executor, layout, limits)


def run(engine, requests):
    """What each request's outputs were, log-probabilities included."""
    numbers = [engine.add_request(prompt, params) for prompt, params in requests]
    found: dict[tuple[int, int], list[object]] = {}
    while engine.has_work:
        for token in engine.step():
            entry = (token.token_id, token.logprobs, token.prompt_logprobs)
            found.setdefault((token.request_id, token.output_index), []).append(entry)
        engine.scheduler.check_integrity()
    pairs = zip(numbers, requests, strict=True)
    return [[found[number, index] for index in range(p.n)] for number, (_, p) in pairs]


def make_requests():
    rng = random.Random(5)
    common = [rng.randrange(VOCAB) for _ in range(40)]
    requests = []
    for number in range(11):
        prompt = common[: rng.randrange(41)] if number % 2 else []
        prompt = [*prompt, *(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30)))]
        params = dataclasses.replace(GREEDY, max_tokens=rng.randrange(1, 20), logprobs=3)
        if number % 3 == 0:
            params = dataclasses.replace(params, temperature=0.9, top_p=0.8, seed=number)
        if number % 5 == 0:
            params = dataclasses.replace(params, n=2, prompt_logprobs=1)
        requests.append((prompt, params))
    return requests


@pytest.mark.parametrize("num_blocks", [256, 26])
def test_the_same_bits_in_any_company(decoder, num_blocks):
    requests = make_requests()
    alone = [run(new_engine(decoder, 256), [request])[0] for request in requests]
    engine = new_engine(decoder, num_blocks)
    assert run(engine, requests) == alone
    assert engine.stats().preemptions > 0 or num_blocks == 256
    # In another order, and behind what the first round has left in the cache.
    order = random.Random(6).sample(range(len(requests)), len(requests))
    again = run(engine, [requests[number] for number in order])
    assert again == [alone[number] for number in order]
    if num_blocks == 256:
        assert engine.stats().prefix_cache_hits > 0


def test_prompts_are_read_in_whole_chunks_and_only_those_are_cached(decoder):
    engine = new_engine(decoder, 256)
    prompt = list(range(30))
    for expected in (0, 24, 24):
        number = engine.add_request(prompt, GREEDY)
        mine = [token for token in _drain(engine) if token.request_id == number]
        assert mine[0].num_cached_tokens == expected
        engine.add_request([*prompt[:20], 99, 98, 97], GREEDY)  # 16 of its tokens are chunks
        _drain(engine)


def _drain(engine):
    tokens = []
    while engine.has_work:
        tokens += engine.step()
    return tokens


def test_the_chunk_must_fit_beside_one_token_of_each_request():
    config = EngineConfig(batch_invariant=True, max_num_seqs=64, max_num_batched_tokens=200)
    assert config.fixed_chunk == 128
    with pytest.raises(ConfigError, match="batch_invariant"):
        EngineConfig(batch_invariant=True, max_num_seqs=64, max_num_batched_tokens=79)

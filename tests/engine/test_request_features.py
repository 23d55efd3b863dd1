"""What a request may ask for, through a whole engine around a real decoder."""

import dataclasses
import random

import pytest
import torch
from tests.engine.harness import GREEDY, engine_for, layout_for, runner_for

from musespark.config.sampling import SamplingParams
from musespark.engine.engine import Engine, NewToken
from musespark.engine.request import FinishReason
from musespark.errors import RequestError
from musespark.llm.loading import load_decoder
from musespark.testing import make_checkpoint, tiny_config

VOCAB = 128
SHORT = dataclasses.replace(GREEDY, max_tokens=12)
RANDOM = dataclasses.replace(SHORT, temperature=1.0, seed=7)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, tiny_config(vocab_size=VOCAB), seed=3)
    return load_decoder(folder, dtype="float32")


def new_engine(decoder, num_blocks: int = 256, **limits) -> Engine:
    layout = layout_for(decoder, 4, num_blocks)
    return engine_for(runner_for(decoder, layout), layout, vocab_size=VOCAB, **limits)


def drain(engine: Engine):
    """Step to the end; (request id, output) -> its tokens as reported."""
    found: dict[tuple[int, int], list[NewToken]] = {}
    while engine.has_work:
        for token in engine.step():
            found.setdefault((token.request_id, token.output_index), []).append(token)
        engine.scheduler.check_integrity()
    assert engine.scheduler.blocks.usage == 0
    return found


def run(decoder, prompt, params, **limits):
    """The reported tokens of each output of one request alone."""
    engine = new_engine(decoder, **limits)
    engine.add_request(prompt, params)
    found = drain(engine)
    return [found[0, index] for index in range(params.n)]


def ids(tokens):
    return [token.token_id for token in tokens]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def test_a_cached_answer_equals_the_uncached_one(decoder):
    """Also across the window, with other prompts in between and blocks running short."""
    prompts = [prompt_of(length, seed=length) for length in (5, 17, 30, 61)]
    prompts += [prompts[2][:20] + prompt_of(9, seed=99), prompts[3] + [1, 2, 3]]
    uncached = [ids(run(decoder, prompt, SHORT)[0]) for prompt in prompts]
    for num_blocks in (256, 40, 24):
        engine = new_engine(decoder, num_blocks=num_blocks)
        for _ in range(3):
            numbers = [engine.add_request(prompt, SHORT) for prompt in prompts]
            found = drain(engine)
            assert [ids(found[number, 0]) for number in numbers] == uncached
        stats = engine.stats()
        assert stats.prefix_cache_queries == 3 * sum(map(len, prompts))
        if num_blocks == 256:
            assert stats.prefix_cache_hits >= 2 * sum((len(p) - 1) // 4 * 4 for p in prompts)


def test_a_conversation_goes_on_where_it_was(decoder):
    engine = new_engine(decoder)
    history = prompt_of(21)
    for turn in range(4):
        number = engine.add_request(history, SHORT)
        tokens = drain(engine)[number, 0]
        fresh = run(decoder, history, SHORT)[0]
        assert ids(tokens) == ids(fresh)
        # The last token of an answer was never run, so the block that it ends is not cached.
        before = len(history) - 5 - 12 if turn else 0
        assert tokens[0].num_cached_tokens >= (before + 11) // 4 * 4 * bool(turn)
        history = [*history, *ids(tokens), *prompt_of(5, seed=turn)]


def test_outputs_share_the_prompt_and_differ_by_their_random_numbers(decoder):
    prompt = prompt_of(41)
    params = dataclasses.replace(RANDOM, n=5)
    outputs = run(decoder, prompt, params)
    assert len({tuple(ids(tokens)) for tokens in outputs}) == 5
    assert [tokens[0].num_cached_tokens for tokens in outputs] == [0, 40, 40, 40, 40]
    # Output 0 is what the request would be alone; the others are as reproducible.
    assert ids(run(decoder, prompt, RANDOM)[0]) == ids(outputs[0])
    again = run(decoder, prompt, params, max_num_seqs=2, num_blocks=40)
    assert [ids(tokens) for tokens in again] == [ids(tokens) for tokens in outputs]


@pytest.mark.parametrize("victim", [None, 0, 2])
@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_aborting_any_output_at_any_time_leaves_the_others_alone(decoder, victim, steps):
    prompt = prompt_of(30)
    params = dataclasses.replace(RANDOM, n=3)
    expected = [ids(tokens) for tokens in run(decoder, prompt, params)]
    engine = new_engine(decoder, max_num_batched_tokens=16, max_num_seqs=2)
    number = engine.add_request(prompt, params)
    early = [token for _ in range(steps) for token in engine.step()]
    assert engine.abort(number, index=victim) == ([0, 1, 2] if victim is None else [victim])
    engine.scheduler.check_integrity()
    found = drain(engine)
    for index in range(3):
        tokens = [token for token in early if token.output_index == index]
        tokens += found.get((number, index), [])
        if victim in (None, index):
            assert (number, index) not in found
            assert ids(tokens) == expected[index][: len(tokens)]
        else:
            assert ids(tokens) == expected[index]
    assert engine.stats().finished == (
        {"abort": 3} if victim is None else {"abort": 1, "length": 2}
    )


def test_seeded_tokens_do_not_depend_on_company_or_preemption(decoder):
    prompts = [prompt_of(20, seed) for seed in range(8)]
    params = [dataclasses.replace(RANDOM, seed=seed, temperature=0.9) for seed in range(8)]
    alone = [ids(run(decoder, p, s)[0]) for p, s in zip(prompts, params, strict=True)]
    engine = new_engine(decoder, num_blocks=24)
    pairs = zip(prompts, params, strict=True)
    numbers = [engine.add_request(prompt, setting) for prompt, setting in pairs]
    found = drain(engine)
    assert engine.stats().preemptions > 0
    assert [ids(found[number, 0]) for number in numbers] == alone


def test_without_a_seed_no_two_runs_are_alike(decoder):
    params = dataclasses.replace(RANDOM, seed=None, temperature=2.0)
    assert ids(run(decoder, [1, 2], params)[0]) != ids(run(decoder, [1, 2], params)[0])


def reference_tokens(decoder, prompt, count, choose):
    """Token by token without a cache; `choose(logits, output)` picks."""
    output: list[int] = []
    for _ in range(count):
        logits = decoder.compute_logits([*prompt, *output])[-1]
        output.append(choose(logits.clone(), output))
    return output


def test_penalties_and_bias_change_the_logits_as_documented(decoder):
    prompt = prompt_of(10)
    params = dataclasses.replace(
        SHORT,
        presence_penalty=0.7,
        frequency_penalty=0.3,
        repetition_penalty=1.3,
        logit_bias={5: 1.5, 9: -100},
    )

    def choose(logits, output):
        seen = torch.zeros(VOCAB, dtype=torch.bool)
        seen[[*prompt, *output]] = True
        counts = torch.tensor(output, dtype=torch.int64).bincount(minlength=VOCAB)
        scaled = torch.where(logits > 0, logits / 1.3, logits * 1.3)
        logits = torch.where(seen, scaled, logits)
        logits -= 0.3 * counts + 0.7 * (counts > 0)
        logits[5] += 1.5
        logits[9] -= 100
        return int(logits.argmax())

    expected = reference_tokens(decoder, prompt, 12, choose)
    assert expected != ids(run(decoder, prompt, SHORT)[0])
    assert ids(run(decoder, prompt, params)[0]) == expected
    # Beside others in the batch, and through preemption, where counts are made again.
    engine = new_engine(decoder, num_blocks=20)
    engine.add_request(prompt_of(30, 5), SHORT)
    numbers = [engine.add_request(prompt, params) for _ in range(4)]
    engine.add_request(prompt_of(11, 6), RANDOM)
    found = drain(engine)
    assert engine.stats().preemptions > 0
    assert all(ids(found[number, 0]) == expected for number in numbers)


def test_a_bias_of_100_forces_a_token(decoder):
    params = dataclasses.replace(RANDOM, logit_bias={77: 100})
    assert ids(run(decoder, prompt_of(5), params)[0]) == [77] * 12


def test_end_tokens_wait_for_min_tokens(decoder):
    prompt = prompt_of(6)
    free = ids(run(decoder, prompt, SHORT)[0])
    stops = (free[0], free[3])
    early = run(decoder, prompt, dataclasses.replace(SHORT, stop_token_ids=stops))[0]
    assert ids(early) == free[:1]
    assert early[-1].finish_reason is FinishReason.STOP
    late = run(decoder, prompt, dataclasses.replace(SHORT, stop_token_ids=stops, min_tokens=5))[0]
    assert not set(ids(late)[:5]) & set(stops)


def test_prompt_logprobs_are_those_of_an_uncached_pass(decoder):
    prompt = prompt_of(50)
    params = dataclasses.replace(SHORT, prompt_logprobs=3, n=2)
    expected = decoder.compute_logits(prompt).log_softmax(dim=-1)
    engine = new_engine(decoder, max_num_batched_tokens=16)
    engine.add_request(prompt, SHORT)
    drain(engine)  # the prompt is cached now, but must be computed all the same
    other = engine.add_request(prompt_of(33, 1), SHORT)
    number = engine.add_request(prompt, params)
    found = drain(engine)
    (told,) = {t.prompt_logprobs for t in found[number, 0] if t.prompt_logprobs is not None}
    assert found[number, 0][0].prompt_logprobs is told
    assert all(t.prompt_logprobs is None for t in found[number, 1] + found[other, 0])
    assert ids(found[number, 0]) == ids(run(decoder, prompt, SHORT)[0])
    assert told[0] is None
    for position, entry in enumerate(told[1:], start=1):
        row = expected[position - 1]
        assert entry.logprob == pytest.approx(float(row[prompt[position]]), abs=1e-4)
        assert entry.rank == int((row > row[prompt[position]]).sum()) + 1
        values, tokens = row.topk(3)
        assert [token for token, _ in entry.top] == tokens.tolist()
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_logprobs_are_the_models_own_whatever_is_edited(decoder):
    prompt = prompt_of(9)
    params = dataclasses.replace(SHORT, logprobs=2, logit_bias={3: 100}, temperature=0.7, seed=1)
    tokens = run(decoder, prompt, params)[0]
    assert ids(tokens) == [3] * 12
    row = decoder.compute_logits(prompt)[-1].log_softmax(dim=-1)
    assert tokens[0].logprobs.logprob == pytest.approx(float(row[3]), abs=1e-4)
    assert tokens[0].logprobs.top[0][0] == int(row.argmax())


@pytest.mark.parametrize(
    "params", [{"stop_token_ids": (VOCAB,)}, {"logit_bias": {-1: 1.0}}, {"logit_bias": {VOCAB: 1}}]
)
def test_tokens_outside_the_vocabulary_are_refused(decoder, params):
    with pytest.raises(RequestError, match="outside the model's vocabulary"):
        new_engine(decoder).add_request([1], SamplingParams(**params))

"""A step that begins before the tokens of the one before are known changes nothing but the time.

On a CPU nothing is gained by it, but the same code runs: the model of the second step computes, and
writes its cache, before the first one's tokens are read.
"""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.fake_model import VOCAB_SIZE, FakeModel, greedy
from tests.engine.harness import Finished, engine_for, finish, layout_for, runner_for, step
from tests.engine.layouts import smallest_layout

from musespark.config.sampling import SamplingParams
from musespark.engine.inputs import fill_in
from musespark.engine.kv_blocks import CacheLayout
from musespark.engine.request import FinishReason
from musespark.llm.loading import load_decoder
from musespark.model.batch import ForwardBatch

GREEDY = SamplingParams(temperature=0.0, max_tokens=9)
ROOMY = CacheLayout(block_size=4, num_full_blocks=99, num_sliding_blocks=99, sliding_window=6)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
ANSWER = greedy(PROMPT, 9)


def make_engine(layout=ROOMY, *, runs_ahead=True, **limits):
    model = FakeModel(layout)
    engine = engine_for(model, layout, vocab_size=VOCAB_SIZE, runs_ahead=runs_ahead, **limits)
    return engine, model


def is_ahead(engine):
    """Whether a step runs whose predecessor's tokens have been handed out."""
    return engine._launched is not None


KINDS = [
    GREEDY,
    dataclasses.replace(GREEDY, max_tokens=1),
    dataclasses.replace(GREEDY, max_tokens=None, logprobs=2),
    SamplingParams(temperature=1.0, seed=3, max_tokens=12, n=3),
    SamplingParams(temperature=0.8, seed=4, top_p=0.7, top_k=9, max_tokens=7, logprobs=0),
    SamplingParams(temperature=1.2, seed=5, max_tokens=14, min_tokens=6, logit_bias={2: 3.0}),
    SamplingParams(temperature=0.0, frequency_penalty=0.7, max_tokens=11),
    dataclasses.replace(GREEDY, max_tokens=6, prompt_logprobs=1),
]


@settings(max_examples=150)
@given(
    block_size=st.sampled_from([1, 3, 4]),
    window=st.integers(1, 12),
    budget=st.integers(4, 12),
    kinds=st.sampled_from(["both", "full", "sliding"]),
    spare=st.integers(0, 30),
    requests=st.lists(
        st.tuples(
            st.lists(st.integers(0, 2), min_size=1, max_size=20),
            st.sampled_from(KINDS),
            st.integers(0, 9),
        ),
        min_size=1,
        max_size=7,
    ),
    end=st.sets(st.integers(0, VOCAB_SIZE - 1), max_size=6),
    aborted=st.integers(0, 12),
    patience=st.integers(0, 9),
)
def test_the_same_tokens_as_one_step_at_a_time(
    block_size, window, budget, kinds, spare, requests, end, aborted, patience
):
    """Through preemption, shared prefixes, several outputs, ends of all sorts, and an abort."""
    layout = smallest_layout(block_size, window, budget, longest=36, kinds=kinds, spare=spare)
    found = []
    for runs_ahead in (False, True):
        engine, _ = make_engine(
            layout,
            runs_ahead=runs_ahead,
            max_num_seqs=4,
            max_num_batched_tokens=budget,
            max_model_len=36,
            eos_token_ids=sorted(end),
        )
        tokens: dict[tuple[int, int], list[tuple[object, ...]]] = {}

        def advance(engine=engine, tokens=tokens):
            for token in engine.step():
                tokens.setdefault((token.request_id, token.output_index), []).append(
                    (token.token_id, token.logprobs, token.finish_reason, token.prompt_logprobs)
                )
            engine.scheduler.check_integrity()

        for number, (prompt, params, delay) in enumerate(requests):
            request_id = engine.add_request(prompt, params)
            for _ in range(delay):
                advance()
            if number == aborted:
                for _ in range(patience):
                    advance()
                engine.abort(request_id, index=patience % params.n)
        while engine.has_work:
            advance()
        assert engine.step() == []
        blocks = engine.scheduler.blocks
        assert blocks.full_pool.num_used == blocks.sliding_pool.num_used == 0
        found.append(tokens)
    expected, ahead = found
    if aborted < len(requests):
        gone = aborted, patience % requests[aborted][1].n
        pairs = zip(expected.pop(gone, []), ahead.pop(gone, []), strict=False)
        assert all(one[:2] == other[:2] for one, other in pairs)  # as far as both came
    assert ahead == expected


def test_the_next_step_runs_before_tokens_are_handed_out():
    engine, model = make_engine()
    number = engine.add_request(PROMPT, GREEDY)
    for count, expected in enumerate(ANSWER, start=1):
        (token,) = engine.step()
        assert (token.request_id, token.token_id) == (number, expected)
        # How long an output gets is known, so nothing runs behind its end.
        assert len(model.num_tokens) == min(count + 1, 9)
    assert token.finish_reason is FinishReason.LENGTH
    assert not engine.has_work
    assert sum(model.num_tokens) == len(PROMPT) + 8


def test_behind_an_end_token_one_row_is_run_for_nothing():
    engine, model = make_engine(eos_token_ids=[ANSWER[3]])
    stops = engine.add_request(PROMPT, GREEDY)
    other = engine.add_request([7, 7], dataclasses.replace(GREEDY, ignore_eos=True))
    results = finish(engine)
    count = 1 + ANSWER.index(ANSWER[3])
    assert results[stops].token_ids == ANSWER[:count]
    assert results[stops].finish_reason is FinishReason.STOP
    assert results[other].token_ids == greedy([7, 7], 9)
    # Of each output the last token is not run, but for the end token that nobody knew of.
    assert sum(model.num_tokens) == len(PROMPT) + 2 + (count - 1) + 8 + 1


def test_a_row_for_nothing_leaves_nothing_in_the_prefix_cache():
    """It writes the end token's keys right where a block is full with it."""
    end = ANSWER[3]
    count = 1 + ANSWER.index(end)
    layout = dataclasses.replace(ROOMY, block_size=1)
    cached = []
    for runs_ahead in (False, True):
        engine, _ = make_engine(layout, runs_ahead=runs_ahead, eos_token_ids=[end])
        engine.add_request(PROMPT, GREEDY)
        finish(engine)
        engine.add_request([*PROMPT, *ANSWER[:count], 1], dataclasses.replace(GREEDY, max_tokens=1))
        tokens = [*engine.step(), *engine.step()]
        cached.append(tokens[0].num_cached_tokens)
    assert cached == [len(PROMPT) + count - 1] * 2


def test_the_blocks_of_an_ended_request_are_free_at_once():
    """Somebody else may have them in the next step, which writes them after the row for nothing."""
    layout = CacheLayout(4, 4, 4, 6)
    engine, _ = make_engine(layout, eos_token_ids=[ANSWER[2]], max_model_len=16)
    first = engine.add_request(PROMPT, GREEDY)
    results: dict[int, Finished] = {}
    while results.get(first, Finished()).finish_reason is None:
        step(engine, results)
    assert is_ahead(engine)
    assert engine.scheduler.blocks.full_pool.num_free == 4
    prompt = [5, 5, 5, 5, 5]
    second = engine.add_request(prompt, dataclasses.replace(GREEDY, ignore_eos=True))
    finish(engine, results)
    assert results[second].token_ids == greedy(prompt, 9)


@pytest.mark.parametrize(
    "params",
    [
        dataclasses.replace(GREEDY, presence_penalty=0.5),
        dataclasses.replace(GREEDY, prompt_logprobs=0),
    ],
)
def test_nothing_runs_ahead_of_those_whose_every_token_the_host_needs(params):
    engine, _ = make_engine()
    alone = engine.add_request(PROMPT, GREEDY)
    results: dict[int, Finished] = {}
    step(engine, results)
    assert is_ahead(engine)
    demanding = engine.add_request(PROMPT, params)
    step(engine, results)
    assert not is_ahead(engine)  # to admit it
    for _ in range(3):
        step(engine, results)
        assert not is_ahead(engine)
    engine.abort(demanding)
    step(engine, results)
    assert is_ahead(engine)
    finish(engine, results)
    assert results[alone].token_ids == ANSWER


def test_draining_forgets_what_has_been_launched():
    engine, _ = make_engine()
    engine.add_request(PROMPT, GREEDY)
    engine.step()
    engine.drain()
    assert not engine.has_work
    assert engine.step() == []
    engine.scheduler.check_integrity()


def test_tokens_are_filled_in_where_they_were_not_known():
    batch = ForwardBatch.uncached(torch.tensor([5, -1, 0, -3, -1]))
    filled = fill_in(batch, torch.tensor([70, 71, 72]))
    assert filled.token_ids.tolist() == [5, 70, 0, 72, 70]


def test_spark_mini_says_the_same():
    """In company that comes and goes, through a small pool."""
    decoder = load_decoder("spark-mini", device="cpu", dtype="float32")
    decoder.pack()
    config = decoder.config
    prompts = [
        list(text.encode()) for text in ("What is 12 + 30?" * 2, "Hello", "a", "Sort: 5, 3, 9")
    ]
    mixed = [
        SamplingParams(temperature=0, max_tokens=24, logprobs=2),
        SamplingParams(temperature=0.9, seed=1, top_p=0.9, max_tokens=16, n=2),
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0.7, seed=2, repetition_penalty=1.2, max_tokens=5),
    ]
    layout = layout_for(decoder, 4, 17)
    found, preemptions = [], []
    for runs_ahead in (False, True):
        engine = engine_for(
            runner_for(decoder, layout),
            layout,
            vocab_size=config.vocab_size,
            max_num_seqs=4,
            max_model_len=64,
            eos_token_ids=config.eos_token_ids,
            runs_ahead=runs_ahead,
        )
        tokens: dict[tuple[int, int], list[tuple[int, FinishReason | None]]] = {}
        for prompt, params in zip(prompts, mixed, strict=True):
            engine.add_request(prompt, params)
        while engine.has_work:
            for token in engine.step():
                entry = token.token_id, token.finish_reason
                tokens.setdefault((token.request_id, token.output_index), []).append(entry)
            engine.scheduler.check_integrity()
        found.append(tokens)
        preemptions.append(engine.stats().preemptions)
    assert found[1] == found[0]
    assert min(preemptions) > 0

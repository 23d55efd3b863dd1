"""The engine around a model that is nothing but its cache: who gets which tokens, until when."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.fake_model import VOCAB_SIZE, FakeModel, greedy, next_logits, windowed_greedy
from tests.engine.harness import Finished, engine_for, finish, step
from tests.engine.layouts import smallest_layout

from musespark.config.sampling import SamplingParams
from musespark.engine.kv_blocks import CacheLayout
from musespark.engine.request import FinishReason
from musespark.errors import RequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
ROOMY = CacheLayout(block_size=4, num_full_blocks=99, num_sliding_blocks=99, sliding_window=6)


def make_engine(layout=ROOMY, **limits):
    model = FakeModel(layout)
    return engine_for(model, layout, vocab_size=VOCAB_SIZE, **limits), model


def run_alone(prompt, params, **limits):
    engine, _ = make_engine(**limits)
    request_id = engine.add_request(prompt, params)
    return finish(engine)[request_id]


PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
ANSWER = greedy(PROMPT, 12)


@settings(max_examples=120)
@given(
    block_size=st.sampled_from([1, 3, 4]),
    window=st.integers(1, 12),
    budget=st.integers(3, 12),
    kinds=st.sampled_from(["both", "full", "sliding"]),
    spare=st.integers(0, 20),
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=6),
    delays=st.lists(st.integers(0, 9), min_size=6, max_size=6),
    aborted=st.integers(0, 20),
)
def test_every_request_reads_its_own_tokens_back(
    block_size, window, budget, kinds, spare, prompts, delays, aborted
):
    """Through chunks, preemption, shared prefixes (prompts of three tokens) and reused blocks."""
    layout = smallest_layout(block_size, window, budget, longest=20 + 12, kinds=kinds, spare=spare)
    engine, model = make_engine(layout, max_num_seqs=3, max_num_batched_tokens=budget)
    results: dict[int, Finished] = {}
    ids = []
    for number, (prompt, delay) in enumerate(zip(prompts, delays, strict=False)):
        ids.append(engine.add_request(prompt, GREEDY))
        if number == aborted:
            engine.abort(ids[-1])
        for _ in range(delay):
            step(engine, results)
    finish(engine, results)
    assert max(model.num_tokens, default=0) <= budget
    for number, (prompt, request_id) in enumerate(zip(prompts, ids, strict=True)):
        if number == aborted:
            assert request_id not in results
        elif kinds == "sliding":
            assert results[request_id].token_ids == windowed_greedy(prompt, 12, window)
        else:
            assert results[request_id].token_ids == greedy(prompt, 12)


def test_preempted_requests_produce_the_same_tokens():
    layout = CacheLayout(1, 30, 30, 30)
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 2, 4]]
    engine, _ = make_engine(layout, max_num_batched_tokens=16)
    ids = [engine.add_request(prompt, GREEDY) for prompt in prompts]
    results = finish(engine)
    assert engine.stats().preemptions > 0
    for prompt, request_id in zip(prompts, ids, strict=True):
        assert results[request_id].token_ids == greedy(prompt, 12)


# --- how a request ends ---------------------------------------------------------------------------


def test_ends_at_max_tokens():
    result = run_alone(PROMPT, dataclasses.replace(GREEDY, max_tokens=5))
    assert result.token_ids == ANSWER[:5]
    assert result.finish_reason is FinishReason.LENGTH
    assert run_alone(PROMPT, dataclasses.replace(GREEDY, max_tokens=1)).token_ids == ANSWER[:1]


def test_ends_at_the_models_end_token_and_reports_it():
    end = ANSWER[3]
    position = ANSWER.index(end)
    result = run_alone(PROMPT, GREEDY, eos_token_ids=[end])
    assert result.token_ids == ANSWER[: position + 1]
    assert result.finish_reason is FinishReason.STOP


def test_ignores_the_models_end_token_where_told_to():
    params = dataclasses.replace(GREEDY, ignore_eos=True)
    result = run_alone(PROMPT, params, eos_token_ids=ANSWER)
    assert result.token_ids == ANSWER
    assert result.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_ends_at_a_stop_token_of_the_request(ignore_eos):
    params = dataclasses.replace(GREEDY, stop_token_ids=(ANSWER[2],), ignore_eos=ignore_eos)
    result = run_alone(PROMPT, params)
    assert result.token_ids == ANSWER[: ANSWER.index(ANSWER[2]) + 1]
    assert result.finish_reason is FinishReason.STOP


def test_a_stop_token_at_max_tokens_counts_as_a_stop():
    params = dataclasses.replace(GREEDY, max_tokens=1, stop_token_ids=(ANSWER[0],))
    assert run_alone(PROMPT, params).finish_reason is FinishReason.STOP


def test_stop_tokens_of_one_request_do_not_end_another():
    engine, _ = make_engine()
    stops = engine.add_request(PROMPT, dataclasses.replace(GREEDY, stop_token_ids=(ANSWER[0],)))
    goes_on = engine.add_request(PROMPT, GREEDY)
    results = finish(engine)
    assert results[stops].token_ids == ANSWER[:1]
    assert results[goes_on].token_ids == ANSWER


def test_ends_at_the_length_of_the_model():
    params = dataclasses.replace(GREEDY, max_tokens=None)
    result = run_alone(PROMPT, params, max_model_len=len(PROMPT) + 7)
    assert result.token_ids == ANSWER[:7]
    assert result.finish_reason is FinishReason.LENGTH


def test_the_longest_prompt_leaves_room_for_one_token():
    result = run_alone(PROMPT, GREEDY, max_model_len=len(PROMPT) + 1)
    assert result.token_ids == ANSWER[:1]
    with pytest.raises(RequestError, match=r"has 8 tokens.*may have 8 \(max_model_len\)"):
        run_alone(PROMPT, GREEDY, max_model_len=len(PROMPT))


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, "prompt is empty"),
        ([VOCAB_SIZE], GREEDY, rf"Token id {VOCAB_SIZE} .*\(0 to {VOCAB_SIZE - 1}\)"),
        ([1, -1], GREEDY, "Token id -1 "),
        ([1], dataclasses.replace(GREEDY, stop_token_ids=(99,)), "Token id 99 "),
    ],
)
def test_refuses_what_it_cannot_run(prompt, params, message):
    engine, _ = make_engine()
    with pytest.raises(RequestError, match=message):
        engine.add_request(prompt, params)
    assert not engine.has_work


# --- abort ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding", "finished"])
@pytest.mark.parametrize("position", [0, 1])
def test_abort_in_every_state_leaves_the_others_alone(state, position):
    engine, _ = make_engine(max_num_seqs=2, max_num_batched_tokens=6)
    prompts = [[7] * 20, PROMPT] if position == 0 else [PROMPT, [7] * 20]
    ids = [engine.add_request(prompt, GREEDY) for prompt in prompts]
    victim, other = ids[position], ids[1 - position]
    results: dict[int, Finished] = {}
    reached = {
        "waiting": lambda: True,
        "prefilling": lambda: (
            engine.scheduler.running[-1].num_computed_tokens > 0
            and len(engine.scheduler.running) > position
        ),
        "decoding": lambda: len(results.get(victim, Finished()).token_ids) >= 2,
        "finished": lambda: results.get(victim, Finished()).finish_reason is not None,
    }[state]
    if state != "waiting":
        step(engine, results)
    while not reached():
        step(engine, results)
    so_far = list(results.get(victim, Finished()).token_ids)
    engine.abort(victim)
    engine.abort(victim)
    engine.scheduler.check_integrity()
    finish(engine, results)
    assert results.get(victim, Finished()).token_ids == so_far
    assert results[other].token_ids == greedy(prompts[1 - position], 12)
    assert not engine.has_work
    assert engine.step() == []


def test_abort_of_an_unknown_request_does_nothing():
    engine, _ = make_engine()
    engine.abort(12345)


# --- log-probabilities ----------------------------------------------------------------------------


def test_logprobs_are_of_the_models_own_distribution():
    """Before temperature and filters, for the token chosen and the most likely ones."""
    params = SamplingParams(temperature=3.0, top_k=20, seed=5, max_tokens=6, logprobs=4)
    result = run_alone(PROMPT, params)
    tokens = list(PROMPT)
    for token_id, logprobs in zip(result.token_ids, result.logprobs, strict=True):
        expected = next_logits(tokens).double().log_softmax(0)
        assert logprobs is not None
        assert logprobs.logprob == pytest.approx(expected[token_id].item(), abs=1e-5)
        assert logprobs.rank == 1 + int((expected > expected[token_id]).sum())
        values, ids = expected.topk(4)
        assert [token for token, _ in logprobs.top] == ids.tolist()
        assert [value for _, value in logprobs.top] == pytest.approx(values.tolist(), abs=1e-5)
        tokens.append(token_id)


def test_logprobs_only_where_asked_for_and_as_many():
    engine, _ = make_engine()
    counts = [None, 0, 2, 100]
    ids = [
        engine.add_request(PROMPT, dataclasses.replace(GREEDY, logprobs=count)) for count in counts
    ]
    results = finish(engine)
    assert results[ids[0]].logprobs == [None] * 12
    for request_id, count in zip(ids[1:], counts[1:], strict=True):
        assert results[request_id].token_ids == ANSWER
        for logprobs in results[request_id].logprobs:
            assert logprobs is not None
            assert len(logprobs.top) == min(count or 0, VOCAB_SIZE)
            assert logprobs.rank == 1


# --- random numbers -------------------------------------------------------------------------------

RANDOM = SamplingParams(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True)


def test_a_seed_reproduces_and_another_does_not():
    first, again = run_alone(PROMPT, RANDOM), run_alone(PROMPT, RANDOM)
    assert first.token_ids == again.token_ids
    assert run_alone(PROMPT, dataclasses.replace(RANDOM, seed=8)).token_ids != first.token_ids


def test_without_a_seed_every_run_differs():
    params = dataclasses.replace(RANDOM, seed=None)
    assert len({tuple(run_alone(PROMPT, params).token_ids) for _ in range(4)}) == 4


MATES = [
    SamplingParams(temperature=0.0, max_tokens=20, logprobs=3),
    SamplingParams(temperature=2.0, top_p=0.5, max_tokens=3),
    SamplingParams(temperature=0.5, top_k=2, min_p=0.1, seed=7, max_tokens=30),
    SamplingParams(temperature=1.0, frequency_penalty=1.0, seed=7, max_tokens=5, n=2),
]


@pytest.mark.parametrize(
    "params",
    [
        RANDOM,
        dataclasses.replace(RANDOM, temperature=0.0),
        dataclasses.replace(RANDOM, top_k=5),
        dataclasses.replace(RANDOM, top_p=0.7, logprobs=2),
        dataclasses.replace(RANDOM, min_p=0.2, temperature=2.0),
    ],
)
@pytest.mark.parametrize("position", [0, 2, 4])
@pytest.mark.parametrize("pool", [8, 99])
def test_tokens_do_not_depend_on_batch_mates(params, position, pool):
    """In any place of the batch, with mates that come and go, preempted or not."""
    alone = run_alone(PROMPT, params)
    layout = CacheLayout(4, pool + 4, pool + 4, 6)
    engine, _ = make_engine(layout, max_num_batched_tokens=9, max_model_len=44)
    mates = [(PROMPT[: 2 + number], mate) for number, mate in enumerate(MATES)]
    mates.insert(position, (PROMPT, params))
    ids = [engine.add_request(prompt, mate) for prompt, mate in mates]
    tokens = []
    while engine.has_work:
        tokens += [token for token in engine.step() if token.request_id == ids[position]]
        engine.scheduler.check_integrity()
    assert [token.token_id for token in tokens] == alone.token_ids
    assert [token.logprobs for token in tokens] == alone.logprobs


class FixedLogits(FakeModel):
    """Predicts the same distribution everywhere."""

    def __init__(self, layout, logits):
        super().__init__(layout)
        self._logits = logits

    def run(self, batch):
        logits, taps = super().run(batch)
        return self._logits.expand(len(logits), -1).clone(), taps


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=2.0, top_k=6),
        SamplingParams(temperature=1.0, top_p=0.8),
        SamplingParams(temperature=1.5, min_p=0.1),
        SamplingParams(temperature=1.3, top_k=9, top_p=0.9, min_p=0.05),
    ],
)
def test_tokens_follow_the_distribution(params):
    """Chi-square over 4,000 tokens of a hundred seeds, each a stream of its own."""
    logits = 2 * torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    layout = dataclasses.replace(ROOMY, num_full_blocks=2000, num_sliding_blocks=2000)
    engine = engine_for(
        FixedLogits(layout, logits),
        layout,
        vocab_size=VOCAB_SIZE,
        max_num_seqs=100,
        max_num_batched_tokens=200,
    )
    for seed in range(100):
        engine.add_request([1], dataclasses.replace(params, seed=seed, max_tokens=40))
    counts = torch.zeros(VOCAB_SIZE, dtype=torch.float64)
    for result in finish(engine).values():
        for token_id in result.token_ids:
            counts[token_id] += 1
    expected = reference_distribution(logits, params) * counts.sum()
    assert counts[expected == 0].sum() == 0, "a token that the filters cut away"
    # Pool what is too rare for the test's own approximation.
    common = expected >= 8
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected).square() / expected).sum().item()
    degrees = len(expected) - 1
    # Five standard deviations of a chi-square variable above its mean.
    assert statistic < degrees + 5 * (2 * degrees) ** 0.5


def reference_distribution(logits, params):
    """top_k, then top_p, then min_p, one token at a time."""
    probabilities = (logits.double() / params.temperature).softmax(0)
    order = probabilities.argsort(descending=True).tolist()
    kept = order[: params.top_k] if params.top_k else order
    total, mass, nucleus = sum(probabilities[kept].tolist()), 0.0, []
    for token in kept:
        if mass < params.top_p:
            nucleus.append(token)
        mass += probabilities[token].item() / total
    floor = params.min_p * probabilities.max().item()
    nucleus = [token for token in nucleus if probabilities[token].item() >= floor]
    result = torch.zeros_like(probabilities)
    result[nucleus] = probabilities[nucleus]
    return result / result.sum()


def test_greedy_ties_go_to_the_lowest_id():
    logits = torch.zeros(VOCAB_SIZE)
    logits[[31, 8, 20]] = 5.0
    engine = engine_for(FixedLogits(ROOMY, logits), ROOMY, vocab_size=VOCAB_SIZE)
    ids = [engine.add_request([1, number], GREEDY) for number in range(3)]
    results = finish(engine)
    assert all(set(results[request_id].token_ids) == {8} for request_id in ids)


def test_a_very_low_temperature_is_greedy():
    for temperature in (1e-3, 1e-6, 1e-30):
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=12)
        assert run_alone(PROMPT, params).token_ids == ANSWER

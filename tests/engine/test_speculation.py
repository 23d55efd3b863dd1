"""Guessing ahead changes no answer, whatever is guessed.

Against the fake model, whose memory is its paged cache, with a fake draft of the same kind.
"""

import dataclasses
import random
from typing import Any

import pytest
import torch
from tests.engine.fake_draft import FakeDraft
from tests.engine.fake_model import VOCAB_SIZE, FakeModel, next_logits
from tests.engine.harness import Finished

from musespark.config.sampling import SamplingParams
from musespark.engine.engine import Engine, EngineLimits, NewToken
from musespark.engine.executor import InProcessExecutor
from musespark.engine.kv_blocks import CacheLayout
from musespark.engine.speculation import Speculation, SpeculationSettings
from musespark.speculative.budget import Acceptance, StepCosts, Surcharge


def costs_of(last, draft=0.01, num_guesses=4):
    """Of a second for one token, and `last` for 101."""

    def times(rows):
        return tuple((n, 1.0 + (rows * n - 1) * (last - 1) / 100) for n in (1, 101))

    return StepCosts(times(1), times(2), times(1 + num_guesses), ((1, draft),), num_guesses)


CHEAP, DEAR = costs_of(1.0), costs_of(101.0)
# Guessing pays for one sequence or two, not for more.
CHEAP_FOR_TWO = StepCosts(
    plain=((1, 1.0), (6, 1.0)),
    verify_one=((1, 1.2), (2, 1.2), (3, 9.0), (6, 9.0)),
    verify_all=((1, 1.3), (2, 1.3), (3, 20.0), (6, 20.0)),
    draft=((1, 0.01),),
    num_guesses=4,
)
LIMITS = EngineLimits(
    vocab_size=VOCAB_SIZE,
    max_model_len=120,
    max_num_seqs=6,
    max_num_batched_tokens=24,
    eos_token_ids=frozenset(),
)
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SAMPLED = dataclasses.replace(GREEDY, temperature=0.9, seed=5)


def layout_of(kinds="both", num_blocks=200):
    return CacheLayout(
        block_size=4,
        num_full_blocks=0 if kinds == "sliding" else num_blocks,
        num_sliding_blocks=0 if kinds == "full" else num_blocks,
        sliding_window=8,
    )


def wrong(tokens):
    """Never what the target would say."""
    return -next_logits(tokens)


def half_right(tokens):
    """The target's own logits at most places, those of another model at the others."""
    return next_logits(tokens if len(tokens) % 3 else [*tokens, 7])


THINK = {"oracle": next_logits, "wrong": wrong, "half right": half_right}


def new_engine(
    think=None,
    *,
    layout=None,
    depth=1,
    runs_ahead=False,
    num_tokens=4,
    confidences=None,
    **given,
):
    """An engine around the fake model; with `think`, one that guesses ahead, and its draft."""
    layout = layout or layout_of()
    executor = InProcessExecutor(
        FakeModel(layout), layout, LIMITS.max_num_seqs, depth=depth, runs_ahead=runs_ahead
    )
    if think is None:
        return Engine(executor, layout, LIMITS)
    draft = FakeDraft(layout, think, confidences=confidences)
    settings: dict[str, Any] = {"costs": CHEAP, "fixed_width": True, **given}
    speculation = Speculation(draft, SpeculationSettings(num_tokens=num_tokens, **settings))
    engine = Engine(executor, layout, LIMITS, speculation=speculation)
    engine.draft = draft  # type: ignore[attr-defined]
    return engine


def run(engine, requests):
    """Everything reported of each request's outputs, in order."""
    engine.num_ahead = 0
    numbers = [engine.add_request(prompt, params) for prompt, params in requests]
    found: dict[tuple[int, int], list[NewToken]] = {}
    while engine.has_work:
        for token in engine.step():
            tokens = found.setdefault((token.request_id, token.output_index), [])
            assert not tokens or tokens[-1].finish_reason is None, "a token after the end"
            tokens.append(token)
        engine.num_ahead += engine._launched is not None
        engine.scheduler.check_integrity()
    assert engine.scheduler.blocks.usage == 0
    pairs = zip(numbers, requests, strict=True)
    return [
        [tuple(t[1:] for t in found[number, index]) for index in range(params.n)]
        for number, (_, params) in pairs
    ]


def without_cached(outputs):
    """Apart from how much of the prompt was cached, which depends on when it ran."""
    return [
        [[(*token[:4], *token[5:]) for token in tokens] for tokens in request]
        for request in outputs
    ]


def assert_took_in(engine, requests, outputs):
    """All that the draft was asked to go on with is the beginning of a prompt and its output."""
    whole = [
        [*prompt, *(token[0] for token in output[0])]
        for (prompt, _), output in zip(requests, outputs, strict=True)
    ]
    seen = engine.draft.seen
    assert all(any(tokens[: len(s)] == s for tokens in whole) for s in seen)


def prompt_of(length, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


# What a request may ask for, one by one and together.
WISHES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "a seed": {"temperature": 0.9, "seed": 3},
    "filters": {"temperature": 1.2, "seed": 3, "top_k": 8, "top_p": 0.9, "min_p": 0.01},
    "repetition": {"repetition_penalty": 1.7},
    "counts": {"frequency_penalty": 0.8, "presence_penalty": 0.5, "temperature": 0.8, "seed": 1},
    "bias": {"logit_bias": {3: 2.5, 9: -4.0}},
    "stop tokens": {"stop_token_ids": (2, 11, 17), "max_tokens": 60},
    "least length": {"stop_token_ids": tuple(range(0, 40, 2)), "min_tokens": 9, "max_tokens": 60},
    "probabilities": {"logprobs": 3},
    "of the prompt": {"prompt_logprobs": 2, "logprobs": 0},
    "one token": {"max_tokens": 1},
    "two tokens": {"max_tokens": 2},
    "three outputs": {"n": 3, "temperature": 1.0, "seed": 8},
    "all of it": {
        "n": 2,
        "temperature": 0.7,
        "seed": 4,
        "top_p": 0.95,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "logit_bias": {5: 1.0},
        "stop_token_ids": (1, 13),
        "min_tokens": 5,
        "logprobs": 2,
        "prompt_logprobs": 1,
    },
}


def wished(name):
    return dataclasses.replace(GREEDY, **WISHES[name])


@pytest.mark.parametrize("think", THINK.values(), ids=THINK)
@pytest.mark.parametrize("name", WISHES)
def test_what_a_request_gets_is_what_it_gets_without(name, think):
    params = wished(name)
    for length in (1, 5, 31):
        request = [(prompt_of(length), params)]
        alone = run(new_engine(), request)
        for num_tokens in (1, 4):
            assert run(new_engine(think, num_tokens=num_tokens), request) == alone


@pytest.mark.parametrize("think", THINK.values(), ids=THINK)
@pytest.mark.parametrize("kinds", ["both", "full", "sliding"])
@pytest.mark.parametrize("depth", [1, 2])
def test_mixed_batches(think, kinds, depth):
    """Prompts in chunks beside requests that guess, prompts that begin alike, few blocks."""
    rng = random.Random(1)
    common = prompt_of(30, seed=9)
    requests = []
    for number, name in enumerate(WISHES):
        prompt = common[: rng.randrange(31)] if number % 2 else []
        prompt = [*prompt, *prompt_of(rng.randrange(1, 50), seed=number)]
        requests.append((prompt, wished(name)))
    layout = layout_of(kinds)
    expected = [run(new_engine(layout=layout), [request])[0] for request in requests]
    for num_blocks in (200, 40):
        engine = new_engine(think, layout=layout_of(kinds, num_blocks), depth=depth)
        assert without_cached(run(engine, requests)) == without_cached(expected)
        # Again, behind what the first round has left in the prefix cache.
        assert without_cached(run(engine, requests)) == without_cached(expected)
        if num_blocks == 40 and kinds != "sliding":
            assert engine.stats().preemptions > 0
        stats = engine.stats().speculation
        assert stats.cycles > 0
        if think is wrong:
            assert sum(stats.accepted) < stats.cycles / 10
        if think is next_logits and kinds != "sliding":
            assert sum(stats.accepted) > stats.cycles


def test_the_draft_takes_in_what_stands_and_nothing_else():
    requests = [(prompt_of(length, seed=length), GREEDY) for length in (3, 17, 40, 40)]
    engine = new_engine(half_right)
    outputs = run(engine, requests)
    assert len(engine.draft.seen) > 20
    assert_took_in(engine, requests, outputs)


def test_right_guesses_save_steps_and_are_counted():
    request = [(prompt_of(9), dataclasses.replace(GREEDY, max_tokens=41))]
    plain, guessing = new_engine(), new_engine(next_logits, num_tokens=4)
    run(plain, request)
    run(guessing, request)
    assert plain.stats().steps == 41
    assert guessing.stats().steps == 9  # the prompt's, then eight of five tokens each
    stats = guessing.stats().speculation
    assert (stats.cycles, stats.cycle_tokens) == (8, 40)
    assert stats.verified == stats.accepted == [8, 8, 8, 8]
    assert stats.saved_seconds == pytest.approx(8 * 5 * 1.0, abs=1.0)
    assert plain.stats().speculation is None


def test_widths_follow_the_costs():
    request = [(prompt_of(9), GREEDY)]
    expected = run(new_engine(), request)
    for costs, is_worth_it in ((CHEAP, True), (DEAR, False)):
        engine = new_engine(next_logits, costs=costs, fixed_width=False)
        assert run(engine, request) == expected
        assert (engine.stats().speculation.cycles > 0) is is_worth_it
        assert bool(engine.draft.num_proposed) is is_worth_it
    # What the draft does not believe itself is not verified.
    rising = costs_of(21.0)
    engine = new_engine(
        next_logits, costs=rising, fixed_width=False, confidences=[0.9, 0.9, 0.1, 0.9]
    )
    assert run(engine, request) == expected
    assert engine.stats().speculation.verified[1] > 0
    assert engine.stats().speculation.verified[2:] == [0, 0]


def test_what_steps_take_beside_the_device_makes_guessing_worth_it():
    """By the device's times it is not; but any step of an engine takes ten times as long."""
    request = [(prompt_of(9), dataclasses.replace(GREEDY, max_tokens=40))]
    expected = run(new_engine(), request)
    short = StepCosts(
        plain=((1, 1e-6),),
        verify_one=((1, 9e-6),),
        verify_all=((1, 1e-5),),
        draft=((1, 1e-6),),
        num_guesses=4,
    )
    engine = new_engine(next_logits, costs=short, fixed_width=False)
    assert run(engine, request) == expected
    assert engine.stats().speculation.cycles > 0
    assert not Acceptance(4).is_worthwhile(1, 1, short, Surcharge())


def test_a_draft_that_is_never_right_is_not_asked_for_long():
    request = [(prompt_of(9), dataclasses.replace(GREEDY, max_tokens=100))]
    rising = costs_of(21.0, draft=0.1)
    engine = new_engine(wrong, costs=rising, fixed_width=False)
    assert run(engine, request) == run(new_engine(), request)
    assert 0 < len(engine.draft.num_proposed) < 90


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_what_waited_while_nothing_was_guessed_is_taken_in(runs_ahead):
    """The load comes and goes, requests end and are preempted; the draft misses nothing."""
    for kinds, num_blocks in (("both", 200), ("full", 200), ("both", 40), ("sliding", 40)):
        engine = new_engine(
            half_right,
            layout=layout_of(kinds, num_blocks),
            runs_ahead=runs_ahead,
            costs=CHEAP_FOR_TWO,
            fixed_width=False,
        )
        rng = random.Random(3)
        requests = [
            (
                prompt_of(rng.randrange(1, 40), seed),
                dataclasses.replace(GREEDY, max_tokens=rng.choice([3, 20, 70])),
            )
            for seed in range(14)
        ]
        expected = [run(new_engine(layout=layout_of(kinds)), [r])[0] for r in requests]
        assert without_cached(run(engine, requests)) == without_cached(expected)
        steps = engine.stats().steps
        assert 0 < len(engine.draft.num_proposed) < 0.8 * steps
        assert (engine.num_ahead > 0) is runs_ahead
        assert_took_in(engine, requests, expected)


@pytest.mark.parametrize("how", [{}, {"depth": 2}, {"runs_ahead": True}])
@pytest.mark.parametrize("last_step", [9, 20, 33, 1000])
def test_whoever_finds_a_block_finds_what_the_draft_needs_of_it(how, last_step):
    """Requests end, or are given up, while tokens wait for the draft; others go on from there."""
    # A window that no token leaves while it waits.
    layout = dataclasses.replace(layout_of(), sliding_window=40)
    engine = new_engine(half_right, layout=layout, costs=DEAR, fixed_width=False, **how)
    texts = {}
    for seed in range(6):
        prompt = prompt_of(9 + 4 * seed, seed)
        number = engine.add_request(prompt, dataclasses.replace(GREEDY, max_tokens=30 + seed))
        texts[number] = prompt
    for _ in range(last_step):
        for token in engine.step() if engine.has_work else ():
            texts[token.request_id].append(token.token_id)
    for number in texts:
        engine.abort(number)
    while engine.has_work:
        engine.step()
    assert not engine.draft.num_proposed
    engine._speculation._costs = CHEAP  # the load is gone
    for text in texts.values():
        request = ([*text, 1], GREEDY)
        outputs = run(engine, [request])
        assert without_cached(outputs) == without_cached(run(new_engine(layout=layout), [request]))
        # No more is missing than what waited, in blocks that were not full by then.
        assert outputs[0][0][0][4] > len(text) - 16 - 2 * 4
        assert_took_in(engine, [request], outputs)
        engine.draft.seen.clear()
    assert engine.draft.num_proposed


def test_a_request_that_ends_under_load_costs_the_draft_nothing():
    engine = new_engine(half_right, costs=DEAR, fixed_width=False)
    run(
        engine,
        [([seed], dataclasses.replace(GREEDY, max_tokens=11 + 7 * seed)) for seed in range(6)],
    )
    # All prompts, of a token each, in one step; of each sixteen steps those that still run.
    still_running = [sum(11 + 7 * seed >= 16 * k for seed in range(6)) for k in (1, 2)]
    assert engine.draft.num_injected == [16 * count for count in still_running]


def test_steps_run_ahead_while_nothing_is_guessed():
    """All but the first, those in which the draft takes in what waits, and those that read."""
    requests = [(prompt_of(9, seed), dataclasses.replace(GREEDY, max_tokens=70)) for seed in (1, 2)]
    expected = run(new_engine(), requests)
    for costs, least, most in ((DEAR, 58, 66), (CHEAP, 0, 0)):
        engine = new_engine(half_right, runs_ahead=True, costs=costs, fixed_width=False)
        assert run(engine, requests) == expected
        assert least <= engine.num_ahead <= most
    assert engine.draft.num_proposed


def test_aborts_leave_the_others_alone():
    prompts = [prompt_of(20, seed) for seed in range(4)]
    expected = [run(new_engine(), [(prompt, SAMPLED)])[0][0] for prompt in prompts]
    for steps, settings in [
        *((steps, {"depth": 2}) for steps in (1, 2, 3, 5)),
        *((steps, {"runs_ahead": True, "costs": DEAR, "fixed_width": False}) for steps in (3, 9)),
    ]:
        engine = new_engine(half_right, **settings)
        numbers = [engine.add_request(prompt, SAMPLED) for prompt in prompts]
        found = {number: Finished() for number in numbers}
        for count in range(200):
            if count == steps:
                engine.abort(numbers[1])
            for token in engine.step():
                found[token.request_id].token_ids.append(token.token_id)
            engine.scheduler.check_integrity()
            if not engine.has_work:
                break
        for place, number in enumerate(numbers):
            tokens = [token[0] for token in expected[place]]
            mine = found[number].token_ids
            assert mine == (tokens[: len(mine)] if place == 1 else tokens)


class Chain(FakeModel):
    """The next token depends on the last one only: rows of a table of logits."""

    def __init__(self, layout, table):
        super().__init__(layout)
        self._table = table

    def run(self, batch):
        return self._table[batch.token_ids[batch.logit_rows]], (batch.token_ids[:, None].float(),)


V = 6
SAMPLES = 20_000


def chain_counts(target, draft, params, monkeypatch, *, lies=False, **settings):
    """How often each token followed each other one, [V, V], and tokens per cycle."""
    numbers = random.Random(7)
    monkeypatch.setattr("secrets.randbits", numbers.getrandbits)
    layout = layout_of(num_blocks=1000)
    limits = EngineLimits(V, 512, 16, 256, frozenset())
    proposer = FakeDraft(layout, lambda tokens: draft[tokens[-1]], lies=lies)
    engine = Engine(
        InProcessExecutor(Chain(layout, target), layout, 16),
        layout,
        limits,
        speculation=Speculation(
            proposer, SpeculationSettings(num_tokens=3, costs=CHEAP, fixed_width=True, **settings)
        ),
    )
    length = 200
    for number in range(SAMPLES // length):
        engine.add_request([number % V], dataclasses.replace(params, max_tokens=length))
    last = {number: number % V for number in range(SAMPLES // length)}
    counts = torch.zeros(V, V)
    while engine.has_work:
        for token in engine.step():
            counts[last[token.request_id], token.token_id] += 1
            last[token.request_id] = token.token_id
    assert counts.sum() == SAMPLES
    stats = engine.stats().speculation
    assert stats is not None
    return counts, stats.cycle_tokens / stats.cycles


def chi_square(counts, probabilities):
    """Pearson's statistic in standard deviations from its mean."""
    expected = probabilities * counts.sum(dim=1, keepdim=True)
    assert (counts[probabilities == 0] == 0).all()
    possible = probabilities > 0
    statistic = ((counts - expected) ** 2 / expected)[possible].sum()
    freedom = int(possible.sum()) - V
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


def tables():
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(V, V, generator=generator)
    return target, target + 0.8 * torch.randn(V, V, generator=generator)


@pytest.mark.parametrize(
    "settings",
    [
        {"verification": "block"},
        {"verification": "token"},
        {"draws_at_random": False},
    ],
    ids=["block", "token", "most likely"],
)
def test_the_sampled_distribution_is_the_targets(settings, monkeypatch):
    target, draft = tables()
    params = SamplingParams(temperature=0.8, top_p=0.95)
    cut = torch.zeros(V, V)
    for row, logits in enumerate((target / 0.8).double()):
        ranked = logits.softmax(-1).sort(descending=True)
        kept = ranked.values.cumsum(0) - ranked.values < 0.95
        cut[row, ranked.indices[kept]] = ranked.values[kept].float()
    counts, per_cycle = chain_counts(target, draft, params, monkeypatch, **settings)
    assert chi_square(counts, cut / cut.sum(1, keepdim=True)) < 5
    assert per_cycle > 1.4
    # The test can fail: this is not the target's distribution.
    assert chi_square(counts, target.softmax(-1)) > 50


def test_a_draft_that_lies_about_its_distribution_is_found_out(monkeypatch):
    """The same test, with what verification relies on taken away."""
    target, draft = tables()
    counts, _ = chain_counts(target, draft, SamplingParams(temperature=1.0), monkeypatch, lies=True)
    assert chi_square(counts, target.softmax(-1)) > 20


def test_blocks_keep_more_tokens_than_token_by_token_and_both_more_than_equal_ones(monkeypatch):
    target, draft = tables()
    params = SamplingParams(temperature=1.0)
    block, token, likely = (
        chain_counts(target, draft, params, monkeypatch, **settings)[1]
        for settings in (
            {"verification": "block"},
            {"verification": "token"},
            {"draws_at_random": False},
        )
    )
    assert block > token > likely

"""Which guesses are verified: as the load has it, and never by looking at what comes later."""

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from musespark.speculative.budget import (
    Acceptance,
    StepCosts,
    Surcharge,
    check_costs,
    choose_widths,
    smoothed,
)

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def costs_of(seconds, draft=((1, 0.1),), num_guesses=5):
    """Of steps that take `seconds(tokens)`, whatever the tokens are."""
    plain, one, every = (
        tuple((n, seconds(n * rows)) for n in SIZES) for rows in (1, 2, 1 + num_guesses)
    )
    return StepCosts(plain, one, every, draft, num_guesses)


# A step whose time hardly grows at first, and in proportion to its tokens later.
RISING = costs_of(lambda n: max(1.0 + n / 80, n / 16))
FLAT = costs_of(lambda _: 1.0)
PROPORTIONAL = costs_of(float)
# The first guess is dear, further ones are not.
JUMP = StepCosts(
    plain=((1, 1.0), (256, 28.0)),
    verify_one=((1, 1.9), (256, 29.0)),
    verify_all=((1, 2.0), (256, 30.0)),
    draft=((1, 0.1),),
    num_guesses=5,
)

AS_MEASURED = Surcharge()

chances = st.lists(st.floats(0.01, 1), max_size=6).map(lambda c: sorted(c, reverse=True))


def rate(survival, widths, num_sequences, num_tokens, costs):
    gained = sum(sum(chances[:width]) for chances, width in zip(survival, widths, strict=True))
    curve = costs.verify_curve(num_sequences, num_tokens)
    sizes, seconds = [size for size, _ in curve], [seconds for _, seconds in curve]
    return (num_sequences + gained) / float(np.interp(num_tokens + sum(widths), sizes, seconds))


def test_times_between_and_beyond_what_was_measured():
    costs = costs_of(lambda n: 1.0 + n / 10)
    assert [costs.plain_seconds(n) for n in (1, 8, 20, 256, 512)] == pytest.approx(
        [1.1, 1.8, 3.0, 26.6, 52.2]
    )
    assert costs.draft_seconds(40) == 0.1


def test_what_verifying_takes_depends_on_sequences_and_tokens():
    assert JUMP.verify_curve(1, 1) == ((1, 1.0), (2, 1.9), (6, 2.0))
    sizes, seconds = zip(*JUMP.verify_curve(256, 256), strict=True)
    assert sizes == (256, 512, 1536)
    assert seconds == (28.0, 29.0, 30.0)
    # A prompt of 30 tokens beside it adds what it adds to a plain step.
    extra = JUMP.plain_seconds(31) - 1
    sizes, seconds = zip(*JUMP.verify_curve(1, 31), strict=True)
    assert sizes == (31, 32, 36)
    assert seconds == pytest.approx((1.0 + extra, 1.9 + extra, 2.0 + extra))
    # One guess is all that there is.
    costs = costs_of(float, num_guesses=1)
    assert costs.verify_curve(4, 4) == ((4, 4.0), (8, 8.0))


def test_width_falls_to_zero_as_the_batch_grows():
    totals = []
    for num_sequences in (1, 4, 16, 48, 128):
        survival = [[0.8, 0.64, 0.5, 0.4, 0.3]] * num_sequences
        widths = choose_widths(survival, num_sequences, num_sequences, RISING, AS_MEASURED)
        totals.append(sum(widths) / num_sequences)
    assert totals[0] == 5
    assert totals[-1] == 0
    assert totals == sorted(totals, reverse=True)


def test_free_rows_are_all_used_and_dear_ones_not_at_all():
    survival = [[0.9, 0.5, 0.01], [0.2]]
    assert choose_widths(survival, 2, 2, FLAT, AS_MEASURED) == [3, 1]
    assert choose_widths(survival, 2, 2, PROPORTIONAL, AS_MEASURED) == [0, 0]
    assert choose_widths([], 3, 3, FLAT, AS_MEASURED) == []


def test_the_likely_guesses_go_first():
    costs = costs_of(lambda n: 1.0 + 0.6 * (n - 1), num_guesses=3)
    assert choose_widths([[0.9, 0.8, 0.2], [0.3, 0.2, 0.1]], 2, 2, costs, AS_MEASURED) == [2, 0]


def test_a_dear_first_row_does_not_hide_the_cheap_ones_behind_it():
    survival = [[0.9, 0.85, 0.8, 0.75, 0.7]]
    assert choose_widths(survival, 1, 1, JUMP, AS_MEASURED) == [5]


def test_a_step_is_filled_up_to_a_round_number_of_tokens():
    def total(likely, num_sequences=4):
        survival = [[0.9] * count + [0.01] * (20 - count) for count in likely]
        costs = costs_of(lambda n: 1.0 + n / 25, num_guesses=20)
        widths = choose_widths(survival, num_sequences, num_sequences, costs, AS_MEASURED)
        return sum(widths) + num_sequences

    assert total([3, 3, 3, 1]) == 14  # any number, as long as they are few
    assert total([4, 4, 4, 3]) == 24
    assert total([5, 5, 5, 5]) == 24
    assert total([6, 5, 5, 5]) == 32
    assert total([0, 0, 0, 0]) == 4
    assert total([0] * 19, num_sequences=19) == 19  # not for its own sake
    survival = [[0.9] * 5] * 3 + [[]]
    # Nothing is left to fill it with.
    assert choose_widths(survival, 4, 4, FLAT, AS_MEASURED) == [5, 5, 5, 0]


@given(st.lists(chances, max_size=6), st.integers(0, 20), st.sampled_from([RISING, FLAT, JUMP]))
def test_a_decision_does_not_depend_on_what_comes_later(survival, extra, costs):
    num = len(survival) + extra + 1
    widths = choose_widths(survival, num, num, costs, AS_MEASURED)
    assert all(0 <= w <= len(c) for w, c in zip(widths, survival, strict=True))
    rng = random.Random(extra)
    for place, width in enumerate(widths):
        # A guess that was taken is taken whatever those behind it look like.
        for kept in range(1, width + 1):
            other = list(survival)
            later = [survival[place][kept - 1] * rng.random() for _ in range(rng.randrange(6))]
            other[place] = survival[place][:kept] + sorted(later, reverse=True)
            assert choose_widths(other, num, num, costs, AS_MEASURED)[place] >= kept
        # One that was refused is refused whatever those behind it look like.
        if width < len(survival[place]):
            other = list(survival)
            other[place] = survival[place][: width + 1] + [survival[place][width]] * 3
            assert choose_widths(other, num, num, costs, AS_MEASURED)[place] == width


# So few that no step is filled up to a round number of tokens.
@given(st.lists(chances, max_size=2))
def test_no_other_uniform_number_of_rows_is_faster_on_a_convex_curve(survival):
    num = len(survival) + 1
    widths = choose_widths(survival, num, num, RISING, AS_MEASURED)
    best = rate(survival, widths, num, num, RISING)
    for width in range(7):
        other = [min(width, len(chances)) for chances in survival]
        assert rate(survival, other, num, num, RISING) <= best + 1e-9


def test_acceptance_follows_what_happens_and_forgets_it_slowly():
    acceptance = Acceptance(3)
    assert acceptance.is_worthwhile(1, 1, RISING, AS_MEASURED)
    before = acceptance.survival
    for _ in range(400):
        acceptance.observe([(3, 0, [0.9, 0.8, 0.7])])
    assert acceptance.survival[0] < 0.01
    # What was never reached is not known to be wrong.
    assert acceptance.survival[1] / acceptance.survival[0] == pytest.approx(0.75)
    assert not acceptance.is_worthwhile(1, 1, RISING, AS_MEASURED)
    for _ in range(3000):
        acceptance.forget()
    assert acceptance.survival == pytest.approx(before, rel=0.1)
    assert acceptance.is_worthwhile(1, 1, RISING, AS_MEASURED)


def test_what_an_engine_does_around_steps_counts_too():
    """A step of the device is short here beside what the host does around it."""
    costs = StepCosts(
        plain=((1, 0.4), (32, 0.6)),
        verify_one=((1, 0.9), (32, 1.2)),
        verify_all=((1, 1.0), (32, 1.4)),
        draft=((1, 0.5), (32, 0.7)),
        num_guesses=5,
    )
    acceptance, surcharge = Acceptance(5), Surcharge()
    assert not acceptance.is_worthwhile(1, 1, costs, surcharge)
    for _ in range(30):
        surcharge.observe(1, 0.8, 0.4, verifies=False)
    assert surcharge.plain_seconds(1) == pytest.approx(0.4)
    assert surcharge.verify_seconds(1) == pytest.approx(0.4)
    assert acceptance.is_worthwhile(1, 1, costs, surcharge)
    # So it does when guesses are chosen: a longer step is less dear beside the rest of it.
    chances = [[0.75, 0.5, 0.3, 0.2, 0.1]]
    assert choose_widths(chances, 1, 1, costs, AS_MEASURED) < choose_widths(
        chances, 1, 1, costs, surcharge
    )
    # Of other numbers of sequences nothing is known.
    assert surcharge.plain_seconds(16) == 0
    assert not acceptance.is_worthwhile(1, 1, costs, AS_MEASURED)
    # Guessing takes as long as the tokens that it brings; and is tried again some time.
    for _ in range(60):
        surcharge.observe(1, 3.0, 1.5, verifies=True)
    assert surcharge.verify_seconds(1) == pytest.approx(1.5)
    assert not acceptance.is_worthwhile(1, 1, costs, surcharge)
    for _ in range(6000):
        surcharge.observe(1, 0.8, 0.4, verifies=False)
    assert acceptance.is_worthwhile(1, 1, costs, surcharge)
    # Steps that were faster than measured say nothing, and one that hung little.
    for _ in range(60):
        surcharge.observe(1, 0.3, 0.4, verifies=False)
    assert surcharge.plain_seconds(1) == pytest.approx(0, abs=1e-3)
    surcharge.observe(1, 1000.0, 0.4, verifies=False)
    assert surcharge.plain_seconds(1) < 0.4


def test_nobody_guesses_where_the_target_has_enough_to_do():
    acceptance = Acceptance(5)
    for _ in range(1000):
        acceptance.observe([(5, 5, [0.9] * 5)])
    assert acceptance.is_worthwhile(1, 1, RISING, AS_MEASURED)
    assert not acceptance.is_worthwhile(1, 1, PROPORTIONAL, AS_MEASURED)
    costs = costs_of(lambda n: 1.0 + n / 200)
    assert acceptance.is_worthwhile(100, 100, costs, AS_MEASURED)
    slow = dataclasses.replace(costs, draft=((1, 0.1), (100, 9.0)))
    assert not acceptance.is_worthwhile(100, 100, slow, AS_MEASURED)


def test_guesses_that_are_not_verified_count_as_the_draft_thinks():
    """Only the likely ones are verified. The rates that come of it are those of all."""
    rng = random.Random(0)
    acceptance, biased = Acceptance(2), Acceptance(2)
    for _ in range(50):
        guesses = []
        for _ in range(400):
            survival = [1.0, 0.9] if rng.random() < 0.5 else [0.2, 0.1]
            width = 2 if survival[0] == 1 else 0
            guesses.append((width, width and 1 + (rng.random() < survival[1]), survival))
        acceptance.observe(guesses)
        biased.observe((width, count, survival[:width]) for width, count, survival in guesses)
    # The second is right if the first is: in 0.9 of the one kind, and in 0.5 of the other.
    assert acceptance.survival[0] == pytest.approx(0.6, abs=0.1)
    assert acceptance.survival[1] / acceptance.survival[0] == pytest.approx(0.5 / 0.6, abs=0.1)
    assert biased.survival[0] > 0.95
    # A draft that thinks nothing of its guess, and one that says nothing.
    acceptance.observe([(0, 0, [0.0, 0.0]), (0, 0, [])])
    assert acceptance.survival[0] < 0.6


def test_noise_does_not_make_a_larger_step_look_faster():
    assert smoothed([(1, 1.0), (2, 3.0), (4, 2.0), (8, 4.0)]) == (
        (1, 1.0),
        (2, 2.0),
        (4, 2.0),
        (8, 4.0),
    )
    assert check_costs(RISING)
    for points in ((), ((0, 1.0),), ((1, 0.0),), ((1, 1.0), (1, 2.0))):
        assert not check_costs(dataclasses.replace(RISING, verify_all=points))

"""Which guesses are verified: as the load has it, and never by looking at what comes later."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from musespark.speculative.budget import Acceptance, StepCosts, check_costs, choose_widths, smoothed


def costs_of(*points, draft=((1, 0.1),)):
    return StepCosts(plain=points, verify=points, draft=draft)


# A step whose time hardly grows at first, and in proportion to its tokens later.
RISING = costs_of((1, 1.0), (8, 1.1), (32, 2.0), (64, 4.0), (256, 16.0))
FLAT = costs_of((1, 1.0), (256, 1.0))
PROPORTIONAL = costs_of((1, 1.0), (256, 256.0))
# The first guess is dear, further ones are not.
JUMP = StepCosts(
    plain=((1, 1.0), (256, 28.0)), verify=((2, 1.9), (16, 2.0), (256, 30.0)), draft=((1, 0.1),)
)

chances = st.lists(st.floats(0.01, 1), max_size=6).map(lambda c: sorted(c, reverse=True))


def rate(survival, widths, num_sequences, num_tokens, costs):
    gained = sum(sum(chances[:width]) for chances, width in zip(survival, widths, strict=True))
    return (num_sequences + gained) / (
        costs.verify_seconds if sum(widths) else costs.plain_seconds
    )(num_tokens + sum(widths))


def test_times_between_and_beyond_what_was_measured():
    assert [RISING.plain_seconds(n) for n in (1, 8, 20, 256, 512)] == pytest.approx(
        [1.0, 1.1, 1.55, 16.0, 32.0]
    )
    assert RISING.draft_seconds(40) == 0.1


def test_width_falls_to_zero_as_the_batch_grows():
    totals = []
    for num_sequences in (1, 4, 16, 48, 128):
        survival = [[0.8, 0.64, 0.5, 0.4, 0.3]] * num_sequences
        widths = choose_widths(survival, num_sequences, num_sequences, RISING)
        totals.append(sum(widths) / num_sequences)
    assert totals[0] == 5
    assert totals[-1] == 0
    assert totals == sorted(totals, reverse=True)


def test_free_rows_are_all_used_and_dear_ones_not_at_all():
    survival = [[0.9, 0.5, 0.01], [0.2]]
    assert choose_widths(survival, 2, 2, FLAT) == [3, 1]
    assert choose_widths(survival, 2, 2, PROPORTIONAL) == [0, 0]
    assert choose_widths([], 3, 3, FLAT) == []


def test_the_likely_guesses_go_first():
    costs = costs_of((1, 1.0), (101, 61.0))
    assert choose_widths([[0.9, 0.8, 0.2], [0.3, 0.2, 0.1]], 2, 2, costs) == [2, 0]


def test_a_dear_first_row_does_not_hide_the_cheap_ones_behind_it():
    survival = [[0.9, 0.85, 0.8, 0.75, 0.7]]
    assert choose_widths(survival, 1, 1, JUMP) == [5]


@given(st.lists(chances, max_size=6), st.integers(0, 20), st.sampled_from([RISING, FLAT, JUMP]))
def test_a_decision_does_not_depend_on_what_comes_later(survival, extra, costs):
    num = len(survival) + extra + 1
    widths = choose_widths(survival, num, num, costs)
    assert all(0 <= w <= len(c) for w, c in zip(widths, survival, strict=True))
    rng = random.Random(extra)
    for place, width in enumerate(widths):
        # A guess that was taken is taken whatever those behind it look like.
        for kept in range(1, width + 1):
            other = list(survival)
            later = [survival[place][kept - 1] * rng.random() for _ in range(rng.randrange(6))]
            other[place] = survival[place][:kept] + sorted(later, reverse=True)
            assert choose_widths(other, num, num, costs)[place] >= kept
        # One that was refused is refused whatever those behind it look like.
        if width < len(survival[place]):
            other = list(survival)
            other[place] = survival[place][: width + 1] + [survival[place][width]] * 3
            assert choose_widths(other, num, num, costs)[place] == width


@given(st.lists(chances, max_size=5))
def test_no_other_uniform_number_of_rows_is_faster_on_a_convex_curve(survival):
    num = len(survival) + 1
    widths = choose_widths(survival, num, num, RISING)
    best = rate(survival, widths, num, num, RISING)
    for width in range(7):
        other = [min(width, len(chances)) for chances in survival]
        assert rate(survival, other, num, num, RISING) <= best + 1e-9


def test_acceptance_follows_what_happens_and_forgets_it_slowly():
    acceptance = Acceptance(3)
    assert acceptance.is_worthwhile(1, 1, RISING)
    before = acceptance.survival
    for _ in range(400):
        acceptance.observe(3, 0)
    assert acceptance.survival[0] < 0.01
    # What was never reached is not known to be wrong.
    assert acceptance.survival[1] / acceptance.survival[0] == pytest.approx(0.75)
    assert not acceptance.is_worthwhile(1, 1, RISING)
    for _ in range(3000):
        acceptance.forget()
    assert acceptance.survival == pytest.approx(before, rel=0.1)
    assert acceptance.is_worthwhile(1, 1, RISING)


def test_nobody_guesses_where_the_target_has_enough_to_do():
    acceptance = Acceptance(5)
    for _ in range(1000):
        acceptance.observe(5, 5)
    assert acceptance.is_worthwhile(1, 1, RISING)
    assert not acceptance.is_worthwhile(1, 1, PROPORTIONAL)
    assert not acceptance.is_worthwhile(
        100, 100, costs_of(*RISING.plain, draft=((1, 0.1), (100, 9.0)))
    )


def test_noise_does_not_make_a_larger_step_look_faster():
    assert smoothed([(1, 1.0), (2, 3.0), (4, 2.0), (8, 4.0)]) == (
        (1, 1.0),
        (2, 2.0),
        (4, 2.0),
        (8, 4.0),
    )
    assert check_costs(RISING)
    for points in ((), ((0, 1.0),), ((1, 0.0),), ((1, 1.0), (1, 2.0))):
        assert not check_costs(costs_of(*points))

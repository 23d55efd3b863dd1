"""Times are measured once, and remembered under all that they depend on."""

import pytest

from musespark.speculative.budget import StepCosts
from musespark.speculative.costs import cached_costs, measure_costs


class Clock:
    """Goes by what is run, and by a hitch now and then."""

    def __init__(self):
        self.now, self.runs = 0.0, 0

    def __call__(self):
        return self.now

    def run(self, seconds):
        self.runs += 1
        self.now += seconds + (5.0 if self.runs % 7 in (1, 4) else 0.0)


@pytest.mark.parametrize("plain_steps", [1, 4])
def test_the_fastest_of_several_runs_after_the_first_ones(plain_steps):
    clock = Clock()
    costs = measure_costs(
        lambda n, rows, count: clock.run(count * (0.5 + 0.1 * n * rows)),
        lambda _: clock.run(0.05),
        sizes=(1, 4, 16),
        num_guesses=4,
        plain_steps=plain_steps,
        clock=clock,
    )
    assert [size for size, _ in costs.verify_all] == [1, 4, 16]
    assert [s for _, s in costs.plain] == pytest.approx([0.6, 0.9, 2.1])
    assert [s for _, s in costs.verify_one] == pytest.approx([0.7, 1.3, 3.7])
    assert [s for _, s in costs.verify_all] == pytest.approx([1.0, 2.5, 8.5])
    assert [s for _, s in costs.draft] == pytest.approx([0.05] * 3)
    assert costs.num_guesses == 4


def test_costs_are_remembered_until_something_changes(tmp_path):
    folder = tmp_path / "a" / "b"
    measured: list[int] = []

    def measure():
        measured.append(len(measured))
        points = ((1, 1.0 + len(measured)), (8, 9.0))
        return StepCosts(points, points, points, points, 2)

    first = cached_costs(folder, {"model": "a", "threads": 2}, measure)
    assert cached_costs(folder, {"threads": 2, "model": "a"}, measure) == first
    assert len(measured) == 1
    assert cached_costs(folder, {"model": "a", "threads": 1}, measure) != first
    assert len(measured) == 2
    for path in folder.iterdir():
        path.write_text('{"plain": [[1, -1]]}')
    assert cached_costs(folder, {"model": "a", "threads": 2}, measure) != first
    assert len(measured) == 3


def test_where_nothing_can_be_written_it_is_measured_each_time(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    points = ((1, 1.0),)
    costs = StepCosts(points, points, points, points, 1)
    assert cached_costs(blocked, {}, lambda: costs) == costs
